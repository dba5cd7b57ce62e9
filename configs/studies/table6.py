"""Table 6: what size is worth, in layers (L), hidden size (H) and heads (A), with the perplexity of held-out text.

    bert-jax study studies/table6 --workdir=runs/table6 --config.pretraining.data.path=DATASET --config.task_data=FOLDER

FOLDER holds glue/MNLI, glue/MRPC and glue/SST-2.

Runs: 6 of pre-training (196,608,000,000 tokens), 360 of fine-tuning. Hardware, time: not yet run.
Scores to expect: the paper's, which each row lists as `paper`.
"""

from ml_collections import ConfigDict

from bert_jax.config_keys import StudyRow
from bert_jax.configs import ablations
from bert_jax.configs.studies import _tasks, default

ROWS = (
    # row, perplexity, MNLI-m, MRPC, SST-2
    ("L3_H768_A12", 5.84, 77.9, 79.8, 88.4),
    ("L6_H768_A3", 5.24, 80.6, 82.2, 90.7),
    ("L6_H768_A12", 4.68, 81.9, 84.8, 91.3),
    ("L12_H768_A12", 3.99, 84.4, 86.7, 92.9),
    ("L12_H1024_A16", 3.54, 85.7, 86.9, 93.3),
    ("L24_H1024_A16", 3.23, 86.6, 87.8, 93.7),
)
COLUMNS = ("perplexity", "MNLI-m", "MRPC", "SST-2")


def get_config() -> ConfigDict:
    config = default.get_config()
    config.title = "Table 6: model sizes"
    config.perplexity = True
    config.note = (
        "MRPC's learning rate is the one with the best F1, as its leaderboard has it; the table shows accuracy."
    )
    config.rows = tuple(
        StudyRow(row, pretraining=ablations.TABLE_6[row], paper=dict(zip(COLUMNS, paper, strict=True)))
        for row, *paper in ROWS
    )
    config.tasks = (_tasks.MNLI_M, _tasks.MRPC_ACCURACY, _tasks.SST_2)
    return config
