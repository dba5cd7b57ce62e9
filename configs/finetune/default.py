"""All keys of fine-tuning with their defaults, which `bert_jax/config_keys.py` declares and explains.

The other configs are differences from this one. These are the paper's values (Devlin et al. 2019, section 4 and
appendix A.3): batches of 32, three epochs, and as the learning rate the best on dev of 5e-5, 4e-5, 3e-5 and 2e-5.
"""

from ml_collections import ConfigDict

from bert_jax.config import FinetuneConfig, to_config_dict


def get_config() -> ConfigDict:
    return to_config_dict(FinetuneConfig())
