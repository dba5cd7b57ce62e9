"""Values of a config that a checkpoint decides: -1 for a number and "auto" for a text, as in `configs/continue.py`."""

import logging
from collections.abc import Mapping
from typing import Any

from etils import epath

from bert_jax.config import ConfigDict, flatten
from bert_jax.data.dataset import DatasetInfo
from bert_jax.data.loading.order import FIRST_ORDER
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.training.checkpointing.checkpoints import Checkpoint, newest_intact, open_checkpoint
from bert_jax.training.checks import data_paths
from bert_jax.training.initialization.warm_start import check_sizes
from bert_jax.training.phases import plan_at, plan_phases

log = logging.getLogger(__name__)

AUTO = "auto"
_OBJECTIVE = ("objective.lm", "objective.nsp")
_POSITIONS = "model.max_position_embeddings"


def fill_in_from_checkpoint(config: ConfigDict, workdir: epath.Path | None = None) -> ConfigDict:
    """Returns the config with the sizes and the objective of the checkpoint in `init`, where it leaves them open.

    The sizes are those of the checkpoint, with as many positions as the longest sequence of the datasets if those are
    more. NSP is trained if the checkpoint was trained with it, and every dataset has pairs. A run that resumes in
    `workdir` has the values and the order of rows that it began with, and needs no `init`.

    Raises InputError if no checkpoint is given, for a value of the config that contradicts it, and if `workdir` holds a
    fine-tuning run.
    """
    before = newest_intact(workdir) if workdir is not None else None
    if before is not None:
        if before.task is not None:
            raise InputError(f"--workdir={workdir}: holds a fine-tuning run; choose another folder")
        config = _keep_row_order(config, before)
    open_keys = _open_keys(config)
    if not open_keys:
        return config
    if before is not None:
        saved = dict(flatten(ConfigDict(before.config)))
        return _filled(config, {key: saved[key] for key in open_keys if key in saved})
    if not config.init:
        raise InputError(
            f"init is not set: {open_keys[0]} and {len(open_keys) - 1} more keys are those of a checkpoint; pass "
            "--config.init=CHECKPOINT, such as the output of `bert-jax import`"
        )
    checkpoint = open_checkpoint(config.init)
    given = {key: value for key, value in config.model.items() if f"model.{key}" not in open_keys}
    given.pop("vocab_size")
    if "objective.lm" not in open_keys:
        given["is_decoder"] = config.objective.lm == "ltr"
    check_sizes(checkpoint, given)
    values = _checkpoint_values(checkpoint, config)
    filled = _filled(config, {key: values[key] for key in open_keys})
    log.info(
        "As in %s: %d layers of %d with %d heads, %d positions; objective.lm=%s, objective.nsp=%s",
        checkpoint.path, filled.model.num_hidden_layers, filled.model.hidden_size, filled.model.num_attention_heads,
        checkpoint.bert_config.max_position_embeddings, filled.objective.lm, filled.objective.nsp,
    )  # fmt: skip
    return filled


def _keep_row_order(config: ConfigDict, before: Checkpoint) -> ConfigDict:
    """Returns the config with the order of rows of a run that resumes."""
    began = before.config.get("row_order", FIRST_ORDER)
    if began == config.row_order:
        return config
    log.info("row_order=%d instead of %d: that with which the run of %s began", began, config.row_order, before.path)
    return _filled(config, {"row_order": began})


def _open_keys(config: ConfigDict) -> list[str]:
    """Returns the keys of sizes and objective whose value is open. The vocabulary's size is that of the dataset."""
    sizes = [f"model.{key}" for key, value in config.model.items() if value in (-1, AUTO) and key != "vocab_size"]
    values = dict(flatten(config))
    return [*sizes, *(key for key in _OBJECTIVE if values[key] == AUTO)]


def _filled(config: ConfigDict, values: Mapping[str, Any]) -> ConfigDict:
    result = config.copy_and_resolve_references()
    with result.unlocked(), result.ignore_type():
        result.update_from_flattened_dict(values)
    return result.lock()


def _checkpoint_values(checkpoint: Checkpoint, config: ConfigDict) -> dict[str, Any]:
    """Returns the values of all keys that a checkpoint may decide."""
    datasets = _read_datasets(config)
    sizes = checkpoint.bert_config.to_dict()
    is_decoder = sizes.pop("is_decoder")
    has_pairs = all(info.options.get("pairs") != "none" for info in datasets)
    lengths = [info.seq_len for info in datasets] + [plan.config.data.seq_len for plan in plan_phases(config)]
    return {
        **{f"model.{name}": value for name, value in sizes.items()},
        _POSITIONS: max(sizes["max_position_embeddings"], *lengths),
        "objective.lm": "ltr" if is_decoder else "mlm",
        "objective.nsp": _trains_nsp(checkpoint) and has_pairs,
    }


def _trains_nsp(checkpoint: Checkpoint) -> bool:
    """Returns whether a checkpoint was trained with NSP: by its config; an imported one by its heads."""
    if checkpoint.config and checkpoint.task is None:
        return bool(plan_at(ConfigDict(checkpoint.config), checkpoint.step).config.objective.nsp)
    return {"pooler", "nsp_head"} <= {*checkpoint.heads} and not checkpoint.bert_config.is_decoder


def _read_datasets(config: ConfigDict) -> list[DatasetInfo]:
    """Reads the descriptions of the datasets of all phases; of none where `data.path` is empty."""
    paths = [path for plan in plan_phases(config) if plan.config.data.path for path in data_paths(plan.config)]
    return [DatasetInfo.read(remote.parse_path(path)) for path in dict.fromkeys(paths)]
