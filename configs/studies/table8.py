"""Table 8: what the 80/10/10 of masking is worth, for fine-tuning and for the feature-based approach.

    bert-jax study studies/table8 --workdir=runs/table8 --config.pretraining.data.path=DATASET --config.task_data=FOLDER

DATASET is cased, FOLDER holds glue/MNLI and conll2003.

Runs: 6 of pre-training (196,608,000,000 tokens), 270 of fine-tuning. Hardware, time: not yet run.
Scores to expect: the paper's, which each row lists as `paper`.
"""

from ml_collections import ConfigDict

from bert_jax.config_keys import StudyRow
from bert_jax.configs import ablations
from bert_jax.configs.studies import _tasks, default

ROWS = (
    # [MASK], same, random; MNLI, NER fine-tuned, NER on features
    (80, 10, 10, 84.2, 95.4, 94.9),
    (100, 0, 0, 84.3, 94.9, 94.0),
    (80, 0, 20, 84.1, 95.2, 94.6),
    (80, 20, 0, 84.4, 95.2, 94.7),
    (0, 20, 80, 83.7, 94.8, 94.6),
    (0, 0, 100, 83.6, 94.9, 94.6),
)
COLUMNS = ("MNLI-m", "NER", "NER, features")


def get_config() -> ConfigDict:
    config = default.get_config()
    config.title = "Table 8: what becomes of the tokens to predict, in percent: [MASK] / same / random"
    config.rows = tuple(
        StudyRow(
            f"{mask} / {same} / {random}",
            pretraining=ablations.TABLE_8[f"mask_{mask}_{same}_{random}"],
            paper=dict(zip(COLUMNS, paper, strict=True)),
        )
        for mask, same, random, *paper in ROWS
    )
    config.tasks = (_tasks.MNLI_M, _tasks.NER, _tasks.NER_FEATURES)
    return config
