"""Config loading: a Python file with `get_config`, and overrides, converted once into typed configs."""

import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_origin, overload

from ml_collections import ConfigDict, FieldReference

from bert_jax import config_listing
from bert_jax.config_keys import FinetuneConfig, PretrainConfig, RunConfig, StudyConfig
from bert_jax.errors import InputError
from bert_jax.sections import UNIONS, Section, flatten, from_mapping, kinds, nearest, plain, with_values

__all__ = ["FinetuneConfig", "PretrainConfig", "RunConfig", "StudyConfig", "load_config", "to_config_dict"]

S = TypeVar("S", bound=Section)
Overrides = Sequence[tuple[str, Any]] | Mapping[str, Any]


def to_config_dict(config: Section) -> ConfigDict:
    """Returns the config as a `ConfigDict`, which a config file changes and returns."""
    values: dict[str, Any] = {}
    for name, kind in kinds(type(config)).items():
        value = getattr(config, name)
        if isinstance(value, Section):
            value = to_config_dict(value)
        elif get_origin(plain(kind)) in (*UNIONS, Mapping):  # values of several types, or dotted keys
            value = FieldReference(value, field_type=object)
        values[name] = value
    return ConfigDict(values)


@overload
def load_config(spec: str, overrides: Overrides = ()) -> PretrainConfig: ...


@overload
def load_config(spec: str, overrides: Overrides = (), *, kind: type[S]) -> S: ...


@overload
def load_config(spec: str, overrides: Overrides = (), *, kind: None) -> Section: ...


def load_config(spec: str, overrides: Overrides = (), *, kind: type[Section] | None = PretrainConfig) -> Section:
    """Loads the config named by `spec` and applies `overrides`.

    Args:
      spec: `FILE.py`, or the name of a packaged config (`bert_base`); `:ARG` at its end is passed to its `get_config`.
      overrides: (dotted key, value) pairs, or a mapping; a text is parsed as the key's type.
      kind: `PretrainConfig`, `FinetuneConfig` or `StudyConfig`, which define the keys; None for the one that shares
        most keys with the config.

    Raises InputError for an invalid file, argument, key or value.
    """
    path, _, argument = spec.partition(":")
    files = config_listing.config_files()
    if not path.endswith(".py") and path not in files:
        raise InputError(f"config={path}: config not found{nearest(path, files)}; expected one of {', '.join(files)}")
    file = files.get(path, Path(path))
    try:
        made = runpy.run_path(str(file))["get_config"](*([argument] if argument else []))
    except Exception as error:
        raise InputError(f"config={spec}: {file}: {type(error).__name__}: {error}") from error
    if not isinstance(made, ConfigDict):
        raise InputError(f"config={spec}: {file}: expected a ConfigDict of get_config(), got {type(made).__name__}")
    kind = kind or max(config_listing.CONFIG_TYPES, key=lambda one: len({*kinds(one)} & {*made}))
    try:
        config = from_mapping(kind, made.to_dict())
    except InputError as error:
        raise InputError(f"{file}: {error}; expected keys of a {kind.__name__}") from error
    return with_overrides(config, dict(overrides))


def with_overrides(config: S, overrides: Mapping[str, Any]) -> S:
    """Returns the config with other values, as `with_values`.

    Raises InputError also for a key that a phase sets to a value of its own, unless that is among the values, too.
    """
    config = with_values(config, overrides)
    for key in overrides:
        prefix = "pretraining." if key.startswith("pretraining.") else ""
        phases, name = f"{prefix}phases", key.removeprefix(prefix)
        kept = () if phases in overrides else dict(flatten(config)).get(phases) or ()
        for number, phase in enumerate(kept):
            if name in phase and (own := f"{phases}.{number}.{name}") not in overrides:
                raise InputError(f"{key}: has no effect in phase {number}, which sets {name}={phase[name]}; set {own}")
    return config
