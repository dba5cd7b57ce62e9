"""BERT-LARGE: 24 layers of 1024, 16 heads.

bert-jax pretrain --config=bert_large --workdir=runs/bert_large --config.data.path=DATASET
"""

from bert_jax.configs import default


def get_config():
    config = default.get_config()
    config.model.num_hidden_layers = 24
    config.model.hidden_size = 1024
    config.model.num_attention_heads = 16
    config.model.intermediate_size = 4096
    return config
