"""Configs that come with bert_jax; `--config=NAME` finds them here."""

import types

ALIASES = {f"bert_{size}": f"bert:{size}" for size in ("mini", "small", "medium", "base")}
"""Names of configs that are another config with an argument."""


def __getattr__(name: str) -> types.SimpleNamespace:
    """Returns an alias as a module with `get_config`, for `from bert_jax.configs import bert_base`."""
    if name not in ALIASES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bert_jax.configs import bert

    return types.SimpleNamespace(get_config=lambda: bert.get_config(name.removeprefix("bert_")))
