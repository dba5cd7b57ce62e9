"""ModernBERT (Warner et al. 2024, arXiv:2412.13663): `base` or `large`, with the released sizes.

    bert-jax pretrain --config=modernbert_base --workdir=runs/modernbert_base --config.data.path=DATASET
    bert-jax pretrain --config=modernbert:large ...

The model has rotary positions, pre-LN layers, gated feed-forward layers (GeGLU), no biases but that of the output, and
no segments. Two of three layers attend to 64 tokens on each side only. Each of these steps from BERT is a key of
`config.model` that can be set back, such as --config.model.pre_norm=False.

It is pre-trained without next sentences (prepare with --pairs none), and 30% of the tokens are predicted. Optimizer,
schedule and batch are those of `default`, not the paper's.

Parameters, with 50,368 pieces:

    size     layers  hidden  heads  feed-forward   parameters
    base         22     768     12         1,152  149,655,232
    large        28    1024     16         2,624  395,881,664

Tokens: 32,768,000,000 (1,000,000 steps x 256 sequences x 128); the paper's run has 2 trillion.
Hardware, time: not yet run.
Score to expect: unknown for this recipe.
"""

from ml_collections import ConfigDict

from bert_jax.configs import default

SIZES = {"base": (22, 768, 12, 1_152), "large": (28, 1024, 16, 2_624)}
"""Layers, hidden size, heads and feed-forward size."""


def get_config(size: str = "base") -> ConfigDict:
    if size not in SIZES:
        raise ValueError(f"{size!r}: unknown size; expected {' or '.join(SIZES)}")
    config = default.get_config()
    model = config.model
    (
        model.num_hidden_layers, model.hidden_size, model.num_attention_heads, model.intermediate_size,
    ) = SIZES[size]  # fmt: skip
    model.max_position_embeddings = 8_192
    model.position_embedding_type = "rotary"
    model.global_attn_every_n_layers = 3
    model.pre_norm = model.gated_mlp = model.depth_scaled_init = True
    model.attention_bias = model.mlp_bias = model.norm_bias = model.classifier_bias = False
    model.pooler = False
    model.type_vocab_size = 0
    model.layer_norm_eps = 1e-5
    model.hidden_dropout_prob = model.attention_probs_dropout_prob = 0.0
    model.attention_output_dropout = 0.1
    config.objective.nsp = False
    config.objective.mask_rate = 0.3
    return config
