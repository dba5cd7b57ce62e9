"""The folders of a workdir's steps: which of them are complete, and where a damaged one is put."""

import logging
import os
import re
from collections.abc import Iterator

import orbax.checkpoint as ocp
from etils import epath

from bert_jax.files import remote

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
_ITEMS = ("parameters", "position", "bert_config", "tokenizer", "config")
"""What every step of a run has. Without its `optimizer` it can be read, and a run falls back to the one before."""


def step_folders(workdir: epath.Path) -> list[epath.Path]:
    """Returns the folders named as steps are, newest first, whatever is in them."""
    folder = workdir / FOLDER
    if not remote.exists(folder):
        return []
    children = remote.patiently(folder, lambda: list(folder.iterdir()))
    steps = [child for child in children if re.fullmatch("0|[1-9][0-9]*", child.name)]
    return sorted(steps, key=lambda child: int(child.name), reverse=True)


def complete_steps(workdir: epath.Path) -> Iterator[epath.Path]:
    """Yields the folders of complete steps, newest first. One that lacks an item is named in the log and skipped."""
    for step in step_folders(workdir):
        if not is_saved(step):
            continue  # killed while it was saved, which is no damage
        if missing := missing_items(step):
            log.warning("%s has no %s: it is skipped; delete that folder", step, ", ".join(missing))
        else:
            yield step


def newest_step(workdir: epath.Path) -> epath.Path | None:
    """Returns the folder of a workdir's newest complete step, None where there is none."""
    return next(complete_steps(workdir), None)


def is_saved(folder: epath.Path) -> bool:
    """Returns whether the save of a checkpoint has ended: a remote one cannot be renamed and has a file to say so."""
    return remote.patiently(folder, lambda: ocp.utils.is_checkpoint_finalized(folder))


def missing_items(step: epath.Path) -> list[str]:
    """Returns the items that the folder of a step lacks."""
    there = remote.patiently(step, lambda: {child.name for child in step.iterdir()} if step.is_dir() else set())
    return [item for item in _ITEMS if item not in there]


def set_aside(step: epath.Path) -> epath.Path:
    """Renames the folder of a step to STEP.damaged, which is no step's name, and returns where it is.

    In a store its files are copied and then deleted. A kill between leaves both, and the next run does it again.
    """
    taken = {child.name for child in remote.patiently(step.parent, lambda: list(step.parent.iterdir()))}
    names = (f"{step.name}.damaged{number}" for number in ["", *(f"-{count}" for count in range(2, len(taken) + 3))])
    target = step.parent / next(name for name in names if name not in taken)
    if remote.is_remote(step):
        store, name = remote.store_of(step)
        remote.patiently(step, lambda: store.copy(name, os.fspath(target), recursive=True))
        remote.patiently(step, lambda: store.rm(name, recursive=True))
    else:
        os.rename(step, target)
    return target
