"""Step folders of a workdir: finds complete ones and sets damaged ones aside."""

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
"""Items of every step of a run. Without `optimizer` a step can be read, but a resume falls back to an earlier one."""


def step_folders(workdir: epath.Path) -> list[epath.Path]:
    """Returns the folders with the name of a step, newest first, whatever they contain."""
    folder = workdir / FOLDER
    if not remote.exists(folder):
        return []
    children = remote.retry_transient(folder, lambda: list(folder.iterdir()))
    steps = [child for child in children if re.fullmatch("0|[1-9][0-9]*", child.name)]
    return sorted(steps, key=lambda child: int(child.name), reverse=True)


def complete_steps(workdir: epath.Path) -> Iterator[epath.Path]:
    """Yields the folders of complete steps, newest first. Logs and skips one that lacks an item."""
    for step in step_folders(workdir):
        if not is_saved(step):
            continue  # killed during the save, which is not damage
        if missing := missing_items(step):
            log.warning("%s has no %s and is skipped; delete that folder", step, ", ".join(missing))
        else:
            yield step


def kept_steps(workdir: epath.Path) -> list[int]:
    """Returns the numbers of a workdir's complete steps, in ascending order."""
    return sorted(int(step.name) for step in complete_steps(workdir))


def newest_step(workdir: epath.Path) -> epath.Path | None:
    """Returns the folder of a workdir's newest complete step, or None."""
    return next(complete_steps(workdir), None)


def is_saved(folder: epath.Path) -> bool:
    """Returns whether a checkpoint is committed: by a rename on a disk, by a marker file in a store."""
    return remote.retry_transient(folder, lambda: ocp.utils.is_checkpoint_finalized(folder))


def missing_items(step: epath.Path) -> list[str]:
    """Returns the items that the folder of a step lacks."""
    present = remote.retry_transient(step, lambda: {child.name for child in step.iterdir()} if step.is_dir() else set())
    return [item for item in _ITEMS if item not in present]


def set_aside(step: epath.Path) -> epath.Path:
    """Renames the folder of a step to STEP.damaged, which is not the name of a step, and returns the new path.

    A store copies and then deletes its files. A kill between the two leaves both, and the next run repeats it.
    """
    taken = {child.name for child in remote.retry_transient(step.parent, lambda: list(step.parent.iterdir()))}
    names = (f"{step.name}.damaged{number}" for number in ["", *(f"-{count}" for count in range(2, len(taken) + 3))])
    target = step.parent / next(name for name in names if name not in taken)
    if remote.is_remote(step):
        store, name = remote.store_of(step)
        remote.retry_transient(step, lambda: store.copy(name, os.fspath(target), recursive=True))
        remote.retry_transient(step, lambda: store.rm(name, recursive=True))
    else:
        os.rename(step, target)
    return target
