"""BERT-BASE: 12 layers of 768, 12 heads, 110M parameters: what `default.py` says, by its name.

bert-jax pretrain --config=bert_base --workdir=runs/bert_base --config.data.path=DATASET
"""

from bert_jax.configs import default


def get_config():
    return default.get_config()
