"""Table 1: GLUE, by BERT-BASE and BERT-LARGE.

    bert-jax study studies/table1 --workdir=runs/table1 --config.task_data=FOLDER \\
      --config.checkpoints.base=BASE --config.checkpoints.large=LARGE

BASE and LARGE are pre-trained checkpoints, FOLDER holds glue/MNLI and the others as they are distributed. The table
shows dev; what is predicted for the test sets lies in each run's `predictions`, as GLUE's server takes it.

Runs: 320 of fine-tuning. Hardware, time: not yet run.
Scores to expect: the paper's, which each row lists as `paper`.
"""

from ml_collections import ConfigDict

from bert_jax.config_keys import StudyRow
from bert_jax.configs.studies import _tasks, default

COLUMNS = ("MNLI-m", "MNLI-mm", "QQP", "QNLI", "SST-2", "CoLA", "STS-B", "MRPC", "RTE")
BASE = (84.6, 83.4, 71.2, 90.5, 93.5, 52.1, 85.8, 88.9, 66.4)
LARGE = (86.7, 85.9, 72.1, 92.7, 94.9, 60.5, 86.5, 89.3, 70.1)


def get_config() -> ConfigDict:
    config = default.get_config()
    config.title = "Table 1: GLUE"
    config.note = "The paper's numbers are of the test sets, by GLUE's server; ours are of the dev sets."
    config.rows = (
        StudyRow("BERT-BASE", checkpoint="base", paper=dict(zip(COLUMNS, BASE, strict=True))),
        StudyRow("BERT-LARGE", checkpoint="large", paper=dict(zip(COLUMNS, LARGE, strict=True))),
    )
    config.tasks = (
        _tasks.MNLI, _tasks.QQP, _tasks.QNLI, _tasks.SST_2, _tasks.COLA, _tasks.STS_B, _tasks.MRPC, _tasks.RTE
    )  # fmt: skip
    return config
