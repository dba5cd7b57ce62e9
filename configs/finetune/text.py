"""A task of one's own: a text, or two, and a label, in CSV, TSV or JSON lines.

    bert-jax finetune --config=finetune/text --workdir=runs/mine --config.init=runs/base \\
      --config.task.train=train.csv --config.task.dev=dev.csv --config.task.text=review --config.task.label=stars
    bert-jax predict --checkpoint runs/mine --input new.csv --output predictions.jsonl

Labels are those of the training file; with `task.regression=True` they are numbers.

Hardware, time: not yet run with BERT-BASE. `benchmarks/small_study.sh` has run Korean sentence pairs with BERT-Tiny.
Score to expect: it depends on your data.
"""

from ml_collections import ConfigDict

from bert_jax.configs.finetune import default


def get_config() -> ConfigDict:
    return default.get_config()
