"""BERT-Mini: 4 layers of 256, 4 heads.

bert-jax pretrain --config=bert_mini --workdir=runs/bert_mini --config.data.path=DATASET
"""

from bert_jax.configs import default


def get_config():
    config = default.get_config()
    config.model.num_hidden_layers = 4
    config.model.hidden_size = 256
    config.model.num_attention_heads = 4
    config.model.intermediate_size = 1024
    return config
