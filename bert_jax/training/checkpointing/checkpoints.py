"""Checkpoints: each step's folder is one Orbax composite, committed atomically.

WORKDIR/checkpoints/STEP/
  parameters     parameters of the model
  optimizer      moments and counters
  position       number of consumed batches; the dataset hash of each phase up to the current one; the first row of
                 the current phase in each of its datasets; the sums of metrics of steps that are not logged yet
  bert_config    contents of bert_config.json
  tokenizer      the vocabulary and how it is applied
  config         config of the run
  digests        digests of all arrays and other items, which every load verifies
  provenance     the run that saved it, see `files/provenance.py`; not digested, and never read back

Imported parameters have a folder like that of a step, without optimizer, position and config, and with

  heads          the present ones of `model.bert.HEADS` (a step of pre-training has them all)

Steps of a fine-tuned model have `heads` as well, and

  task           the output layers and the settings that prediction needs
"""

import json
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from bert_jax.config import ConfigDict
from bert_jax.errors import InputError
from bert_jax.files import provenance, remote
from bert_jax.files.local_listing import similar_name
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.model.bert import HEADS, Parameters
from bert_jax.runtime.processes import any_process, is_first, wait_for_first
from bert_jax.text import tokenizer_files
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.checkpointing.checkpoint_damage import (
    DamagedError,
    changed_error,
    check_arrays,
    convert_read_errors,
)
from bert_jax.training.checkpointing.checkpoint_digests import changed_items, describe, json_digest, nonfinite_arrays
from bert_jax.training.checkpointing.checkpoint_folders import (
    FOLDER,
    complete_steps,
    is_saved,
    newest_step,
    set_aside,
    step_folders,
)
from bert_jax.training.state import TrainState

log = logging.getLogger(__name__)


def _optimizer_item(state: TrainState) -> dict[str, Any]:
    return {
        "state": state.optimizer_state,
        "step": state.step,
        "nonfinite_steps": state.nonfinite_steps,
        "nonfinite_streak": state.nonfinite_streak,
    }


def check_place(folder: epath.Path) -> None:
    """Raises InputError for a store that Orbax does not support."""
    if remote.is_remote(folder) and not os.fspath(folder).startswith("gs://"):
        raise InputError(
            f"{folder}: workdirs and checkpoints must be on a disk or on gs://; datasets may be in any store"
        )


class Checkpointer:
    """Saves (asynchronously) and restores the states of one workdir, and keeps the newest ones."""

    def __init__(
        self, workdir: epath.Path, *, keep: int, config: ConfigDict, tokenizer: Tokenizer,
        task: dict[str, Any] | None = None, heads: Collection[str] = HEADS,
    ):  # fmt: skip
        """Opens the workdir's checkpoints and keeps the `keep` newest ones.

        A fine-tuned model has a `task`, and `heads` names its pre-training heads; both are JSON.
        """
        self._workdir = workdir
        self._folder = workdir / FOLDER
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                cleanup_tmp_directories=True,
                enable_async_checkpointing=True,
            ),
        )
        self._is_saving = False
        self._before_save: list[Callable[[], None]] = []
        self.provenance: Mapping[str, Any] = {}
        """The entry of the run that saves, see `files/provenance.py`."""
        self.unlogged: dict[str, Any] | None = None
        """Sums of metrics of the restored step that are not logged yet; see `RunningMeans`."""
        self._description = {
            "tokenizer": tokenizer.to_json(),
            "config": json.loads(config.to_json_best_effort()),
        }
        if task is not None:
            self._description |= {"task": task, "heads": [head for head in HEADS if head in heads]}

    def before_each_save(self, function: Callable[[], None]) -> None:
        """Registers `function` to be called at the start of every save, such as a flush of metrics."""
        self._before_save.append(function)

    def save(
        self, step: int, state: TrainState, *, bert_config: BertConfig, dataset_hashes: Sequence[str],
        first_rows: Sequence[int] | None = None, unlogged: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Starts saving `state`; the arrays are copied off the devices before this returns.

        `dataset_hashes` has one hash for each phase that has started. `first_rows` has the first row of the current
        phase in each of its datasets, None without phases. `unlogged` is the result of `RunningMeans.to_dict`.
        """
        for function in self._before_save:
            function()
        began = time.perf_counter()
        self._is_saving = True
        position: dict[str, Any] = {"next_batch": step, "datasets": list(dataset_hashes), "unlogged": unlogged}
        if first_rows is not None:
            position["first_rows"] = list(first_rows)
        arrays = {"parameters": state.parameters, "optimizer": _optimizer_item(state)}
        items = {
            "position": position,
            "bert_config": bert_config.to_dict(),
            **self._description,
        }
        items["digests"] = describe(arrays, items)
        items["provenance"] = dict(self.provenance)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **{name: ocp.args.StandardSave(tree) for name, tree in arrays.items()},
                **{name: ocp.args.JsonSave(value) for name, value in items.items()},
            ),
        )
        seconds = time.perf_counter() - began
        log.info(
            "Step %d: checkpoint (%s) copied in %.1f s, and written in the background", step, _size(state), seconds
        )

    def restore(self, newest: int, abstract: TrainState) -> tuple[int, TrainState]:
        """Returns the newest intact step up to `newest`, and its state with the shardings of `abstract`.

        Any mesh may have saved it. All processes have to call it and get the same step. Newer steps are renamed to
        STEP.damaged, because the run repeats them. Raises DamagedError if no step is intact.
        """
        damage: list[str] = []
        for folder in complete_steps(self._workdir):
            if int(folder.name) > newest:
                continue
            began = time.perf_counter()
            log.info("Restoring %s (%s)", folder, _size(abstract))
            try:
                state, position = _read_state(folder, abstract)
            except DamagedError as error:
                damage.append(str(error))  # the error itself would keep arrays alive
                continue
            log.info("Restored and verified in %.1f s", time.perf_counter() - began)
            self._set_aside_after(int(folder.name), damage)
            self.unlogged = position.get("unlogged")
            return int(folder.name), state
        raise DamagedError(damage[0] if damage else f"{self._folder / str(newest)} was deleted; rerun the command")

    def _set_aside_after(self, step: int, damage: Sequence[str]) -> None:
        """Sets aside the folders of steps after `step`, which Orbax would not overwrite."""
        for line in damage:
            log.warning("%s", line)
        newer = [folder for folder in step_folders(self._workdir) if int(folder.name) > step]
        wait_for_first()  # until all processes have listed the same folders
        if not newer:
            return
        if is_first():
            for folder in newer:
                log.warning("Renamed damaged or newer checkpoint %s to %s", folder, set_aside(folder).name)
        wait_for_first()
        self._manager.reload()

    def check(self) -> None:
        """Raises the error of a failed background save, once it has ended."""
        # Orbax's `check_for_errors` does not surface errors of its finalize thread.
        if self._is_saving and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until every save is on disk; raises the error of a failed one."""
        self._is_saving = False
        if self._manager.is_saving_in_progress():
            log.info("Waiting for the checkpoint to be written")
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for saves and closes the folder."""
        self._manager.close()


def _size(tree: Any) -> str:
    """Returns the bytes of all arrays, for the log."""
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _read_state(folder: epath.Path, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """Reads the state and the position in the folder of a step, in all processes, or raises DamagedError in all.

    Calls the handler without a Checkpointer, whose barrier would block the others if one process fails to read.
    """
    damage, arrays, items = "", {}, {}
    trees = {"parameters": abstract.parameters, "optimizer": _optimizer_item(abstract)}
    names = ["position", *["digests"] * remote.exists(folder / "digests")]
    handler = ocp.CompositeCheckpointHandler()
    try:
        with convert_read_errors(folder):
            restored = handler.restore(
                folder,
                ocp.args.Composite(
                    **{name: ocp.args.StandardRestore(tree) for name, tree in trees.items()},
                    **{name: ocp.args.JsonRestore() for name in names},
                ),
            )
            arrays = {name: restored[name] for name in trees}
            items = {name: restored[name] for name in names}
            if items["position"]["next_batch"] != int(arrays["optimizer"]["step"]):
                raise DamagedError(f"{folder} is damaged: data position and optimizer step differ; use an earlier step")
    except DamagedError as error:
        damage = str(error)
    finally:
        handler.close()
    if any_process(bool(damage)):
        raise DamagedError(damage or f"{folder} is damaged: another process of the run could not read it")
    try:
        check_arrays(folder, arrays, items.get("digests"))
    except DamagedError as error:
        damage = str(error)
    if any_process(bool(damage)):
        raise DamagedError(damage or f"{folder} is damaged: another process of the run has read other arrays")
    optimizer = arrays["optimizer"]
    state = TrainState(
        step=optimizer["step"],
        parameters=arrays["parameters"],
        optimizer_state=optimizer["state"],
        nonfinite_steps=optimizer["nonfinite_steps"],
        nonfinite_streak=optimizer["nonfinite_streak"],
    )
    return state, items["position"]


@dataclass(frozen=True)
class Checkpoint:
    """Description and path of a checkpoint; parameters are loaded on demand.

    For imported parameters, `config` and `dataset_hashes` are empty and `step` is 0. `first_rows` has the first row of
    the current phase in each of its datasets; None if the version that saved it did not record it.
    """

    path: epath.Path
    bert_config: BertConfig
    tokenizer: Tokenizer
    heads: tuple[str, ...]
    config: dict[str, Any]
    step: int
    dataset_hashes: tuple[str, ...]
    first_rows: tuple[int, ...] | None
    task: dict[str, Any] | None = None  # of a fine-tuned model
    digests: dict[str, Any] | None = None  # None if an older version saved it

    @property
    def missing_heads(self) -> tuple[str, ...]:
        """Heads in `HEADS` that the checkpoint lacks."""
        return tuple(head for head in HEADS if head not in self.heads)

    def reference(self) -> dict[str, Any]:
        """Returns `path`, `step` and `digest` (None if an older version saved it), for a provenance record."""
        return {"path": str(self.path), "step": self.step, "digest": self.digests and json_digest(self.digests)}

    def require_heads(self, *heads: str, by: str) -> None:
        """Raises InputError with the missing ones of `heads`, and with `by`, the user that needs them."""
        if missing := [head for head in heads if head not in self.heads]:
            raise InputError(f"{self.path} has no {', '.join(missing)}; {by} needs {', '.join(heads)}")

    def load_parameters(
        self, shardings: Parameters | None = None, *, parts: Collection[str] | None = None, **settings: Any
    ) -> Parameters:
        """Loads fp32 parameters with `shardings`, by default on the first device.

        Raises DamagedError, an InputError, with the names of arrays that changed since the save.

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
        arguments = ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=parts is not None or (self.task is not None and not settings),
        )
        with convert_read_errors(self.path), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            parameters = checkpointer.restore(self.path / "parameters", args=arguments)
        check_arrays(self.path, {"parameters": parameters}, self.digests)
        return parameters


def check_finite(checkpoint: Checkpoint, parameters: Parameters) -> None:
    """Raises InputError with the names of non-finite parameters. They must not be sharded over processes."""
    if names := nonfinite_arrays(parameters):
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
    items["digests"] = describe({"parameters": parameters}, items)
    items["provenance"] = provenance.record(inputs or {})
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(
            remote.absolute(folder),
            args=ocp.args.Composite(
                parameters=ocp.args.StandardSave(parameters),
                **{name: ocp.args.JsonSave(value) for name, value in items.items()},
            ),
            force=True,
        )


def newest_intact(workdir: epath.Path) -> Checkpoint | None:
    """Opens the newest complete step, None in a new workdir. Logs and skips damaged ones; does not read arrays.

    Raises InputError if there are steps, but none is intact.
    """
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


def open_checkpoint(location: str) -> Checkpoint:
    """Opens a CHECKPOINT: a workdir (its newest complete step), the folder of a step, or imported parameters.

    Raises InputError if there is none.
    """
    given = remote.absolute(location)
    check_place(given)
    kinds = "a workdir, one of its checkpoints/STEP, or the output of `bert-jax import`"
    if not remote.exists(given):
        raise InputError(f"{location} does not exist{similar_name(location)}; expected {kinds}")
    path = newest_step(given) or given
    if not all(remote.exists(path / item) for item in ("parameters", "bert_config")) or not is_saved(path):
        runs = "".join(f" ({name} in it does)" for name in _workdirs_in(given)[:1])
        raise InputError(f"{location} holds no complete checkpoint{runs}; expected {kinds}")
    from_run = remote.exists(path / "position")
    optional = [name for name in ("heads", "task", "digests") if remote.exists(path / name)]
    names = ["bert_config", "tokenizer", *(("config", "position") if from_run else ()), *optional]
    with convert_read_errors(path), ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        read = checkpointer.restore(path, args=ocp.args.Composite(**{name: ocp.args.JsonRestore() for name in names}))
        items = {name: read[name] for name in names}
        if "digests" in items and (changed := changed_items(items, items["digests"])):
            raise changed_error(path, changed)
        position = items.get("position", {})
        return Checkpoint(
            path=path,
            bert_config=BertConfig.from_dict(items["bert_config"]),
            tokenizer=tokenizer_files.from_json(items["tokenizer"]),
            heads=tuple(items.get("heads", HEADS)),
            config=items.get("config", {}),
            step=position["next_batch"] if from_run else 0,
            dataset_hashes=tuple(position["datasets"]) if from_run else (),
            first_rows=tuple(position["first_rows"]) if "first_rows" in position else None,
            task=items.get("task"),
            digests=items.get("digests"),
        )
