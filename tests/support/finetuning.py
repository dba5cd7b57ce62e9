"""Configs of fine-tuning for tests."""

from collections.abc import Mapping

from bert_jax.config import FinetuneConfig, load_config


def finetune_config(name: str, settings: Mapping[str, object], **overrides: object) -> FinetuneConfig:
    """Returns a packaged config with settings by key and overrides, whose `__` stands for a dot."""
    values = {**settings, **{key.replace("__", "."): value for key, value in overrides.items()}}
    return load_config(f"finetune/{name}", [(key, str(value)) for key, value in values.items()], kind=FinetuneConfig)
