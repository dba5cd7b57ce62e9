"""SWAG, or any choice among endings: rows with `context` and `endings`.

    bert-jax finetune --config=finetune/swag --workdir=runs/swag --config.init=runs/base --config.data.path=swag

Hardware, time: not yet run with BERT-BASE. `benchmarks/small_study.sh` has run CODAH with BERT-Tiny.
Score to expect: an accuracy of 81.6 on the dev set of SWAG (BERT-BASE, the paper's table 4).
"""

from ml_collections import ConfigDict

from bert_jax.configs.finetune import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.task.kind = "choice"
    config.global_batch_size = 16
    config.optimizer.learning_rate = 2e-5
    return config
