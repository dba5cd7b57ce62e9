"""BERT-Small: 4 layers of 512, 8 heads.

bert-jax pretrain --config=bert_small --workdir=runs/bert_small --config.data.path=DATASET
"""

from bert_jax.configs import default


def get_config():
    config = default.get_config()
    config.model.num_hidden_layers = 4
    config.model.hidden_size = 512
    config.model.num_attention_heads = 8
    config.model.intermediate_size = 2048
    return config
