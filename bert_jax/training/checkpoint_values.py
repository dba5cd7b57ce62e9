"""Values of a config that a checkpoint decides: -1 for a number and "auto" for a text, as in `configs/continue.py`."""

import logging
from collections.abc import Iterator
from typing import Any

from etils import epath

from bert_jax.config_keys import PretrainConfig
from bert_jax.data.dataset import DatasetInfo
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.sections import flatten, from_mapping, with_values
from bert_jax.training.checkpoints import Checkpoint, newest_intact, open_checkpoint
from bert_jax.training.checks import data_paths
from bert_jax.training.phases import plan_at, plan_phases
from bert_jax.training.warm_start import check_sizes

log = logging.getLogger(__name__)

AUTO = "auto"
_OBJECTIVE = ("objective.lm", "objective.nsp")
_WARMUP = "optimizer.warmup_steps"
_POSITIONS = "model.max_position_embeddings"


def fill_in_from_checkpoint(config: PretrainConfig, workdir: epath.Path | None = None) -> PretrainConfig:
    """Returns the config with the sizes and the objective of the checkpoint in `init`, where it leaves them open.

    The sizes are those of the checkpoint, with as many positions as the longest sequence of the datasets if those are
    more. NSP is trained if the checkpoint was trained with it, and every dataset has pairs; each phase has its own. A
    run that resumes in `workdir` has the values and the finished warm-up that it began with, and needs no `init`.

    Raises InputError if no checkpoint is given, for a value of the config that contradicts it, and if `workdir` holds a
    fine-tuning run.
    """
    before = newest_intact(workdir) if workdir is not None else None
    if before is not None:
        if before.task is not None:
            raise InputError(f"--workdir={workdir}: holds a fine-tuning run; choose another folder")
        config = _keep_warmup(config, before)
        if not config.init:
            config = with_values(config, {"init": before.config["init"]})
    open_keys = _open_keys(config)
    if not open_keys:
        return config
    if before is not None:
        saved = dict(_flatten_with_phases(from_mapping(type(config), before.config)))
        return with_values(config, {key: saved[key] for key in open_keys if key in saved})
    if not config.init:
        raise InputError(
            f"init is not set, which {', '.join(open_keys[:3])}{' ...' if open_keys[3:] else ''} are taken from; pass "
            "--config.init=CHECKPOINT, such as the output of `bert-jax import`"
        )
    checkpoint = open_checkpoint(config.init)
    given = {key: value for key, value in flatten(config.model) if f"model.{key}" not in open_keys}
    given.pop("vocab_size")
    if "objective.lm" not in open_keys:
        given["is_decoder"] = config.objective.lm == "ltr"
    check_sizes(checkpoint, given)
    values = _checkpoint_values(checkpoint, config)
    filled = with_values(config, {key: values[key] for key in open_keys})
    log.info(
        "As in %s: %d layers of %d with %d heads, %d positions; objective.lm=%s, objective.nsp=%s",
        checkpoint.path, filled.model.num_hidden_layers, filled.model.hidden_size, filled.model.num_attention_heads,
        checkpoint.bert_config.max_position_embeddings, filled.objective.lm, filled.objective.nsp,
    )  # fmt: skip
    return filled


def _keep_warmup(config: PretrainConfig, before: Checkpoint) -> PretrainConfig:
    """Returns the config with the warm-up of a run that resumes after it: a run does not warm up again."""
    began, now = before.config["optimizer"]["warmup_steps"], config.optimizer.warmup_steps
    if config.optimizer.restart_schedule or began == now or not began <= before.step:
        return config
    log.info("%s=%d instead of %d: the warm-up of %s is over", _WARMUP, began, now, before.path)
    return with_values(config, {_WARMUP: began})


def _flatten_with_phases(config: PretrainConfig) -> Iterator[tuple[str, Any]]:
    """Yields (key, value) of every leaf, and of every override of a phase, as `phases.1.objective.nsp`."""
    yield from flatten(config)
    for number, phase in enumerate(config.phases):
        yield from ((f"phases.{number}.{key}", value) for key, value in phase.items())


def _open_keys(config: PretrainConfig) -> list[str]:
    """Returns the keys of sizes and objective whose value is open. The vocabulary's size is that of the dataset."""
    sizes = [f"model.{key}" for key, value in flatten(config.model) if value in (-1, AUTO) and key != "vocab_size"]
    objectives = [
        key for key, value in _flatten_with_phases(config) if key.endswith(_OBJECTIVE) and value == AUTO
    ]  # fmt: skip
    return [*sizes, *objectives]


def _checkpoint_values(checkpoint: Checkpoint, config: PretrainConfig) -> dict[str, Any]:
    """Returns the values of all keys that a checkpoint may decide."""
    sizes = checkpoint.bert_config.to_dict()
    lm = "ltr" if sizes.pop("is_decoder") else "mlm"
    values: dict[str, Any] = {f"model.{name}": value for name, value in sizes.items()}
    lengths = [sizes["max_position_embeddings"]]
    has_pairs = True
    for number, plan in enumerate(plan_phases(config)):
        paths = data_paths(plan.config) if plan.config.data.path else []
        datasets = [DatasetInfo.read(remote.parse_path(path)) for path in paths]
        pairs = all(info.options.get("pairs") != "none" for info in datasets)
        values[f"phases.{number}.objective.lm"] = lm
        values[f"phases.{number}.objective.nsp"] = _trains_nsp(checkpoint) and pairs
        lengths += [plan.config.data.seq_len, *(info.seq_len for info in datasets)]
        has_pairs &= pairs
    nsp = _trains_nsp(checkpoint) and has_pairs
    return {**values, _POSITIONS: max(lengths), "objective.lm": lm, "objective.nsp": nsp}


def _trains_nsp(checkpoint: Checkpoint) -> bool:
    """Returns whether a checkpoint was trained with NSP: by its config; an imported one by its heads."""
    if checkpoint.config and checkpoint.task is None:
        return bool(plan_at(from_mapping(PretrainConfig, checkpoint.config), checkpoint.step).config.objective.nsp)
    return {"pooler", "nsp_head"} <= {*checkpoint.heads} and not checkpoint.bert_config.is_decoder
