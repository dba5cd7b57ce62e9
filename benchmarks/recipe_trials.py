"""Pre-training recipes of BERT-Tiny at equal FLOPs: what makes the difference?

    BERT_JAX_DATA=FOLDER python benchmarks/recipe_trials.py [--output runs/ladder] [--jobs 2]

Each row differs in one thing from the first: Muon, WSD, 15% masks and next sentences, in sequences of 32 tokens and
then of 128. Optimizers have three learning rates each. Each row is pre-trained with three seeds and fine-tuned on two
tasks. FOLDER is that of `small_study.sh`. All take hours, and may be stopped.
"""

from typing import Any

import study_rows

from bert_jax.config_keys import PretrainConfig, StudyRow
from bert_jax.configs.studies import default
from bert_jax.sections import from_mapping, with_values

STAGES = ((2_000, 64, 32), (600, 16, 128))  # with fewer of 32 tokens, a row may end on the first plateau
TASKS = ("STS-B", "WNUT-17")
FIRST = {
    "optimizer.name": "muon", "optimizer.learning_rate": 2e-3, "optimizer.b2": 0.98, "optimizer.schedule": "wsd"
}  # fmt: skip
RATES = {"muon": (1e-3, 2e-3, 4e-3), "adamw": (5e-4, 1e-3, 2e-3), "lamb": (2e-3, 4e-3, 8e-3)}
TRIALS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the first": ({}, {}),
    "30% masks": ({"objective.mask_rate": 0.3}, {}),
    "40% masks": ({"objective.mask_rate": 0.4}, {}),
    "no next sentences": ({"objective.nsp": False}, {}),
    "sentence order": ({}, {"pairs": "-sop"}),
    "linear decay": ({"optimizer.schedule": "linear"}, {}),
    "128 tokens only": ({}, {"lengths": False}),
    "repeated positions": ({"repeat_positions": True}, {}),
    **{f"next tokens first, {share:.0%}": ({}, {"clm": share}) for share in (0.25, 0.5, 0.75)},
    **{
        f"{name}, {rate:g}": ({"optimizer.name": name, "optimizer.learning_rate": rate}, {})
        for name, rates in RATES.items()
        for rate in rates
        if (name, rate) != (FIRST["optimizer.name"], FIRST["optimizer.learning_rate"])
    },
}  # fmt: skip
"""Config keys that a row changes, and options of `study_rows.phases`."""


def get_config(folder: str = ""):
    config = default.get_config()
    config.title = "Recipes of BERT-Tiny"
    config.perplexity = True
    config.pretraining = study_rows.pretraining()
    config.pretraining.update_from_flattened_dict(FIRST)
    first = from_mapping(PretrainConfig, config.pretraining.to_dict())
    config.rows = tuple(
        StudyRow(
            name, pretraining={**keys, **study_rows.phases(with_values(first, keys), first, folder, STAGES, **options)}
        )
        for name, (keys, options) in TRIALS.items()
    )
    config.pretraining_seeds = study_rows.SEEDS
    config.tasks = study_rows.tasks(TASKS)
    return config


if __name__ == "__main__":
    study_rows.main(__file__, __doc__, get_config())
