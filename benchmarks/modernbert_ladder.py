"""The steps from BERT-Tiny to a ModernBERT of its size, at equal FLOPs: what is each of them worth?

    BERT_JAX_DATA=FOLDER python benchmarks/modernbert_ladder.py [--output runs/ladder] [--jobs 2]

Each row of `configs/studies/modernbert.py` is pre-trained with three seeds on a tenth of the steps of
`reference_cpu.py`, and each model fine-tuned on four tasks of `small_study.py` with one learning rate. A row whose
step takes more model FLOPs has fewer steps. FOLDER is that of `small_study.sh`. All take hours, and may be stopped.
"""

from dataclasses import replace

import study_rows

from bert_jax.config_keys import PretrainConfig
from bert_jax.configs.studies import modernbert
from bert_jax.sections import from_mapping, with_values

STAGES = ((800, 64, 32), (1_200, 16, 128))
TASKS = ("STS-B", "SST-2, 2,000 rows", "MRPC", "WNUT-17")


def get_config(folder: str = ""):
    config = modernbert.get_config()
    config.pretraining = study_rows.pretraining()
    config.pretraining.optimizer.bias_correction = True
    first = from_mapping(PretrainConfig, config.pretraining.to_dict())
    rows = []
    for row in modernbert.rows(first.model.hidden_size):
        keys = study_rows.phases(with_values(first, row.pretraining), first, folder, STAGES)
        rows.append(replace(row, pretraining={**row.pretraining, **keys}))
    config.rows = tuple(rows)
    config.pretraining_seeds = study_rows.SEEDS
    config.tasks = study_rows.tasks(TASKS)
    return config


if __name__ == "__main__":
    study_rows.main(__file__, __doc__, get_config(), ["configs/studies/modernbert.py"], steps=True)
