"""Checkpoints: each step's folder is one atomic Orbax composite, complete by itself or not there.

WORKDIR/checkpoints/STEP/
  parameters     the model's
  optimizer      moments and counters
  position       batches consumed, one integer, the hash of what each phase has read, up to the present one, and the
                 row at which that began to read each of its datasets, and the sums of the metrics of steps that no
                 logged row has yet
  bert_config    as bert_config.json
  tokenizer      the vocabulary and how it is applied
  config         the run's
  digests        of all arrays and of the other items, which every load holds what it has read against

Parameters that no run here has made are a folder like a step's, without optimizer, position and config, and with

  heads          which of `model.bert.HEADS` there are (a step of pre-training has them all)

A fine-tuned model's steps have `heads` as well, and

  task           what its output is of, and what has to be known to predict with it
"""

import json
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from bert_jax.config import ConfigDict
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.model.bert import HEADS, Parameters
from bert_jax.runtime.processes import any_process, is_first, wait_for_first
from bert_jax.text.tokenization import WordPieceTokenizer
from bert_jax.training.checkpointing.checkpoint_damage import DamagedError, changed_error, check_arrays, damage_named
from bert_jax.training.checkpointing.checkpoint_digests import changed_items, describe, nonfinite_arrays
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
    """InputError for a store that Orbax writes no checkpoints to."""
    if remote.is_remote(folder) and not os.fspath(folder).startswith("gs://"):
        raise InputError(f"{folder}: workdirs and checkpoints are on a disk or on gs://, datasets anywhere: choose one")


class Checkpointer:
    """Saves and restores the states of one workdir, asynchronously, keeping the newest few."""

    def __init__(
        self, workdir: epath.Path, *, keep: int, config: ConfigDict, tokenizer: WordPieceTokenizer,
        task: dict[str, Any] | None = None, heads: Collection[str] = HEADS,
    ):  # fmt: skip
        """`task` is of a fine-tuned model, `heads` what it has of those of pre-training; both are JSON."""
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
        self.unlogged: dict[str, Any] | None = None
        """Of the step that was restored: metrics that no logged row has yet; see `RunningMeans`."""
        self._about = {
            "tokenizer": tokenizer.to_json(),
            "config": json.loads(config.to_json_best_effort()),
        }
        if task is not None:
            self._about |= {"task": task, "heads": [head for head in HEADS if head in heads]}

    def latest_step(self) -> int | None:
        """The newest complete step, None where there is none."""
        return self._manager.latest_step()

    def before_each_save(self, function: Callable[[], None]) -> None:
        """Calls `function` at the beginning of every save, such as one that writes down what belongs to the step."""
        self._before_save.append(function)

    def save(
        self, step: int, state: TrainState, *, bert_config: BertConfig, dataset_hashes: Sequence[str],
        first_rows: Sequence[int] | None = None, unlogged: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Starts saving `state`; the arrays are copied off the devices before this returns.

        `dataset_hashes` are of what the phases have read that are begun, `first_rows` where the last of them began to
        read each of its datasets; without phases there is none. `unlogged` is what `RunningMeans.to_dict` says.
        """
        for function in self._before_save:
            function()
        self._is_saving = True
        position: dict[str, Any] = {"next_batch": step, "datasets": list(dataset_hashes), "unlogged": unlogged}
        if first_rows is not None:
            position["first_rows"] = list(first_rows)
        arrays = {"parameters": state.parameters, "optimizer": _optimizer_item(state)}
        items = {
            "position": position,
            "bert_config": bert_config.to_dict(),
            **self._about,
        }
        items["digests"] = describe(arrays, items)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **{name: ocp.args.StandardSave(tree) for name, tree in arrays.items()},
                **{name: ocp.args.JsonSave(value) for name, value in items.items()},
            ),
        )

    def restore(self, newest: int, abstract: TrainState) -> tuple[int, TrainState]:
        """Returns the newest intact step up to `newest`, and its state, laid out as `abstract` says.

        Any mesh may have saved it. All processes have to call it and get the same step. Newer ones are set aside as
        STEP.damaged, for the run makes them again. Raises DamagedError where no step is intact.
        """
        damage: list[str] = []
        for folder in complete_steps(self._workdir):
            if int(folder.name) > newest:
                continue
            try:
                state, position = _read_state(folder, abstract)
            except DamagedError as error:
                damage.append(str(error))  # not the error itself, which holds arrays
                continue
            self._set_aside_after(int(folder.name), damage)
            self.unlogged = position.get("unlogged")
            return int(folder.name), state
        raise DamagedError(damage[0] if damage else f"{self._folder / str(newest)} is gone: start the run again")

    def _set_aside_after(self, step: int, damage: Sequence[str]) -> None:
        """Puts the folders of steps after `step` out of the way, in which Orbax would save nothing."""
        for line in damage:
            log.warning("%s", line)
        newer = [folder for folder in step_folders(self._workdir) if int(folder.name) > step]
        wait_for_first()  # all have seen the same ones
        if not newer:
            return
        if is_first():
            for folder in newer:
                log.warning("%s is set aside as %s", folder, set_aside(folder).name)
        wait_for_first()
        self._manager.reload()

    def check(self) -> None:
        """Raises what went wrong in a save, once it has ended in the background."""
        # Orbax has a method for it, but tells there nothing of what its thread of finishing touches has come upon.
        if self._is_saving and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Returns when every save is on disk, or raises what went wrong in one."""
        self._is_saving = False
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and lets go of the folder."""
        self._manager.close()


def _read_state(folder: epath.Path, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """Returns the state in the folder of a step and its position, in all processes, or raises DamagedError in all.

    The handler is called without a Checkpointer, at whose barrier the others would wait for one that cannot read.
    """
    damage, arrays, items = "", {}, {}
    trees = {"parameters": abstract.parameters, "optimizer": _optimizer_item(abstract)}
    names = ["position", *["digests"] * remote.exists(folder / "digests")]
    handler = ocp.CompositeCheckpointHandler()
    try:
        with damage_named(folder):
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
                raise DamagedError(f"{folder} is damaged: data position and optimizer step differ")
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
    """What a checkpoint says of itself, and where it is; the parameters are loaded on demand.

    Without a run that made it, `config` and `dataset_hashes` are empty and `step` is 0. `first_rows` are the rows at
    which the phase began to read each of its datasets; None where the version that saved did not say.
    """

    path: epath.Path
    bert_config: BertConfig
    tokenizer: WordPieceTokenizer
    heads: tuple[str, ...]
    config: dict[str, Any]
    step: int
    dataset_hashes: tuple[str, ...]
    first_rows: tuple[int, ...] | None
    task: dict[str, Any] | None = None  # of a fine-tuned model
    digests: dict[str, Any] | None = None  # none in what older versions have saved

    @property
    def missing_heads(self) -> tuple[str, ...]:
        """What of `HEADS` is not there."""
        return tuple(head for head in HEADS if head not in self.heads)

    def require_heads(self, *heads: str, by: str) -> None:
        """InputError that names those of `heads` that are missing, and `by`, which needs them."""
        if missing := [head for head in heads if head not in self.heads]:
            raise InputError(f"{self.path} has no {', '.join(missing)}: {by} needs {', '.join(heads)}")

    def load_parameters(
        self, shardings: Parameters | None = None, *, parts: Collection[str] | None = None, **settings: Any
    ) -> Parameters:
        """Parameters, fp32, laid out as `shardings` says or on the first device.

        Raises DamagedError, an InputError, that names the arrays which are not what was saved.

        Args:
          shardings: of what is loaded, at the least.
          parts: which attributes of the model to load; by default all, and then the checkpoint has to have no more,
            but for what a task has on top.
          settings: of the model, for `abstract_parameters`: by default that of pre-training with the heads there are.
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
        with damage_named(self.path), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            parameters = checkpointer.restore(self.path / "parameters", args=arguments)
        check_arrays(self.path, {"parameters": parameters}, self.digests)
        return parameters


def check_finite(checkpoint: Checkpoint, parameters: Parameters) -> None:
    """Raises InputError that names the parameters of a checkpoint, none sharded over processes, that are not finite."""
    if names := nonfinite_arrays(parameters):
        raise InputError(f"{checkpoint.path} has NaN or infinity in {', '.join(names[:3])}: use an earlier step")


def save_parameters(
    folder: epath.Path,
    parameters: Parameters,
    *,
    bert_config: BertConfig,
    tokenizer: WordPieceTokenizer,
    heads: Collection[str],
    task: dict[str, Any] | None = None,
) -> None:
    """Writes a checkpoint of parameters alone, which `open_checkpoint` reads: whole or not at all.

    `folder` is replaced: that it may be is for the caller to know. `parameters` lack what is not in `heads`; `task` is
    that of a fine-tuned model.
    """
    items = {
        "bert_config": bert_config.to_dict(),
        "tokenizer": tokenizer.to_json(),
        "heads": [head for head in HEADS if head in heads],
        **({} if task is None else {"task": task}),
    }
    items["digests"] = describe({"parameters": parameters}, items)
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
    """Returns what the newest complete step says of itself, None in a new workdir; damaged ones are named and skipped.

    Its arrays are not read. Raises InputError where there are steps, and none is complete.
    """
    for folder in complete_steps(workdir):
        try:
            return open_checkpoint(str(folder))
        except DamagedError as error:
            log.warning("%s", error)
    if left := [folder for folder in step_folders(workdir) if is_saved(folder)]:
        raise InputError(f"--workdir: {left[0]} and the steps before it are damaged: delete them to start anew")
    return None


def _workdirs_in(folder: epath.Path) -> list[str]:
    """The names of those with a complete step: a search has several. Of a remote folder none, which would take long."""
    is_local = not remote.is_remote(folder) and folder.is_dir()
    return sorted(child.name for child in folder.iterdir() if newest_step(child)) if is_local else []


def open_checkpoint(location: str) -> Checkpoint:
    """The checkpoint at a CHECKPOINT: a workdir (its newest complete step), a step's folder, or imported parameters.

    Raises InputError where there is none.
    """
    given = remote.absolute(location)
    check_place(given)
    what = "a workdir, one of its checkpoints/STEP, or what `bert-jax import` wrote"
    if not remote.exists(given):
        raise InputError(f"{location} does not exist: a checkpoint is {what}")
    path = newest_step(given) or given
    if not all(remote.exists(path / item) for item in ("parameters", "bert_config")) or not is_saved(path):
        runs = "".join(f" ({name} in it does)" for name in _workdirs_in(given)[:1])
        raise InputError(f"{location} holds no complete checkpoint{runs}: give {what}")
    from_run = remote.exists(path / "position")
    optional = [name for name in ("heads", "task", "digests") if remote.exists(path / name)]
    names = ["bert_config", "tokenizer", *(("config", "position") if from_run else ()), *optional]
    with damage_named(path), ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        read = checkpointer.restore(path, args=ocp.args.Composite(**{name: ocp.args.JsonRestore() for name in names}))
        items = {name: read[name] for name in names}
        if "digests" in items and (changed := changed_items(items, items["digests"])):
            raise changed_error(path, changed)
        position = items.get("position", {})
        return Checkpoint(
            path=path,
            bert_config=BertConfig.from_dict(items["bert_config"]),
            tokenizer=WordPieceTokenizer.from_json(items["tokenizer"]),
            heads=tuple(items.get("heads", HEADS)),
            config=items.get("config", {}),
            step=position["next_batch"] if from_run else 0,
            dataset_hashes=tuple(position["datasets"]) if from_run else (),
            first_rows=tuple(position["first_rows"]) if "first_rows" in position else None,
            task=items.get("task"),
            digests=items.get("digests"),
        )
