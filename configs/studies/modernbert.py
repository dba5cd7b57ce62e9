"""Steps from BERT to ModernBERT, one more in each row: what is each of them worth?

    bert-jax study studies/modernbert --workdir=runs/modernbert --config.pretraining.data.path=DATASET \\
      --config.task_data=FOLDER

The switches of ModernBERT's architecture come first (Warner et al. 2024, arXiv:2412.13663), then those of its
objective and of its optimizer; the last row has Muon instead of StableAdamW. The gated feed-forward layer has two
thirds of the units, so that it has as many weights. All rows have as many steps: with 30% of the tokens predicted a
step takes more FLOPs, by the masked-LM head's share. `studies/modernbert:128` has 128 units in place of 768, in heads
of 64; the rows' feed-forward layers follow. FOLDER holds glue/STS-B, glue/SST-2, glue/MRPC and conll2003.

Runs: 33 of pre-training (1,081,344,000,000 tokens), 2640 of fine-tuning. Hardware, time: not yet run.
`benchmarks/modernbert_ladder.py` is the same with BERT-Tiny, and equal FLOPs.
Score to expect: unknown.
"""

from collections.abc import Mapping

from ml_collections import ConfigDict

from bert_jax.config_keys import StudyRow
from bert_jax.configs.studies import _tasks, default

SWITCHES: dict[str, Mapping[str, object]] = {
    "BERT": {},
    "pre-norm": {"model.pre_norm": True},
    "no biases": {
        "model.attention_bias": False, "model.mlp_bias": False, "model.norm_bias": False, "model.classifier_bias": False
    },
    "rotary": {"model.position_embedding_type": "rotary", "model.global_rope_theta": 1e4},
    "GeGLU": {"model.gated_mlp": True},
    "local attention": {"model.global_attn_every_n_layers": 3},
    "No NSP": {"objective.nsp": False},
    "30% masks": {"objective.mask_rate": 0.3},
    "WSD": {"optimizer.schedule": "wsd"},
    "StableAdamW": {"optimizer.name": "stable_adamw"},
    "Muon": {"optimizer.name": "muon"},
}  # fmt: skip
"""Keys that each row changes, beside those of the rows before it."""


def rows(hidden_size: int) -> tuple[StudyRow, ...]:
    """Returns the rows for a model of `hidden_size`, whose feed-forward layer has 4 times as many units without a gate.

    The units of the gated layer are a multiple of 8.
    """
    gated = {"model.intermediate_size": round(hidden_size / 3) * 8}
    made: list[StudyRow] = []
    keys: dict[str, object] = {}
    for name, switch in SWITCHES.items():
        keys = {**keys, **switch, **(gated if name == "GeGLU" else {})}
        made.append(StudyRow(name if not made else f"+ {name}", pretraining=dict(keys)))
    return tuple(made)


def get_config(hidden_size: str = "768") -> ConfigDict:
    config = default.get_config()
    model = config.pretraining.model
    model.hidden_size = int(hidden_size)
    model.num_attention_heads, model.intermediate_size = model.hidden_size // 64, 4 * model.hidden_size
    config.pretraining.optimizer.bias_correction = True
    config.title = "From BERT to ModernBERT"
    config.note = "Each row has the changes of those above it; Muon replaces StableAdamW."
    config.perplexity = True
    config.pretraining_seeds = (0, 1, 2)
    config.rows = rows(model.hidden_size)
    config.tasks = (_tasks.STS_B, _tasks.SST_2, _tasks.MRPC, _tasks.NER)
    return config
