"""All keys of a study with their defaults, which `bert_jax/config_keys.py` declares and explains.

The other configs here are differences from this one. A study is a table: its rows are encoders, pre-trained here or
before, its columns are scores of the tasks that each of them is fine-tuned on. `config.rows` are `StudyRow`s and
`config.tasks` are `StudyTask`s, or dicts with their keys. `config.pretraining` is a whole config of pre-training, by
default of BERT-BASE.
"""

from ml_collections import ConfigDict

from bert_jax.config import StudyConfig, to_config_dict


def get_config() -> ConfigDict:
    return to_config_dict(StudyConfig())
