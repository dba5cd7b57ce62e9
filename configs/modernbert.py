"""ModernBERT (Warner et al. 2024, arXiv:2412.13663): `base` or `large`, with the released sizes.

    bert-jax pretrain --config=modernbert_base --workdir=runs/modernbert_base --config.data.path=DATASET
    bert-jax pretrain --config=modernbert:large ...
    bert-jax pretrain --config=modernbert:base_released ... \\
      --config.phases.6.data.path=LONG --config.phases.7.data.path=LONG

The model has rotary positions, pre-LN layers, gated feed-forward layers (GeGLU), no biases but that of the output, and
no segments. Two of three layers attend to 64 tokens on each side only. Each of these steps from BERT is a key of
`config.model` that can be set back, such as --config.model.pre_norm=False.

It is pre-trained on packed rows without next sentences (prepare with --pairs none), 30% of the tokens are predicted,
and StableAdamW follows a trapezoidal schedule, which decays with 1 - sqrt in its last fifth.

`base_released` and `large_released` are the phases of the released models, by tokens: a warm-up of 3 billion; a batch
that grows in six steps over the first 50 billion (base) or 10 billion (large), where the paper's grows smoothly; 1.7
trillion of 1,024 tokens at a constant rate, which the paper's run of `large` reduced for the last 800 billion; 250
billion of 8,192 tokens, whose global layers have rotary angles of base 160,000 instead of 10,000; and a decay of 50
billion. DATASET has sequences of 1,024 tokens, LONG of 8,192.

`base_mmbert` has the falling mask rates of mmBERT (Marone et al. 2025, arXiv:2509.06888): 30% for 2.3 trillion tokens,
15% for 600 billion of 8,192 tokens, and 5% for the decay of 100 billion; batches are those of `base_released`.

Parameters, with 50,368 pieces:

    size     layers  hidden  heads  feed-forward   parameters
    base         22     768     12         1,152  149,655,232
    large        28    1024     16         2,624  395,881,664

Tokens: 26,214,400,000 (100,000 steps x 256 rows x 1,024); released 2 trillion.
Hardware, time: not yet run.
Score to expect: unknown for this recipe.
"""

from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from bert_jax.configs import default

SIZES = {"base": (22, 768, 12, 1_152), "large": (28, 1024, 16, 2_624)}
"""Layers, hidden size, heads and feed-forward size."""
RATES = {"base": (8e-4, 3e-4), "large": (5e-4, 5e-5)}
"""Learning rates at 1,024 tokens and at 8,192."""
RAMPS = {
    "base": ((768, 1_536, 2_304, 3_072, 3_840), 50e9, 4_608, 72),
    "large": ((448, 1_344, 2_240, 3_136, 4_032), 10e9, 4_928, 77),
}
"""Growing batches of 1,024 tokens, the tokens of all of them, the batch that follows, and that of 8,192 tokens."""


def get_config(recipe: str = "base") -> ConfigDict:
    size, _, phases = recipe.partition("_")
    if size not in SIZES or recipe not in (*SIZES, *(f"{name}_released" for name in SIZES), "base_mmbert"):
        raise ValueError(f"{recipe!r}: unknown; expected base, large, base_released, large_released or base_mmbert")
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
    config.data.packing = True
    optimizer = config.optimizer
    optimizer.name, optimizer.schedule = "stable_adamw", "wsd"
    optimizer.b2, optimizer.eps, optimizer.weight_decay = 0.98, 1e-6, 1e-5
    optimizer.grad_clip_norm = 0.0  # StableAdamW limits each update instead.
    optimizer.learning_rate = RATES[size][0]
    optimizer.warmup_steps = 2_000
    config.total_steps = 100_000
    if phases == "released":
        _set_phases(config, _released(size))
    elif phases == "mmbert":
        _set_phases(config, _mmbert(size))
    return config


def _set_phases(config: ConfigDict, phases: Sequence[Mapping[str, object]]) -> None:
    config.optimizer.restart_schedule = True  # each phase has a schedule of its own: constant, or a decay
    config.phases = tuple(phases)
    config.total_steps = sum(phase["steps"] for phase in phases)


def _phase(tokens: float, batch: int, rate: float, **keys: object) -> dict[str, object]:
    """Returns a phase of sequences of 1,024 tokens at a constant learning rate."""
    return {
        "steps": round(tokens / (batch * 1_024)), "global_batch_size": batch, "data.seq_len": 1_024,
        "model.global_rope_theta": 1e4, "optimizer.learning_rate": rate, "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0, **keys,
    }  # fmt: skip


def _long_phases(size: str, tokens: float, of_decay: float, masks: tuple[float, float]) -> list[dict[str, object]]:
    batch, rate = RAMPS[size][3], RATES[size][1]
    long = {"data.path": "", "data.seq_len": 8_192, "model.global_rope_theta": 16e4, "remat": "attention"}
    # `_phase` counts tokens in batches of 1,024-token rows.
    stable, decay = (
        _phase(part / 8, batch, rate, **long, **{"objective.mask_rate": mask})
        for part, mask in zip((tokens, of_decay), masks, strict=True)
    )
    return [stable, {**decay, "optimizer.schedule": "wsd", "optimizer.decay_steps": decay["steps"]}]


def _released(size: str) -> list[dict[str, object]]:
    ramp, tokens, batch, _ = RAMPS[size]
    rate = RATES[size][0]
    growing = [_phase(tokens / len(ramp), rows, rate) for rows in ramp]
    growing[0]["optimizer.warmup_steps"] = round(3e9 / (ramp[0] * 1_024))
    return [*growing, _phase(1.7e12 - tokens, batch, rate), *_long_phases(size, 250e9, 50e9, (0.3, 0.3))]


def _mmbert(size: str) -> list[dict[str, object]]:
    batch, rate = RAMPS[size][2], RATES[size][0]
    stable = _phase(2.3e12, batch, rate, **{"optimizer.warmup_steps": round(3e9 / (batch * 1_024))})
    return [stable, *_long_phases(size, 600e9, 100e9, (0.15, 0.05))]
