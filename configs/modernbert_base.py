"""ModernBERT-BASE: the same as `modernbert:base`, whose file has its records."""

from ml_collections import ConfigDict

from bert_jax.configs import modernbert


def get_config() -> ConfigDict:
    return modernbert.get_config("base")
