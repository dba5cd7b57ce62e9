"""BERT-SMALL: the same as `bert:small`, whose file has its records."""

from ml_collections import ConfigDict

from bert_jax.configs import bert


def get_config() -> ConfigDict:
    return bert.get_config("small")
