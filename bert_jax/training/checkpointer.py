"""Checkpoints of a run in progress: saves its states in the background, restores them, and deletes old ones."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as managers

from bert_jax.errors import BertJaxError
from bert_jax.model import BertConfig
from bert_jax.runtime.processes import RESTART_ADVICE, any_process, is_first
from bert_jax.training.checkpoints import (
    FOLDER,
    Checkpoint,
    DamagedError,
    complete_steps,
    read_arrays,
    read_items,
    set_aside,
    step_folders,
    verify,
    write_checksums,
)
from bert_jax.training.train_step import TrainState

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class KeepChosen:
    """Policy of Orbax that preserves the steps for which `is_kept` returns True."""

    is_kept: Callable[[int], bool]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns whether each checkpoint is preserved."""
        return [self.is_kept(found.step) for found in checkpoints]


class Checkpointer:
    """Saves (asynchronously) and restores the states of one workdir."""

    def __init__(
        self, workdir: epath.Path, description: Mapping[str, Any], *, keep: int,
        is_kept: Callable[[int], bool] = lambda step: False,
    ):  # fmt: skip
        """Opens the workdir's checkpoints; deletes all but the `keep` newest ones and those that `is_kept` chooses.

        `description` has the items of JSON that all steps share: config, tokenizer, and those of a fine-tuned model.
        `provenance` is added when the run is opened, see `files/provenance.py`.
        """
        self._workdir = workdir
        self._folder = workdir / FOLDER
        self.description = dict(description)
        self._is_saving = self._has_failed = False
        self._step = 0  # that is being saved
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=managers.AnyPreservationPolicy([managers.LatestN(keep), KeepChosen(is_kept)]),
                cleanup_tmp_directories=True,
                enable_async_checkpointing=True,
                async_options=ocp.AsyncOptions(
                    barrier_sync_fn=self._wait_unless_failed,
                    # in process 0, once all processes have written their arrays
                    post_finalization_callback=lambda: write_checksums(self._folder / str(self._step)),
                ),
            ),
        )

    def save(self, step: int, state: TrainState, bert_config: BertConfig, position: Mapping[str, Any]) -> None:
        """Starts saving `state`; the arrays are copied off the devices before this returns.

        `position` has what a run needs to go on: `datasets`, the hash of each phase that has started, `unlogged`, the
        result of `LogMetrics.unlogged`, and entries of the caller, such as its milestones.
        """
        began = time.perf_counter()
        self.wait()  # Orbax would as well; the checksums go to the step that is being saved
        self._is_saving, self._step = True, step
        arrays = {"parameters": state.parameters, "optimizer": _optimizer_item(state)}
        position = {"next_batch": step, **position}
        items = {"position": position, "bert_config": bert_config.to_dict(), **self.description}
        is_started = self._manager.save(
            step,
            args=ocp.args.Composite(
                **{name: ocp.args.StandardSave(tree) for name, tree in arrays.items()},
                **{name: ocp.args.JsonSave(value) for name, value in items.items()},
            ),
        )
        if not is_started:
            raise BertJaxError(f"{self._folder}: holds a step after {step}, so that it was not saved; {RESTART_ADVICE}")
        seconds = time.perf_counter() - began
        log.info(
            "Step %d: checkpoint (%s) copied in %.1f s, and written in the background", step, _size(state), seconds
        )

    def first_state(
        self, newest: Checkpoint | None, abstract: TrainState, make: Callable[[], TrainState]
    ) -> tuple[int, TrainState, dict[str, Any]]:
        """Returns the steps done, the state and the position of a run that starts: of `restore`, or those of a new run.

        `newest` is the newest checkpoint of the workdir; None in a new one, whose state `make` makes.
        """
        if newest is None:
            return 0, make(), {}
        start, state, position = self.restore(newest.step, abstract)
        log.info("Resuming from step %d", start)
        return start, state, position

    def restore(self, newest: int, abstract: TrainState) -> tuple[int, TrainState, dict[str, Any]]:
        """Returns the newest intact step up to `newest`, its state with the shardings of `abstract`, and its position.

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
            log.info("Restored and verified step %s in %.1f s", folder.name, time.perf_counter() - began)
            for line in damage:
                log.warning("%s", line)
            self._set_aside_after(int(folder.name))
            return int(folder.name), state, position
        raise DamagedError(damage[0] if damage else f"{self._folder / str(newest)} was deleted; rerun the command")

    def _set_aside_after(self, step: int) -> None:
        """Renames the folders of steps after `step`, which Orbax would not overwrite."""
        newer = [folder for folder in step_folders(self._workdir) if int(folder.name) > step]
        multihost_utils.sync_global_devices("listed")  # until all processes have listed the same folders
        if not newer:
            return
        for folder in newer if is_first() else ():
            log.warning("Renamed damaged or newer checkpoint %s to %s", folder, set_aside(folder).name)
        multihost_utils.sync_global_devices("renamed")
        self._manager.reload()

    def check(self) -> None:
        """Raises the error of a failed background save, once it has ended."""
        # Orbax's `check_for_errors` does not surface errors of its finalize thread.
        if self._has_failed or (self._is_saving and not self._manager.is_saving_in_progress()):
            self.wait()

    def wait(self) -> None:
        """Waits until every save is on disk; raises the error of a failed one."""
        self._is_saving = self._has_failed = False
        self._manager.wait_until_finished()

    def _wait_unless_failed(self, *, key: str, timeout_ms: int) -> None:
        """Waits for all processes at a barrier of Orbax; raises the error of this process's save instead, if it failed.

        Orbax waits there after a failed save, too: for 20 minutes, because the others wait at another barrier.
        """
        error = sys.exc_info()[1]
        if error is not None and threading.current_thread() is not threading.main_thread():
            self._has_failed = True
            raise error
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def close(self) -> None:
        """Waits for saves and closes the folder."""
        self._manager.close()


def _size(tree: Any) -> str:
    """Returns the bytes of all arrays, for the log."""
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _read_state(folder: epath.Path, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """Reads the state and the position in the folder of a step, in all processes, or raises DamagedError in all."""
    share = jax.process_index(), jax.process_count()
    _together(folder, lambda: verify(folder, ["optimizer", "parameters", "position"], share=share))

    def read() -> tuple[TrainState, dict[str, Any]]:
        position = read_items(folder, ["position"])["position"]
        optimizer = dict(read_arrays(folder / "optimizer", _optimizer_item(abstract)))
        parameters = read_arrays(folder / "parameters", abstract.parameters)
        if position["next_batch"] != int(jax.device_get(optimizer["step"])):
            raise DamagedError(f"{folder} is damaged: data position and optimizer step differ; use an earlier step")
        return TrainState(parameters=parameters, optimizer_state=optimizer.pop("state"), **optimizer), position

    return _together(folder, read)


def _together(folder: epath.Path, read: Callable[[], T]) -> T:
    """Returns the result of `read`; raises DamagedError in all processes if it does in one."""
    result, damage = None, ""
    try:
        result = read()
    except DamagedError as error:
        damage = str(error)
    if any_process(bool(damage)):
        raise DamagedError(damage or f"{folder} is damaged: another process of the run could not read it")
    return cast(T, result)


def _optimizer_item(state: TrainState) -> dict[str, Any]:
    return {
        "state": state.optimizer_state, "step": state.step, "nonfinite_steps": state.nonfinite_steps,
        "nonfinite_streak": state.nonfinite_streak,
    }  # fmt: skip
