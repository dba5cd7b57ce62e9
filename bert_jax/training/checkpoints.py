"""Checkpoints: each step's folder is one Orbax composite, committed atomically.

WORKDIR/checkpoints/STEP/
  parameters     parameters of the model
  optimizer      moments and counters
  position       number of consumed batches; the dataset hash of each phase up to the current one; the sums of metrics
                 of steps that are not logged yet; the milestones so far; with `keep_best`, in `evaluations`, the best
                 step, the score of each evaluation, and a hash of the examples that were scored
  bert_config    contents of bert_config.json
  tokenizer      the vocabulary and how it is applied
  config         config of the run
  provenance     the run that saved it, see `files/provenance.py`; never read back
  checksums.json the size and the checksum of each file, which every load verifies

Imported parameters have a folder like that of a step, without optimizer, position and config, and with

  heads          the present ones of `model.bert.HEADS` (a step of pre-training has them all)

Steps of a fine-tuned model have `heads` as well, and

  task           the output layers and the settings that prediction needs
"""

import json
import logging
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic, provenance, remote
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.model.bert import HEADS, Parameters
from bert_jax.text import tokenizer_files
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.checksums import (
    DamagedError,
    convert_read_errors,
    fingerprint,
    verify,
    write_checksums,
)

log = logging.getLogger(__name__)


_PARAMETER_ITEMS = ("parameters", "bert_config")  # of a step, and of imported parameters
_CHECKPOINTS = "a workdir, one of its checkpoints/STEP, or the output of `bert-jax import`"
_FOREIGN_WEIGHTS = re.compile(r"(model|pytorch_model)[\w-]*\.(safetensors|bin)|.*\.ckpt.*\.index")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def may_hold_checkpoints(folder: epath.Path) -> bool:
    """Returns whether Orbax supports the store of a folder."""
    return not remote.is_remote(folder) or os.fspath(folder).startswith("gs://")


def check_place(folder: epath.Path) -> None:
    """Raises InputError for a store that Orbax does not support."""
    if not may_hold_checkpoints(folder):
        raise InputError(
            f"{folder}: workdirs and checkpoints must be on a disk or on gs://; datasets may be in any store"
        )


@dataclass(frozen=True)
class Checkpoint:
    """Description and path of a checkpoint; parameters are loaded on demand.

    For imported parameters, `config` and `dataset_hashes` are empty and `step` is 0.
    """

    path: epath.Path
    bert_config: BertConfig
    tokenizer: Tokenizer
    heads: tuple[str, ...]
    config: dict[str, Any]
    step: int
    dataset_hashes: tuple[str, ...]
    task: dict[str, Any] | None = None  # of a fine-tuned model

    @property
    def missing_heads(self) -> tuple[str, ...]:
        """Heads in `HEADS` that the checkpoint lacks."""
        return tuple(head for head in HEADS if head not in self.heads)

    def reference(self) -> dict[str, Any]:
        """Returns `path`, `step` and `digest`, which copies of the checkpoint share, for a provenance record."""
        return {"path": str(self.path), "step": self.step, "digest": fingerprint(self.path)}

    def require_heads(self, *heads: str, by: str) -> None:
        """Raises InputError with the missing ones of `heads`, and with `by`, the user that needs them."""
        if missing := [head for head in heads if head not in self.heads]:
            raise InputError(f"{self.path} has no {', '.join(missing)}; {by} needs {', '.join(heads)}")

    def load_parameters(
        self, shardings: Parameters | None = None, *, parts: Collection[str] | None = None, **settings: Any
    ) -> Parameters:
        """Loads fp32 parameters with `shardings`, by default on the first device.

        Raises DamagedError, an InputError, with the names of files that changed since the save.

        Args:
          shardings: a tree with at least the loaded parts.
          parts: attributes of the model to load; by default all, and then the checkpoint may have no others except
            those of a task.
          settings: model settings for `abstract_parameters`; by default pre-training with the present heads.
        """
        _, shapes, _ = abstract_parameters(self.bert_config, **(settings or {"heads": self.heads}))
        shapes = {part: shape for part, shape in shapes.items() if parts is None or part in parts}
        if shardings is None:
            first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            shardings = jax.tree.map(lambda _: first, shapes)
        target = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            {part: shardings[part] for part in shapes},
        )
        return self._restore(target, is_partial=parts is not None or (self.task is not None and not settings))

    def _restore(self, target: Parameters, *, is_partial: bool) -> Parameters:
        """Verifies and reads the parameters in `target`, a tree of jax.ShapeDtypeStruct with shardings.

        `is_partial` allows others in the checkpoint.
        """
        verify(self.path, ["parameters"])
        arguments = ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=is_partial,
        )
        with convert_read_errors(self.path), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            result: Parameters = checkpointer.restore(self.path / "parameters", args=arguments)
            return result


def check_finite(checkpoint: Checkpoint, parameters: Parameters) -> None:
    """Raises InputError with the names of non-finite parameters. They must not be sharded over processes."""
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    names = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, leaf in leaves if not np.isfinite(jax.device_get(leaf)).all()
    ]  # fmt: skip
    if names:
        raise InputError(f"{checkpoint.path} has NaN or infinity in {', '.join(names[:3])}; use an earlier step")


def save_parameters(
    folder: epath.Path,
    parameters: Parameters,
    *,
    bert_config: BertConfig,
    tokenizer: Tokenizer,
    heads: Collection[str],
    task: dict[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint of parameters alone, atomically; `open_checkpoint` reads it.

    Replaces `folder` without asking. `parameters` have only the heads in `heads`; `task` is that of a fine-tuned model.
    `inputs` are those of its provenance record.
    """
    items = {
        "bert_config": bert_config.to_dict(),
        "tokenizer": tokenizer.to_json(),
        "heads": [head for head in HEADS if head in heads],
        **({} if task is None else {"task": task}),
    }
    items["provenance"] = provenance.record(inputs or {})
    path = remote.absolute(folder)
    options = ocp.AsyncOptions(
        create_directories_asynchronously=False,  # else threads wait ten minutes for a folder that cannot be made
        post_finalization_callback=lambda: write_checksums(path),
    )
    with ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(), async_options=options) as checkpointer:
        checkpointer.save(
            path,
            args=ocp.args.Composite(
                parameters=ocp.args.StandardSave(parameters),
                **{name: ocp.args.JsonSave(value) for name, value in items.items()},
            ),
            force=True,
        )
        checkpointer.wait_until_finished()


def newest_intact(workdir: epath.Path) -> Checkpoint | None:
    """Opens the newest complete step, None in a new workdir. Logs and skips damaged ones; does not read arrays.

    Raises InputError if there are steps, but none is intact, and for a store that Orbax does not support.
    """
    check_place(workdir)
    for folder in complete_steps(workdir):
        try:
            return open_checkpoint(str(folder))
        except DamagedError as error:
            log.warning("%s", error)
    if left := [folder for folder in step_folders(workdir) if is_saved(folder)]:
        raise InputError(
            f"--workdir={workdir}: {left[0]} and the steps before it are damaged; delete them to start anew"
        )
    return None


def _workdirs_in(folder: epath.Path) -> list[str]:
    """Lists the workdirs in a folder, such as a search, that have a complete step; empty for a remote (slow) folder."""
    is_local = not remote.is_remote(folder) and folder.is_dir()
    return sorted(child.name for child in folder.iterdir() if newest_step(child)) if is_local else []


def _step_of(location: str, workdir: epath.Path, step: int) -> epath.Path:
    """Returns the folder of a step of a workdir. InputError, with the steps that there are, if it is not complete."""
    if folder := find_step(workdir, step):
        return folder
    if kept := kept_steps(workdir):
        raise InputError(f"step={step}: {missing_step(location, step, kept)}")
    raise InputError(f"step={step}: {location} is not a workdir with checkpoints; give a workdir, or no step")


def _download_hint(location: str) -> str:
    """Returns how to get a model of the Hugging Face Hub, if a path that does not exist may be the name of one."""
    owner, _, name = location.rpartition("/")
    if not _HUB_NAME.fullmatch(location) or (owner and epath.Path(owner).exists()):
        return ""
    return f"; to use the model of this name on the Hugging Face Hub, run: hf download {location} --local-dir {name}"


def _import_hint(location: str, folder: epath.Path) -> str:
    """Returns how to convert the model of other software in a local folder, if there is one."""
    names = [child.name for child in folder.iterdir()] if folder.is_dir() else []
    if not any(map(_FOREIGN_WEIGHTS.fullmatch, names)):
        return ""
    return f"; to use the model in it, run: bert-jax import --source {shlex.quote(location)} --output imported"


def is_checkpoint(given: epath.Path) -> bool:
    """Returns whether a path is a workdir with a complete step, the folder of a step, or imported parameters.

    Raises InputError for a store that Orbax does not support.
    """
    check_place(given)
    return all(remote.exists(given / item) for item in _PARAMETER_ITEMS) or newest_step(given) is not None


def open_checkpoint(location: str, step: int | None = None, *, expected: str = _CHECKPOINTS) -> Checkpoint:
    """Opens a CHECKPOINT: a workdir, the folder of a step, or imported parameters.

    Of a workdir it opens the newest complete step, or the best one that this names; `step` chooses another. Raises
    InputError, with what was `expected`, if there is none, and for one of a newer version.
    """
    given = remote.absolute(location)
    check_place(given)
    if not remote.exists(given):
        hint = _download_hint(location)
        raise InputError(f"{location} does not exist; expected {expected}{hint}")
    path = _step_of(location, given, step) if step is not None else newest_step(given) or given
    if not all(remote.exists(path / item) for item in _PARAMETER_ITEMS) or not is_saved(path):
        runs = "".join(f" ({name} in it does)" for name in _workdirs_in(given)[:1])
        hint = "" if remote.is_remote(given) else _import_hint(location, given)
        raise InputError(f"{location} holds no complete checkpoint{runs}; expected {expected}{hint}")
    from_run = remote.exists(path / "position")
    optional = [name for name in ("heads", "task") if remote.exists(path / name)]
    names = ["bert_config", "tokenizer", *(("config", "position") if from_run else ()), *optional]
    items = read_items(path, names)
    with convert_read_errors(path):
        position = items.get("position", {})
        best = best_step(position) if step is None and path != given else None
    if best is not None and best != int(path.name):
        return open_checkpoint(location, find_best(given, int(path.name), best), expected=expected)
    with convert_read_errors(path):
        return Checkpoint(
            path=path,
            bert_config=BertConfig.from_dict(items["bert_config"]),
            tokenizer=tokenizer_files.from_json(items["tokenizer"]),
            heads=tuple(items.get("heads", HEADS)),
            config=items.get("config", {}),
            step=position["next_batch"] if from_run else 0,
            dataset_hashes=tuple(position["datasets"]) if from_run else (),
            task=items.get("task"),
        )


def read_items(folder: epath.Path, names: Sequence[str]) -> dict[str, Any]:
    """Verifies and reads items of JSON in the folder of a checkpoint."""
    verify(folder, names)
    with convert_read_errors(folder):  # `ocp.Checkpointer` would wait for all processes
        return {name: json.loads(atomic.read_whole(folder / name / "metadata")) for name in names}


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
    result: int | None = position.get("evaluations", {}).get("best_step")
    return result


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
        result: bool = ocp.utils.is_checkpoint_finalized(folder)
        return result


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
