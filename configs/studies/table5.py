"""Table 5: what the pre-training tasks are worth. BERT-BASE with both, without NSP, and left-to-right.

    bert-jax study studies/table5 --workdir=runs/table5 --config.pretraining.data.path=DATASET --config.task_data=FOLDER

FOLDER holds glue/MNLI, glue/QNLI, glue/MRPC, glue/SST-2 and squad; `--config.only_tasks="('MRPC', 'SST-2')"` leaves out
what is not there.

Runs: 3 of pre-training (98,304,000,000 tokens), 340 of fine-tuning. Hardware, time: not yet run.
Scores to expect: the paper's, which each row lists as `paper`.
"""

from ml_collections import ConfigDict

from bert_jax.config_keys import StudyRow
from bert_jax.configs import ablations
from bert_jax.configs.studies import _tasks, default

ROWS = (
    # row, the table's name, MNLI-m, QNLI, MRPC, SST-2, SQuAD
    ("bert_base", "BERT-BASE", 84.4, 88.4, 86.7, 92.7, 88.5),
    ("no_nsp", "No NSP", 83.9, 84.9, 86.5, 92.6, 87.9),
    ("ltr_no_nsp", "LTR & No NSP", 82.1, 84.3, 77.5, 92.1, 77.8),
    ("ltr_no_nsp_bilstm", "+ BiLSTM", 82.1, 84.1, 75.7, 91.6, 84.9),
)
COLUMNS = ("MNLI-m", "QNLI", "MRPC", "SST-2", "SQuAD")


def get_config() -> ConfigDict:
    config = default.get_config()
    config.title = "Table 5: pre-training tasks"
    config.note = (
        "MRPC's learning rate is the one with the best F1, as its leaderboard has it; the table shows accuracy."
    )
    config.rows = tuple(
        StudyRow(
            name,
            pretraining=ablations.TABLE_5[row],
            finetuning={"head.bilstm": 768} if row.endswith("bilstm") else {},
            paper=dict(zip(COLUMNS, paper, strict=True)),
        )
        for row, name, *paper in ROWS
    )
    config.tasks = (_tasks.MNLI_M, _tasks.QNLI, _tasks.MRPC_ACCURACY, _tasks.SST_2, _tasks.SQUAD)
    return config
