"""Table 7: CoNLL-2003, fine-tuned, and the feature-based approach in its six ways to take layers.

    bert-jax study studies/table7 --workdir=runs/table7 --config.task_data=FOLDER \\
      --config.checkpoints.base=BASE --config.checkpoints.large=LARGE

BASE and LARGE are cased pre-trained checkpoints, FOLDER holds conll2003.

Runs: 70 of fine-tuning. Hardware, time: not yet run.
Scores to expect: the paper's, which each row lists as `paper`.
"""

import dataclasses

from ml_collections import ConfigDict

from bert_jax.config_keys import StudyRow
from bert_jax.configs.studies import _tasks, default

FEATURES = (
    ("Embeddings", "embeddings", 91.0),
    ("Second-to-Last Hidden", "second_to_last", 95.6),
    ("Last Hidden", "last", 94.9),
    ("Weighted Sum Last Four Hidden", "sum_last_four", 95.9),
    ("Concat Last Four Hidden", "concat_last_four", 96.1),
    ("Weighted Sum All 12 Layers", "sum_all", 95.5),
)


def get_config() -> ConfigDict:
    config = default.get_config()
    config.title = "Table 7: CoNLL-2003, F1"
    config.rows = (
        StudyRow("BERT-LARGE, fine-tuned", checkpoint="large", paper={"dev": 96.6, "test": 92.8}),
        StudyRow("BERT-BASE, fine-tuned", checkpoint="base", paper={"dev": 96.4, "test": 92.4}),
        *(
            StudyRow(
                name,
                checkpoint="base",
                config=f"finetune/ner_features:{features}",
                finetuning={"search.learning_rates": ()},
                paper={"dev": paper},
            )
            for name, features, paper in FEATURES
        ),
    )
    config.tasks = (dataclasses.replace(_tasks.NER, columns={"dev": "dev/f1", "test": "test/f1"}),)
    return config
