"""Config loading: a Python file with `get_config`, and command-line overrides."""

import ast
import difflib
import importlib.util
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from bert_jax.errors import InputError

__all__ = ["ConfigDict", "flatten", "load_config", "set_key"]


def load_config(
    spec: str, overrides: Sequence[tuple[str, str]] | Mapping[str, Any] = (), *, keys_of: str = "default"
) -> ConfigDict:
    """Loads the config named by `spec` and applies `overrides`.

    Args:
      spec: `FILE.py`, or the name of a packaged config (`bert_base`); `:ARG` at its end is passed to its `get_config`.
      overrides: (dotted key, text) pairs, the text parsed as the key's type; or a mapping of dotted keys to values.
      keys_of: the packaged config that defines the keys; the config must have exactly these.

    Raises InputError for an invalid file, argument, key or value.
    """
    path, _, argument = spec.partition(":")
    if path in (aliases := _aliases()):
        if argument:
            raise InputError(f"--config={spec}: {path} takes no argument, got :{argument}; leave it out")
        path, _, argument = aliases[path].partition(":")
    file = Path(path) if path.endswith(".py") else _packaged(path)
    if not file.is_file():
        raise InputError(f"--config={spec}: file {file} not found")
    config = _run_file(spec, file, argument)
    known = {key for key, _ in flatten(config if path == keys_of else load_config(keys_of, keys_of=keys_of))}
    have = {key for key, _ in flatten(config)}
    for key in sorted(have - known):
        raise InputError(f"{file}: unknown key {key}{_nearest(key, sorted(known))}")
    for key in sorted(known - have):
        raise InputError(f"{file}: missing key {key}; start from `default.get_config()`")
    for key, value in overrides.items() if isinstance(overrides, Mapping) else overrides:
        set_key(config, key, str(value))
    return config.lock()


def _run_file(spec: str, file: Path, argument: str) -> ConfigDict:
    module_spec = importlib.util.spec_from_file_location(f"_bert_jax_config_{file.stem}", file)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{file}: {type(error).__name__}: {error}") from error
    if not hasattr(module, "get_config"):
        raise InputError(f"{file}: get_config() not found; define it")
    takes_argument = bool(inspect.signature(module.get_config).parameters)
    if argument and not takes_argument:
        raise InputError(f"--config={spec}: {file} takes no argument, got :{argument}; leave it out")
    try:
        config = module.get_config(argument) if argument else module.get_config()
    except Exception as error:
        raise InputError(f"--config={spec}: {type(error).__name__}: {error}") from error
    if not isinstance(config, ConfigDict):
        raise InputError(f"{file}: get_config() must return a ConfigDict, got {type(config).__name__}")
    return config


def _aliases() -> dict[str, str]:
    """Returns the names of packaged configs that are another config with an argument: {"bert_base": "bert:base"}."""
    return importlib.import_module("bert_jax.configs").ALIASES


def _packaged(name: str) -> Path:
    spec = importlib.util.find_spec("bert_jax.configs")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    for folder in folders:
        if not Path(name).stem.startswith("_") and (folder / f"{name}.py").is_file():
            return folder / f"{name}.py"
    files = [file.relative_to(folder) for folder in folders for file in folder.glob("**/*.py")]
    known = sorted([*_aliases(), *(str(file.with_suffix("")) for file in files if not file.stem.startswith("_"))])
    raise InputError(f"--config={name}: config not found{_nearest(name, known)}; expected one of {', '.join(known)}")


def set_key(config: ConfigDict, key: str, text: str) -> None:
    """Sets `config.key` (dotted) to `text`, parsed as the type of the current value."""
    known = dict(flatten(config))
    phase = re.fullmatch(r"(.+\.)?phases\.([0-9]{1,9})\.(.+)", key)
    if phase and f"{phase[1] or ''}phases" in known:
        _set_phase_key(config, phase[1] or "", int(phase[2]), phase[3], text)
        return
    if key not in known:
        raise InputError(f"--config.{key}: unknown key{_nearest(key, list(known))}")
    *parents, last = key.split(".")
    node = config
    for parent in parents:
        node = node[parent]
    node[last] = _parse(key, text, known[key])


def _set_phase_key(config: ConfigDict, prefix: str, number: int, key: str, text: str) -> None:
    """Overrides a key of one phase: `--config.phases.1.data.path=DIR`. `prefix` is the run's part of a study config."""
    run = config[prefix.rstrip(".")] if prefix else config
    name = f"{prefix}phases.{number}"
    if number >= len(run.phases):
        raise InputError(f"--config.{name}.{key}: the config has {len(run.phases)} phases, numbered from 0")
    if not isinstance(run.phases[number], Mapping):
        raise InputError(f"--config.{name}.{key}: phase {number} must be a dict, got {run.phases[number]!r:.60}")
    known: dict[str, Any] = {"steps": 0, **dict(flatten(run))}
    if key not in known:
        raise InputError(f"--config.{name}.{key}: unknown key{_nearest(key, list(known))}")
    value = _parse(f"{name}.{key}", text, known[key])
    run.phases = tuple({**phase, key: value} if i == number else phase for i, phase in enumerate(run.phases))


def _parse(key: str, text: str, present: Any) -> Any:
    kind = type(present)
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind is int:
            value = ast.literal_eval(text)
            if isinstance(value, bool) or value != int(value):
                raise ValueError
            return int(value)
        if kind is float:
            return float(text)
        if kind in (tuple, list):  # a config from a checkpoint is JSON and has lists
            value = ast.literal_eval(text)
            if not isinstance(value, (tuple, list)):
                raise ValueError
            return kind(value)
        return text
    except (ValueError, KeyError, SyntaxError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise InputError(f"--config.{key}={text}: expected a value of type {kind.__name__}") from error


SYNONYMS = {
    "optimizer.learning_rate": ("lr", "peak_lr", "max_lr"),
    "optimizer.warmup_steps": ("warmup", "num_warmup_steps", "warmup_ratio"),
    "optimizer.warmup_proportion": ("warmup", "num_warmup_steps", "warmup_ratio", "warmup_steps"),
    "optimizer.weight_decay": ("wd",),
    "optimizer.grad_clip_norm": ("grad_clip", "clip", "max_grad_norm", "gradient_clipping"),
    "optimizer.b1": ("beta1", "beta_1", "adam_beta1"),
    "optimizer.b2": ("beta2", "beta_2", "adam_beta2"),
    "optimizer.eps": ("epsilon", "adam_epsilon"),
    "optimizer.name": ("optim",),
    "global_batch_size": ("batch_size", "train_batch_size", "per_device_train_batch_size"),
    "eval_batch_size": ("per_device_eval_batch_size",),
    "gradient_accumulation": ("grad_accum", "gradient_accumulation_steps", "accumulate_grad_batches"),
    "total_steps": ("steps", "max_steps", "num_steps", "num_train_steps", "train_steps", "epochs", "num_train_epochs"),
    "num_epochs": ("epochs", "num_train_epochs", "max_epochs", "steps", "max_steps", "num_train_steps"),
    "log_every_steps": ("logging_steps", "log_every"),
    "eval_every_steps": ("eval_steps", "eval_every"),
    "checkpoint.every_steps": ("save_steps", "save_every", "save_checkpoints_steps"),
    "checkpoint.keep": ("save_total_limit", "max_to_keep"),
    "dtype": ("bf16", "fp16", "precision", "mixed_precision"),
    "remat": ("gradient_checkpointing", "recompute"),
    "objective.mask_rate": ("mlm_probability", "mlm_prob", "masked_lm_prob"),
    "data.max_predictions": ("max_predictions_per_seq",),
    "data.seq_len": ("seq_length", "max_seq_length", "max_seq_len", "max_length"),
    "task.max_seq_len": ("seq_len", "seq_length", "max_seq_length", "max_length"),
    "model.hidden_size": ("hidden", "hidden_dim", "d_model", "n_embd"),
    "model.num_hidden_layers": ("layers", "num_layers", "n_layer"),
    "model.num_attention_heads": ("heads", "num_heads", "n_head"),
    "model.intermediate_size": ("d_ff", "ffn_dim", "mlp_dim"),
    "model.hidden_dropout_prob": ("dropout", "hidden_dropout"),
    "model.attention_probs_dropout_prob": ("attention_dropout", "attn_dropout"),
    "init": ("init_checkpoint", "pretrained", "model_name_or_path"),
}
"""Keys of pre-training and fine-tuning, with their names in other programs."""


def _nearest(name: str, known: Sequence[str]) -> str:
    """Returns a "did you mean" hint: the key that `name` is a synonym of, or else the most similar key; "" if none."""
    last = name.rpartition(".")[2]
    by_last = {other.rpartition(".")[2]: other for other in known}
    meant = [key for key, names in SYNONYMS.items() if last.lower().replace("-", "_") in names]
    close = (
        [other for key in meant for other in known if f".{other}".endswith(f".{key}")]
        or difflib.get_close_matches(name, known, 1, 0.6)
        or [by_last[match] for match in difflib.get_close_matches(last, list(by_last), 1, 0.6)]
    )
    return f" (did you mean {close[0]}?)" if close else ""


def flatten(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of every leaf."""
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
