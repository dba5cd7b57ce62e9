"""Step folders of a workdir: finds complete ones and sets damaged ones aside."""

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import remote

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
_LISTED_STEPS = 4  # maximum in an error
_ITEMS = ("parameters", "position", "bert_config", "tokenizer", "config")
"""Items of every step of a run. Without `optimizer` a step can be read, but a resume falls back to an earlier one."""


def step_folders(workdir: epath.Path) -> list[epath.Path]:
    """Returns the folders with the name of a step, newest first, whatever they contain."""
    folder = workdir / FOLDER
    steps = [child for child in remote.children(folder) if re.fullmatch("0|[1-9][0-9]*", child.name)]
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
    """Returns the numbers of a workdir's complete steps, in ascending order. Looks into the folder of each."""
    return sorted(int(step.name) for step in complete_steps(workdir))


def find_step(workdir: epath.Path, step: int) -> epath.Path | None:
    """Returns the folder of a step of a workdir, None if it is not complete. Looks into no other folder."""
    folder = workdir / FOLDER / str(step)
    return folder if remote.exists(folder) and is_saved(folder) and not missing_items(folder) else None


def chosen_steps(workdir: str, steps: str) -> list[int]:
    """Returns the steps of a workdir that the option `--steps` names, in ascending order.

    `steps` is "all", or numbers such as "0,1000". InputError for anything else, a step that is not complete, and a
    folder that is not a workdir with checkpoints.
    """
    folder = remote.absolute(workdir)
    words = [word.strip() for word in steps.split(",")]
    if steps == "all":
        if kept := kept_steps(folder):
            return kept
        raise _not_a_workdir(workdir, steps)
    if not all(re.fullmatch("0|[1-9][0-9]*", word) for word in words):
        raise InputError(f"--steps={steps}: expected all, or step numbers such as 0,1000")
    chosen = sorted({int(word) for word in words})
    if missing := [step for step in chosen if not find_step(folder, step)]:
        if not (kept := kept_steps(folder)):
            raise _not_a_workdir(workdir, steps)
        raise InputError(f"--steps={steps}: {missing_step(workdir, missing[0], kept)}")
    return chosen


def _not_a_workdir(workdir: str, steps: str) -> InputError:
    return InputError(f"--steps={steps}: {workdir} is not a workdir with checkpoints; give a workdir, or no --steps")


def missing_step(workdir: str, step: int, kept: Sequence[int]) -> str:
    """Describes, for an error, that a step is not among those that a workdir keeps."""
    nearest = sorted(sorted(kept, key=lambda other: abs(other - step))[:_LISTED_STEPS])
    listed = ", ".join(map(str, nearest)) + (" and others" if len(kept) > _LISTED_STEPS else "")
    return f"{workdir} has no checkpoint of step {step}; it has {listed}"


def best_step(position: Mapping[str, Any]) -> int | None:
    """Returns the best step that the `position` of a checkpoint names; None without `keep_best`."""
    return position.get("evaluations", {}).get("best_step")


def find_best(workdir: epath.Path, newest: int, best: int) -> int:
    """Returns `best`, the best step that the step `newest` of a workdir names. InputError if it is not complete."""
    if not find_step(workdir, best):
        found = ", ".join(map(str, kept_steps(workdir)))
        raise InputError(
            f"{workdir}: the best step up to step {newest} is {best}, which was deleted; found {found}; restore "
            f"{workdir / FOLDER / str(best)}, or name the folder of a step"
        )
    return best


def newest_step(workdir: epath.Path) -> epath.Path | None:
    """Returns the folder of a workdir's newest complete step, or None."""
    return next(complete_steps(workdir), None)


def is_saved(folder: epath.Path) -> bool:
    """Returns whether a checkpoint is committed: by a rename on a disk, by a marker file in a store."""
    with remote.store_errors(folder):
        return ocp.utils.is_checkpoint_finalized(folder)


def missing_items(step: epath.Path) -> list[str]:
    """Returns the items that the folder of a step lacks."""
    present = {child.name for child in remote.children(step)}
    return [item for item in _ITEMS if item not in present]


def set_aside(step: epath.Path) -> epath.Path:
    """Renames the folder of a step to STEP.damaged, which is not the name of a step, and returns the new path.

    A store copies and then deletes its files. A kill between the two leaves both, and the next run repeats it.
    """
    taken = {child.name for child in remote.children(step.parent)}
    names = (f"{step.name}.damaged{number}" for number in ["", *(f"-{count}" for count in range(2, len(taken) + 3))])
    target = step.parent / next(name for name in names if name not in taken)
    if remote.is_remote(step):
        store, name = remote.store_of(step)
        with remote.store_errors(step):
            store.copy(name, os.fspath(target), recursive=True)
            store.rm(name, recursive=True)
    else:
        os.rename(step, target)
    return target
