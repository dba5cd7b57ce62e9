"""Table 4: SWAG, on dev.

    bert-jax study studies/table4 --workdir=runs/table4 --config.task_data=FOLDER \\
      --config.checkpoints.base=BASE --config.checkpoints.large=LARGE

BASE and LARGE are pre-trained checkpoints, FOLDER holds swag/train.csv and swag/val.csv.

Runs: 10 of fine-tuning. Hardware, time: not yet run.
Scores to expect: the paper's, which each row lists as `paper`.
"""

from ml_collections import ConfigDict

from bert_jax.config_keys import StudyRow
from bert_jax.configs.studies import _tasks, default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.title = "Table 4: SWAG"
    config.rows = (
        StudyRow("BERT-BASE", checkpoint="base", paper={"SWAG": 81.6}),
        StudyRow("BERT-LARGE", checkpoint="large", paper={"SWAG": 86.6}),
    )
    config.tasks = (_tasks.SWAG,)
    return config
