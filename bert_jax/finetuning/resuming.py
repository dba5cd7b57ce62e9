"""Resuming of a fine-tuning run: a workdir belongs to one run, whose config may change only in some keys."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from bert_jax.config_keys import FinetuneConfig
from bert_jax.data.corpora.tfds_corpus import is_tfds
from bert_jax.errors import InputError
from bert_jax.files import provenance, remote
from bert_jax.files.format_versions import read_json
from bert_jax.sections import flatten, from_mapping
from bert_jax.training.checkpoints import Checkpoint, newest_intact, open_checkpoint
from bert_jax.training.run import check_same_config

log = logging.getLogger(__name__)

# Keys that may change when a run resumes.
CHANGEABLE = (
    "log_every_steps", "eval_batch_size", "max_nonfinite_steps", "gradient_accumulation", "mesh.", "attention",
    "remat", "gradient_reduce_dtype", "scan_layers", "checkpoint.", "profile.", "tracking.", "stall_", "data.path",
    "init", "compilation_cache",
)  # fmt: skip


def claim(folder: epath.Path, config: FinetuneConfig, dataset_hash: str) -> Checkpoint | None:
    """Returns the newest checkpoint of a workdir, None for a new one. InputError if it holds another run."""
    before = newest_intact(folder)
    if before is None:
        return None
    if before.task is None:
        raise InputError(f"--workdir={folder}: holds a pre-training run; choose another folder")
    check_same_run(folder, before.config, config, sources=("init",))
    if before.dataset_hashes != (dataset_hash,):
        raise InputError(
            f"--workdir={folder}: its run was trained on other examples than those of data.path={config.data.path}; "
            "choose another folder"
        )
    return before


def check_same_run(
    folder: epath.Path, before: Mapping[str, Any], config: FinetuneConfig, *, sources: Sequence[str] = ()
) -> None:
    """Raises InputError as `check_same_config` does if the config is not that of the run in `folder`.

    `sources` are keys of paths that may change only if the old path no longer exists, because it was moved. `init` may
    also change to another path of the same parameters.
    """
    old = from_mapping(FinetuneConfig, before)
    paths, now = dict(flatten(old)), dict(flatten(config))
    moved = {key for key in sources if not _is_elsewhere(paths[key], now[key])}
    if old.init != config.init and _is_same_encoder(folder, config.init):
        moved.add("init")
    check_same_config(folder, old, config, tuple({*CHANGEABLE} - {*sources} | moved))


def _is_elsewhere(before: str | None, now: str) -> bool:
    """Returns True if the old path still exists and is not the new path."""
    if not before or is_tfds(before):
        return bool(before)
    return remote.exists(remote.parse_path(before)) and remote.absolute(before) != remote.absolute(now)


def _is_same_encoder(folder: epath.Path, init: str) -> bool:
    """Returns True if the run in a folder is known to have started from the parameters in `init`."""
    digest = started_from(folder)
    return digest is not None and digest == encoder_digest(init)


def encoder_digest(init: str) -> str | None:
    """Returns the digest of the parameters in `init`; None if they are gone, or an older version saved them."""
    try:
        result: str | None = open_checkpoint(init).reference()["digest"]
        return result
    except InputError:  # which a run that needs them raises
        return None


def started_from(folder: epath.Path) -> str | None:
    """Returns the digest of the parameters that the run in a folder started from; None if there is no record of it."""
    path = folder / provenance.FILE
    try:
        result: str | None = read_json(path)["runs"][0]["inputs"]["init"]["digest"]
        return result
    except (OSError, InputError, LookupError, TypeError):
        return None
