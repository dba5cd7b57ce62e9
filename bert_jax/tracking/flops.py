"""Model FLOPs, for model FLOPs utilization (MFU).

Convention: only matrix products, over padded tokens, the masked-LM head at the gathered positions, and three times the
forward pass. BERT-LARGE has 240.6 GFLOP per sequence at 128 tokens with 20 predictions, 1,019.8 at 512 with 76.
"""

from bert_jax.model import BertConfig
from bert_jax.model.task_heads import TaskHead, feature_size


def training_flops(config: BertConfig, seq_len: int, predictions: int, sequences: int = 1) -> float:
    """Counts FLOPs of the forward and backward pass of a row with one sequence, or several packed ones."""
    return 3.0 * _forward_flops(config, seq_len, predictions, sequences)


def finetuning_flops(config: BertConfig, head: TaskHead, seq_len: int) -> float:
    """Counts FLOPs of a row in fine-tuning. A frozen encoder runs only forward, and not at all for its embeddings."""
    encoder = 0.0 if head.features == "embeddings" else _forward_flops(config, seq_len, 0, 1)
    widths = [feature_size(head.features, config), *[2 * head.bilstm] * (head.bilstm_layers - 1)]
    bilstm = sum(2 * 2 * seq_len * 4 * head.bilstm * (width + head.bilstm) for width in widths)
    return (1.0 if head.features else 3.0) * encoder + 3.0 * bilstm


def _forward_flops(config: BertConfig, seq_len: int, predictions: int, sequences: int) -> float:
    d, f = config.hidden_size, config.intermediate_size
    projections = 2 * seq_len * (4 * d * d + 2 * d * f)
    attention = 2 * 2 * seq_len * seq_len * d
    mlm_head = 2 * predictions * (d * d + d * config.vocab_size)
    nsp_head = 2 * sequences * (d * d + 2 * d)
    return float(config.num_hidden_layers * (projections + attention) + mlm_head + nsp_head)


def recomputed_flops(config: BertConfig, seq_len: int, remat: str, attention: str = "xla") -> float:
    """Counts FLOPs of a row's matrix products that the backward pass recomputes; they are not model FLOPs.

    `remat` recomputes them, and a fused attention kernel (any but "xla") the queries by keys, which it does not store.
    """
    d, f = config.hidden_size, config.intermediate_size
    product = 2.0 * seq_len * seq_len * d  # queries by keys, or probabilities by values
    fused = 0.0 if attention == "xla" else product
    per_layer = {
        "none": fused,
        "attention": fused or product,
        "dots": 2 * product + fused,
        "full": 2 * product + fused + 2 * seq_len * (4 * d * d + 2 * d * f),
    }
    return config.num_hidden_layers * per_layer[remat]
