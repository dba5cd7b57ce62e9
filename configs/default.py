"""All keys of pre-training with their defaults, which `bert_jax/config_keys.py` declares and explains.

    bert-jax pretrain --config=default --workdir=runs/bert_base --config.data.path=DATASET

The other configs are differences from this one. The values are the paper's for BERT-BASE at sequence length 128 (Devlin
et al. 2019, appendix A.2); `bert.py` is the record of that run.
"""

from ml_collections import ConfigDict

from bert_jax.config import PretrainConfig, to_config_dict


def get_config() -> ConfigDict:
    return to_config_dict(PretrainConfig())
