"""Recipes of the speedrun: `benchmarks/speedrun.py run benchmarks/speedrun_recipes.py:NAME --json RECORD`.

A recipe of a track has all changes of those before it, and about as few steps as reach the loss of the track.
"""

from typing import Any

from ml_collections import ConfigDict

from bert_jax.configs import quickstart

QUICKSTART: dict[str, dict[str, Any]] = {
    "quickstart": {  # as the quickstart was at first
        "objective.mask_rate": 0.25, "optimizer.name": "adamw", "optimizer.learning_rate": 2e-3,
        "global_batch_size": 16, "total_steps": 14_500,
    },
    "rotary": {
        "model.position_embedding_type": "rotary", "objective.mask_rate": 0.4, "objective.nsp": False,
        "total_steps": 6_800,
    },
    "muon": {
        "optimizer.name": "muon", "optimizer.learning_rate": 8e-3, "global_batch_size": 32, "total_steps": 2_100,
    },
}  # fmt: skip
MINI: dict[str, dict[str, Any]] = {
    "mini": {
        "model.num_hidden_layers": 4, "model.hidden_size": 256, "model.intermediate_size": 1024,
        "model.initializer_range": 0.06, "optimizer.learning_rate": 4e-3, "optimizer.warmup_steps": 50,
        "total_steps": 1_500,
    },
}  # fmt: skip
"""Changes from the last recipe of `QUICKSTART`."""


def get_config(name: str = "quickstart") -> ConfigDict:
    config, ladder = quickstart.get_config(), {**QUICKSTART, **MINI}
    for step in [*ladder][: [*ladder].index(name) + 1]:
        config.update_from_flattened_dict(ladder[step])
    return config
