"""Table 2: SQuAD 1.1, single systems on dev.

    bert-jax study studies/table2 --workdir=runs/table2 --config.task_data=FOLDER \\
      --config.checkpoints.base=BASE --config.checkpoints.large=LARGE

BASE and LARGE are pre-trained checkpoints, FOLDER holds squad/train-v1.1.json and squad/dev-v1.1.json.

Runs: 10 of fine-tuning. Hardware, time: not yet run.
Scores to expect: the paper's, which each row lists as `paper`.
"""

import dataclasses

from ml_collections import ConfigDict

from bert_jax.config_keys import StudyRow
from bert_jax.configs.studies import _tasks, default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.title = "Table 2: SQuAD 1.1"
    config.rows = (
        StudyRow("BERT-BASE", checkpoint="base", paper={"EM": 80.8, "F1": 88.5}),
        StudyRow("BERT-LARGE", checkpoint="large", paper={"EM": 84.1, "F1": 90.9}),
    )
    config.tasks = (dataclasses.replace(_tasks.SQUAD, columns={"EM": "dev/exact_match", "F1": "dev/f1"}),)
    return config
