"""Config loading: a Python file with `get_config`, and command-line overrides."""

import ast
import difflib
import importlib.util
import inspect
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from bert_jax import config_listing
from bert_jax.errors import InputError
from bert_jax.files.local_listing import similar_name

__all__ = ["ConfigDict", "flatten", "load_config", "set_key"]

log = logging.getLogger(__name__)

_WARMUP = "optimizer.warmup_steps"
_OR_AUTO = ("objective.nsp", "scan_layers")  # true, false, or "auto"


def load_config(
    spec: str, overrides: Sequence[tuple[str, str]] | Mapping[str, Any] = (), *, keys_of: str = "default"
) -> ConfigDict:
    """Loads the config named by `spec` and applies `overrides`.

    Args:
      spec: `FILE.py`, or the name of a packaged config (`bert_base`); `:ARG` at its end is passed to its `get_config`.
      overrides: (dotted key, text) pairs, the text parsed as the key's type; or a mapping of dotted keys to values.
      keys_of: the packaged config that defines the keys; the config must have exactly these.

    If overrides shorten the run, its warm-up keeps its share of the steps; see `_fit_warmup`.

    Raises InputError for an invalid file, argument, key or value.
    """
    path, _, argument = spec.partition(":")
    if path in (aliases := config_listing.aliases()):
        if argument:
            raise InputError(f"--config={spec}: {path} takes no argument, got :{argument}; leave it out")
        path, _, argument = aliases[path].partition(":")
    file = Path(path) if path.endswith(".py") else _packaged(path)
    if not file.is_file():
        raise InputError(f"--config={spec}: file {file} not found{similar_name(file)}")
    config = _run_file(spec, file, argument)
    known = {key for key, _ in flatten(config if path == keys_of else load_config(keys_of, keys_of=keys_of))}
    have = {key for key, _ in flatten(config)}
    for key in sorted(have - known):
        raise InputError(f"{file}: unknown key {key}{_nearest(key, sorted(known))}")
    for key in sorted(known - have):
        raise InputError(f"{file}: missing key {key}; start from `default.get_config()`")
    before = config.copy_and_resolve_references()
    settings = list(overrides.items() if isinstance(overrides, Mapping) else overrides)
    for key, value in settings:
        set_key(config, key, str(value))
    for prefix in ("", "pretraining."):
        if f"{prefix}{_WARMUP}" in known:
            section = prefix.rstrip(".")
            runs = (config[section], before[section]) if section else (config, before)
            _fit_warmup(*runs, {key.removeprefix(prefix) for key, _ in settings if key.startswith(prefix)}, prefix)
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


def _packaged(name: str) -> Path:
    files = config_listing.config_files()
    if name in files:
        return files[name]
    known = sorted([*config_listing.aliases(), *files])
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
    value = _parse(key, text, known[key])
    if type(value) is type(known[key]):
        node[last] = value
    else:  # a key of `_OR_AUTO` changes between a bool and a text
        with node.ignore_type():  # which takes milliseconds for a whole config
            node[last] = value


def _fit_warmup(run: ConfigDict, before: ConfigDict, overridden: Collection[str], prefix: str) -> None:
    """Shortens the warm-up of a shortened run, to its share of the steps in the config's file.

    It applies to the run and to each phase, and logs the new value. A warm-up that an override sets is left as it is.

    Args:
      run: a config of pre-training with its overrides; it is changed.
      before: the same without overrides.
      overridden: the keys that overrides set.
      prefix: the prefix of its keys in the whole config, for the log.
    """
    is_shortened = any(re.fullmatch(r"total_steps|phases\.\d+\.steps", key) for key in overridden)
    if _WARMUP in overridden or not is_shortened:
        return
    lengths, old_lengths = (_phase_steps(config) for config in (run, before))
    phases = list(run.phases)
    if "phases" in overridden:  # the warm-ups in them are the user's
        lengths = old_lengths = []
    for number, (phase, steps, old_steps) in enumerate(zip(phases, lengths, old_lengths, strict=False)):
        warmup = phase.get(_WARMUP, run.optimizer.warmup_steps)
        ends_within = steps if run.optimizer.restart_schedule else run.total_steps
        was_within = old_steps if run.optimizer.restart_schedule else before.total_steps
        is_own = _WARMUP in phase or run.optimizer.restart_schedule
        if is_own and f"phases.{number}.{_WARMUP}" not in overridden and ends_within < was_within:
            shortened = _shortened(f"{prefix}phases.{number}.{_WARMUP}", warmup, was_within, ends_within)
            phases[number] = {**phase, _WARMUP: shortened}
    run.phases = tuple(phases)
    if run.total_steps < before.total_steps:
        run.optimizer.warmup_steps = _shortened(
            f"{prefix}{_WARMUP}", run.optimizer.warmup_steps, before.total_steps, run.total_steps
        )


def _shortened(key: str, warmup: int, old_steps: int, steps: int) -> int:
    """Returns the warm-up of a run that was shortened from `old_steps` to `steps`, and logs it."""
    shortened = min(max(1, round(warmup * steps / max(1, old_steps))), max(0, steps - 1), warmup)
    log.info("%s=%d instead of %d: the run has %d steps instead of %d", key, shortened, warmup, steps, old_steps)
    return shortened


def _phase_steps(run: ConfigDict) -> list[int]:
    """Returns the steps of each phase, -1 inferred; empty if a phase is invalid, which the checks of a run refuse."""
    if not all(isinstance(phase, Mapping) and type(phase.get("steps")) is int for phase in run.phases):
        return []
    given = [phase["steps"] for phase in run.phases]
    rest = run.total_steps - sum(steps for steps in given if steps != -1)
    return [rest if steps == -1 else steps for steps in given]


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
    if key.endswith(_OR_AUTO):
        kind = bool
    try:
        if key.endswith(_OR_AUTO) and text.lower() == "auto":
            return "auto"
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
            if type(value) in (int, float):  # one entry, typed without a comma
                value = (value,)
            if not isinstance(value, (tuple, list)):
                raise ValueError
            return kind(value)
        return text
    except (ValueError, KeyError, SyntaxError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        expected = "true, false or auto" if key.endswith(_OR_AUTO) else f"a value of type {kind.__name__}"
        raise InputError(f"--config.{key}={text}: expected {expected}") from error


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
    "checkpoint.milestones": ("keep_steps", "save_steps_list"),
    "checkpoint.milestone_every_steps": ("keep_period", "keep_every", "milestone_every"),
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
    "keep_best": ("load_best_model_at_end", "restore_best_weights", "save_best_only"),
    "early_stopping.patience": ("patience", "early_stopping", "early_stopping_patience"),
    "early_stopping.min_delta": ("min_delta", "early_stopping_threshold"),
    "task.main_metric": ("metric_for_best_model", "monitor"),
    "task.class_weights": ("class_weight", "loss_weights"),
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


def unflatten(keys: Mapping[str, Any]) -> ConfigDict:
    """Makes a config from dotted keys and their values; the inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        *sections, name = key.split(".")
        section = tree
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return ConfigDict(tree)
