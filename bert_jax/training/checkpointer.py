"""Checkpoints of a run in progress: saves its states in the background, restores them, and deletes old ones.

It keeps the newest `checkpoint.keep`, the best step by the scores of the evaluations, and milestones.
"""

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as managers

from bert_jax.config_keys import PretrainConfig, RunConfig
from bert_jax.errors import InputError
from bert_jax.model import BertConfig
from bert_jax.model.bert import HEADS
from bert_jax.runtime.processes import any_process, is_first
from bert_jax.sections import to_dict
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.checkpoints import FOLDER, complete_steps, read_items, set_aside, step_folders
from bert_jax.training.checksums import DamagedError, convert_read_errors, verify, write_checksums
from bert_jax.training.state import TrainState

log = logging.getLogger(__name__)

T = TypeVar("T")

_KEY = "checkpoint.milestones"


@dataclass(frozen=True)
class Milestones:
    """The milestones of a config: some `steps`, and the multiples of `every`, 0 among them; every=0 has none."""

    steps: frozenset[int] = frozenset()
    every: int = 0

    @classmethod
    def from_config(cls, config: PretrainConfig) -> "Milestones":
        """Returns the milestones of a pre-training config. InputError, with the key, for an invalid step."""
        steps, every, total = config.checkpoint.milestones, config.checkpoint.milestone_every_steps, config.total_steps
        if wrong := [step for step in steps if step < 0]:
            raise InputError(f"{_KEY}={steps!r:.80}: expected steps such as 0,1000,10000; got {wrong[0]!r}")
        if duplicate := sorted(step for step in {*steps} if steps.count(step) > 1):
            raise InputError(f"{_KEY}={steps!r:.80}: duplicate step {duplicate[0]}; list each step once")
        if steps and max(steps) > total:
            raise InputError(
                f"{_KEY}={steps!r:.80}: step {max(steps)} is past total_steps={total}; list steps of 0 to {total}"
            )
        return cls(frozenset(steps), every)

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and (step in self.steps or (self.every > 0 and step % self.every == 0))

    def up_to(self, last: int) -> set[int]:
        """Returns the milestones of 0 to `last`; none if it is negative."""
        listed = {step for step in self.steps if step <= last}
        return listed | {*(range(0, last + 1, self.every) if self.every else ())}


NO_MILESTONES = Milestones()


@dataclass(frozen=True)
class BestOfNewest:
    """Policy of Orbax: preserves the best step of each of the `keep` newest ones.

    If the newest is damaged, a run resumes from another. `best_up_to` maps a step to the best one up to it, or None.
    """

    keep: int
    best_up_to: Callable[[int], int | None]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns whether each checkpoint, the oldest first, is preserved."""
        best = {self.best_up_to(found.step) for found in checkpoints[-self.keep :]}
        return [found.step in best for found in checkpoints]


def retention(
    keep: int, milestones: Milestones, earlier: Collection[int], best_up_to: Callable[[int], int | None]
) -> Any:
    """Returns Orbax's policy of a run: the `keep` newest steps, the best ones of them, and all milestones."""
    return managers.AnyPreservationPolicy(
        [
            managers.LatestN(keep),
            managers.CustomSteps([*milestones.steps, *earlier]),
            *([managers.EveryNSteps(milestones.every)] if milestones.every else []),
            BestOfNewest(keep, best_up_to),
        ]
    )


@dataclass(frozen=True)
class SavePlan:
    """Checkpoints of a run: those that are still to be saved, and those that its end leaves on the disk.

    Attributes:
      saves: number of saves that are left.
      milestones: number of milestones of the whole run.
      kept: number of checkpoints that are kept, milestones included.
    """

    saves: int
    milestones: int
    kept: int


def plan_saves(
    config: PretrainConfig, phase_ends: Iterable[int], start: int | None, workdir: epath.Path | None
) -> SavePlan:
    """Plans the saves of a run that resumes from the checkpoint of step `start` of `workdir`; None for a new run."""
    milestones, every = Milestones.from_config(config).up_to(config.total_steps), config.checkpoint.every_steps
    regular = {*range(every, config.total_steps + 1, every), *phase_ends}
    due = {step for step in regular | milestones if start is None or step > start}
    saved, earlier = set[int](), set[int]()
    if workdir is not None and start is not None:  # newer steps are damaged
        saved, earlier = {step for step in _saved_steps(workdir) if step <= start}, _earlier_milestones(workdir)
    kept = {*sorted(due | saved)[-config.checkpoint.keep :], *((due | saved) & (milestones | earlier))}
    return SavePlan(len(due), len(milestones), len(kept))


class BestStep:
    """Scores of a run's evaluations, of which higher is better; the best step; and whether training is to end.

    Without `keep_best` there is no best step, and nothing ends early.
    """

    def __init__(
        self, *, keep_best: bool, patience: int = 0, min_delta: float = 0.0, scored: Mapping[str, str] | None = None
    ):  # fmt: skip
        """Starts without scores.

        Args:
          keep_best: choose the best step.
          patience: evaluations without improvement that end the training; 0 for any number.
          min_delta: a score improves if it is above that of the last improvement by more than this.
          scored: the `split` that the scores are of, and the `hash` of its examples; None if unknown.
        """
        self._scored = scored
        self._keep_best, self._patience, self._min_delta = keep_best, patience, min_delta
        self._scores: list[tuple[int, float | None]] = []  # None is not finite, and never the best

    def add(self, step: int, score: float) -> None:
        """Adds the score of the evaluation after `step`, in the order of steps."""
        self._scores.append((step, score if math.isfinite(score) else None))

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Replaces the scores by the result of `to_dict`; by none if a checkpoint has None.

        Raises InputError if they are those of other examples.
        """
        before = (saved or {}).get("scored")
        if before and self._scored and before != self._scored:
            raise InputError(
                f"keep_best=True: the epochs so far were scored by other examples of {before['split']}; restore the "
                "old file, or choose another workdir"
            )
        self._scores = [(step, score) for step, score in saved["scores"]] if saved else []

    def to_dict(self) -> dict[str, Any] | None:
        """Returns `best_step`, `scores`, a list of [step, score], and `scored`, as JSON; None without `keep_best`."""
        if not self._keep_best:
            return None
        scored = {} if self._scored is None else {"scored": dict(self._scored)}
        return {"best_step": self.best, "scores": [list(pair) for pair in self._scores], **scored}

    @property
    def best(self) -> int | None:
        """The step with the best score, the earliest of equals; None if there is none."""
        return self.best_up_to(None)

    def best_up_to(self, last: int | None) -> int | None:
        """Returns the best of the steps up to `last`, None for all: the one that a checkpoint of `last` refers to."""
        finite = [
            (score, step) for step, score in self._scores
            if score is not None and (last is None or step <= last)
        ]  # fmt: skip
        return max(finite, key=lambda pair: pair[0])[1] if self._keep_best and finite else None

    def __contains__(self, step: object) -> bool:
        """Returns whether `step` is the best one so far, which has to be saved."""
        return step is not None and step == self.best

    @property
    def score(self) -> float | None:
        """The best score; None if there is none."""
        return dict(self._scores)[self.best] if self.best is not None else None

    def without_improvement(self) -> int:
        """Counts the latest evaluations that did not improve the score by more than `min_delta`."""
        reference, count = -math.inf, 0
        for _, score in self._scores:
            improves = score is not None and score > reference + self._min_delta
            reference, count = (score, 0) if improves and score is not None else (reference, count + 1)
        return count

    def ends_training(self) -> bool:
        """Returns whether `patience` evaluations have not improved the score."""
        return self._keep_best and 0 < self._patience <= self.without_improvement()


# --- Saving and restoring ----------------------------------------------------------------------------------------


class Checkpointer:
    """Saves (asynchronously) and restores the states of one workdir; keeps the newest, the best and milestones."""

    def __init__(
        self, workdir: epath.Path, *, keep: int, config: RunConfig, tokenizer: Tokenizer,
        task: dict[str, Any] | None = None, heads: Collection[str] = HEADS, milestones: Milestones = NO_MILESTONES,
        best_step: BestStep | None = None,
    ):  # fmt: skip
        """Opens the workdir's checkpoints; keeps the `keep` newest ones, and never deletes `milestones`.

        A fine-tuned model has a `task`, and `heads` names its pre-training heads; both are JSON. A run with a
        `best_step` keeps that step, too; its scores are saved and restored with the state.
        """
        self._workdir = workdir
        self._folder = workdir / FOLDER
        self._best_step = best_step or BestStep(keep_best=False)
        self._is_saving = self._has_failed = False
        self._step = 0  # that is being saved
        saved = _saved_steps(workdir)
        self._milestones = milestones
        self._kept = _earlier_milestones(workdir) | {step for step in saved if step in milestones}
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=retention(keep, milestones, self._kept, self._best_step.best_up_to),
                cleanup_tmp_directories=True,
                enable_async_checkpointing=True,
                async_options=ocp.AsyncOptions(
                    barrier_sync_fn=self._wait_unless_failed, post_finalization_callback=self._write_checksums
                ),
            ),
        )
        if missed := milestones.up_to(max(saved, default=-1)) - {*saved}:
            log.warning(
                "%s: %d milestones precede the newest checkpoint and were not saved, the first of them step %d; they "
                "stay missing", workdir, len(missed), min(missed),
            )  # fmt: skip
        self._before_save: list[Callable[[], None]] = []
        self.provenance: Mapping[str, Any] = {}
        """The entry of the run that saves, see `files/provenance.py`."""
        self.unlogged: dict[str, list[float]] | None = None
        """Sums of metrics of the restored step that are not logged yet; see `RunningMeans`."""
        self._description: dict[str, Any] = {
            "tokenizer": tokenizer.to_json(),
            "config": to_dict(config),
        }
        if task is not None:
            self._description |= {"task": task, "heads": [head for head in HEADS if head in heads]}

    def _write_checksums(self) -> None:
        """Called by Orbax in process 0 once all processes have written their arrays."""
        write_checksums(self._folder / str(self._step))

    def before_each_save(self, function: Callable[[], None]) -> None:
        """Registers `function` to be called at the start of every save, such as a flush of metrics."""
        self._before_save.append(function)

    def save(
        self, step: int, state: TrainState, *, bert_config: BertConfig, dataset_hashes: Sequence[str],
        unlogged: dict[str, list[float]] | None = None,
    ) -> None:  # fmt: skip
        """Starts saving `state`; the arrays are copied off the devices before this returns.

        `dataset_hashes` has one hash for each phase that has started. `unlogged` is the result of
        `LogMetrics.unlogged`.
        """
        for function in self._before_save:
            function()
        began = time.perf_counter()
        self.wait()  # Orbax would as well; the checksums go to the step that is being saved
        self._is_saving, self._step = True, step
        self._kept |= {step} if step in self._milestones else set()
        position: dict[str, Any] = {
            "next_batch": step, "datasets": list(dataset_hashes), "unlogged": unlogged,
            "milestones": sorted(self._kept),
        }  # fmt: skip
        if (scores := self._best_step.to_dict()) is not None:
            position["evaluations"] = scores
        arrays = {"parameters": state.parameters, "optimizer": _optimizer_item(state)}
        items = {
            "position": position,
            "bert_config": bert_config.to_dict(),
            **self._description,
        }
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
            self._best_step.restore(position.get("evaluations"))
            return int(folder.name), state
        raise DamagedError(damage[0] if damage else f"{self._folder / str(newest)} was deleted; rerun the command")

    def _set_aside_after(self, step: int, damage: Sequence[str]) -> None:
        """Sets aside the folders of steps after `step`, which Orbax would not overwrite."""
        for line in damage:
            log.warning("%s", line)
        newer = [folder for folder in step_folders(self._workdir) if int(folder.name) > step]
        multihost_utils.sync_global_devices("listed")  # until all processes have listed the same folders
        if not newer:
            return
        if is_first():
            for folder in newer:
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
        if self._manager.is_saving_in_progress():
            log.info("Waiting for the checkpoint to be written")
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


def _saved_steps(workdir: epath.Path) -> list[int]:
    return [int(step.name) for step in step_folders(workdir)]


def _earlier_milestones(workdir: epath.Path) -> set[int]:
    """Returns the milestones of the newest intact step: a run that resumes with others keeps these."""
    for folder in complete_steps(workdir):
        with suppress(DamagedError):
            return {*read_items(folder, ["position"])["position"]["milestones"]}
    return set()


def _read_state(folder: epath.Path, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """Reads the state and the position in the folder of a step, in all processes, or raises DamagedError in all.

    Calls the handler without a Checkpointer, whose barrier would block the others if one process fails to read.
    """
    share = jax.process_index(), jax.process_count()
    _together(folder, lambda: verify(folder, ["optimizer", "parameters", "position"], share=share))

    def read() -> tuple[dict[str, Any], Any, Any]:
        handler = ocp.CompositeCheckpointHandler()
        trees = {"optimizer": _optimizer_item(abstract), "parameters": abstract.parameters}
        try:
            with convert_read_errors(folder):
                position = read_items(folder, ["position"])["position"]
                arguments = {name: ocp.args.StandardRestore(tree) for name, tree in trees.items()}
                arrays = handler.restore(folder, ocp.args.Composite(**arguments))
                if position["next_batch"] != int(jax.device_get(arrays["optimizer"]["step"])):
                    raise DamagedError(
                        f"{folder} is damaged: data position and optimizer step differ; use an earlier step"
                    )
                return position, arrays["optimizer"], arrays["parameters"]
        finally:
            handler.close()

    position, optimizer, parameters = _together(folder, read)
    state = TrainState(
        step=optimizer["step"],
        parameters=parameters,
        optimizer_state=optimizer["state"],
        nonfinite_steps=optimizer["nonfinite_steps"],
        nonfinite_streak=optimizer["nonfinite_streak"],
    )
    return state, position


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
        "state": state.optimizer_state,
        "step": state.step,
        "nonfinite_steps": state.nonfinite_steps,
        "nonfinite_streak": state.nonfinite_streak,
    }
