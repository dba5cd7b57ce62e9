"""Table 3: SQuAD 2.0, a single system on dev, with the threshold of no answer that is best there.

    bert-jax study studies/table3 --workdir=runs/table3 --config.task_data=FOLDER --config.checkpoints.large=LARGE \\
      --config.only_rows="('BERT-LARGE',)"

LARGE is a pre-trained checkpoint, FOLDER holds squad/train-v2.0.json and squad/dev-v2.0.json. The paper has no number
for BERT-BASE.

Runs: 10 of fine-tuning. Hardware, time: not yet run.
Scores to expect: the paper's, which each row lists as `paper`.
"""

import dataclasses

from ml_collections import ConfigDict

from bert_jax.config_keys import StudyRow
from bert_jax.configs.studies import _tasks, default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.title = "Table 3: SQuAD 2.0"
    config.rows = (
        StudyRow("BERT-BASE", checkpoint="base"),
        StudyRow("BERT-LARGE", checkpoint="large", paper={"EM": 78.7, "F1": 81.9}),
    )
    columns = {"EM": "dev/best_exact", "F1": "dev/best_f1"}
    config.tasks = (dataclasses.replace(_tasks.SQUAD, config="finetune/squad:2.0", columns=columns),)
    return config
