"""Training loop of pre-training and fine-tuning: takes batches, runs steps, and calls hooks between them.

Hooks log metrics, evaluate, save and trace. They are called in the order of their list.
"""

import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax
import numpy as np

from bert_jax.batch import Batch, HostBatch
from bert_jax.config_keys import RunConfig
from bert_jax.data.loading.loader import Prefetch
from bert_jax.errors import BertJaxError, Interrupted
from bert_jax.files import remote
from bert_jax.parallel.mesh import put_batch, put_flag, rows_here
from bert_jax.runtime.processes import is_first
from bert_jax.tracking.metrics import RunningMeans
from bert_jax.tracking.throughput import Throughput, key_values, summary
from bert_jax.training.run import Run
from bert_jax.training.train_step import Metrics, TrainState

log = logging.getLogger(__name__)


class End(Enum):
    """Reason why a loop ends after the current step."""

    LAST_STEP = "last step"
    STOPPED = "stopped"  # some process received a stop signal
    NONFINITE = "nonfinite"  # too many non-finite steps in a row
    TARGET = "target"  # an evaluation reached the target


Ends = set[End]


# --- Hooks -------------------------------------------------------------------------------------------------------


class Hook:
    """Work beside the training step. A subclass overrides what it needs; `step` is always the number of steps done."""

    is_timed = True
    """Whether the time of `after` counts in the rates of steps."""
    has_reached_target = False
    """Whether the latest `after` ends the loop. Has to be the same in all processes."""

    def start(self, step: int) -> None:
        """Called once, before the first step of the range."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Called for every step once its metrics are read, which is while the device runs the next step."""

    def is_due(self, step: int, ends: Ends) -> bool:
        """Returns whether `after` is called after `step`. Has to be the same in all processes."""
        return False

    def after(self, step: int, state: TrainState) -> None:
        """Called with the state after `step`. The metrics of that step are read and logged, the device is idle."""


class LogMetrics(Hook):
    """Writes a row of metrics at each multiple of `every` and at the `last` step: means since the last row, and rates.

    `extra` maps a step to additional values of its row. `unlogged` are the sums of `RunningMeans` for a run that
    resumes within the phase; None at a phase's start, whose means have no step of another phase.
    """

    def __init__(
        self, run: Run, throughput: Throughput, *, every: int, last: int,
        extra: Callable[[int], dict[str, float]], unlogged: Mapping[str, list[float]] | None,
    ):  # fmt: skip
        self._run, self._throughput, self._every, self._last, self._extra = run, throughput, every, last, extra
        self._shown = ""  # the latest row, for the bar; before the first row it shows the latest step
        self._means = RunningMeans(unlogged)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._means.add(values)
        if values["nonfinite_streak"] == 1:
            log.warning(
                "Step %d: loss, gradient or update is not finite (loss %g, gradient norm %g); the step is skipped",
                step, values["loss"], values["grad_norm"],
            )  # fmt: skip
        if step % self._every == 0 or step == self._last:
            self._write(step)
        self._run.bar.set_postfix_str(self._shown or summary(values), refresh=False)
        self._run.bar.update(1)

    def _write(self, step: int) -> None:
        row = self._means.take() | self._throughput.rates() | self._extra(step)
        self._run.trackers.log(step, row)
        log.info("step %d/%d %s", step, self._run.total, key_values(row), extra={"on_bar": True})
        self._shown = summary(row)

    def unlogged(self) -> dict[str, list[float]]:
        """Returns the sums of metrics that no row has yet, as JSON; a checkpoint keeps them."""
        return dict(self._means.sums)


class Trace(Hook):
    """Traces steps A to B into WORKDIR/profile. A run that starts or ends within them traces those that it runs.

    Process 0 records; in the others the hook is due at the same steps, since all have to read metrics alike.
    """

    is_timed = False

    def __init__(self, steps: str, run: Run):
        """`steps` is `A:B`, or "" for none, as in the config. A trace is closed with the run."""
        first, last = map(int, (steps or "0:-1").split(":"))
        self._steps, self._target = range(first, last + 1), run.folder / "profile"
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of the current trace; JAX writes to local disks
        run.stack.callback(self.close)

    def start(self, step: int) -> None:
        if self._begins(step):
            self._folder = tempfile.TemporaryDirectory(prefix="bert_jax_profile_")
            if is_first():
                jax.profiler.start_trace(self._folder.name)

    def is_due(self, step: int, ends: Ends) -> bool:
        return step == self._steps[-1] if self._folder else not ends and self._begins(step)

    def after(self, step: int, state: TrainState) -> None:
        if self._folder:
            self.close()
        else:
            self.start(step)

    def _begins(self, step: int) -> bool:
        return not self._folder and step + 1 in self._steps

    def close(self) -> None:
        """Stops the trace, if there is one, and writes it to the workdir."""
        if self._folder is None:
            return
        with self._folder as folder, remote.store_errors(self._target):
            self._folder = None
            if is_first():
                jax.profiler.stop_trace()
                store, name = remote.store_of(self._target)
                store.put(f"{folder}/", name, recursive=True)
        log.info("Wrote profiler trace; view it with: tensorboard --logdir %s, or at ui.perfetto.dev", self._target)


class Evaluate(Hook):
    """Evaluates at each multiple of `every`, 0 for none, and after the last step. `scores` are those of the latest.

    The loop ends after scores for which `is_reached` returns True.
    """

    is_timed = False

    def __init__(
        self, evaluate: Callable[[int, TrainState], dict[str, float]], *, every: int,
        is_reached: Callable[[dict[str, float]], bool] = lambda scores: False,
    ):  # fmt: skip
        self._evaluate, self._every, self._is_reached = evaluate, every, is_reached
        self.scores: dict[str, float] = {}

    def is_due(self, step: int, ends: Ends) -> bool:
        return End.LAST_STEP in ends or (self._every > 0 and step % self._every == 0)

    def after(self, step: int, state: TrainState) -> None:
        self.scores = self._evaluate(step, state)
        self.has_reached_target = self._is_reached(self.scores)


class Save(Hook):
    """Saves a checkpoint at each multiple of `every`, at chosen steps, and at every end of the loop, of any kind."""

    def __init__(
        self, save: Callable[[int, TrainState], None], *, every: int,
        is_chosen: Callable[[int], bool] = lambda step: False,
    ):  # fmt: skip
        self._save, self._every, self._is_chosen = save, every, is_chosen

    def is_due(self, step: int, ends: Ends) -> bool:
        return bool(ends) or step % self._every == 0 or self._is_chosen(step)

    def after(self, step: int, state: TrainState) -> None:
        self._save(step, state)


# --- Loop --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepRange:
    """Steps `start` + 1 to `stop`.

    Attributes:
      config: the config of these steps.
      train_step: the step from `make_train_step`.
      make_batch: maps the number of steps done and the numbers of this process's rows to these rows of the next batch;
        called in another thread.
      batch_size: rows of the global batch.
      throughput: measures the rates of steps.
      warmup_key: config key of the warm-up, for the error about non-finite steps.
    """

    start: int
    stop: int
    config: RunConfig
    train_step: Callable[[TrainState, Batch[Any]], tuple[TrainState, Metrics]]
    make_batch: Callable[[int, np.ndarray], HostBatch]
    batch_size: int
    throughput: Throughput
    warmup_key: str = "optimizer.warmup_steps"


def run_steps(run: Run, steps: StepRange, state: TrainState, hooks: Sequence[Hook]) -> TrainState:
    """Runs a step range from the state after `start` steps, which is donated. Returns the state after the last step.

    The last step is `stop`, or the step at which a hook has reached its target. Raises Interrupted after a stop signal
    to any process, and BertJaxError after too many non-finite steps in a row, both after the hooks that are due at an
    end.
    """
    are_several = jax.process_count() > 1
    microbatches = steps.config.gradient_accumulation
    rows = rows_here(run.mesh, steps.batch_size, microbatches)

    def make_batch(step: int) -> Batch[jax.Array]:
        with jax.transfer_guard("disallow"):
            return put_batch(run.mesh, steps.make_batch(step, rows), microbatches, batch_size=steps.batch_size)

    # Tells the other processes of a stop signal with each batch. It is added just before the step: a prefetched batch
    # would carry a SIGTERM several steps later.
    stop_flags = [put_flag(run.mesh, is_asked) for is_asked in (False, True)] if are_several else []

    batches = Prefetch(make_batch, steps.start, steps.stop)
    ends: Ends = set()
    pending: Any = None  # the previous step and its metrics, read while the device runs the current one

    def read_pending() -> None:
        nonlocal pending
        if pending is None:
            return
        (step, device_values), pending = pending, None
        values = {name: value.item() for name, value in jax.device_get(device_values).items()}
        if values.pop("stop", 0):
            ends.add(End.STOPPED)
        if values["nonfinite_streak"] >= steps.config.max_nonfinite_steps:
            ends.add(End.NONFINITE)
        steps.throughput.finished(step, batches.waited)
        run.stalls.beat()
        for hook in hooks:
            hook.metrics(step, values)

    run.bar.set_postfix_str("compiling")
    log.info("Step %d: compiling the training step, or loading it", steps.start + 1)
    began = time.perf_counter()
    for hook in hooks:
        hook.start(steps.start)
    with closing(batches), jax.set_mesh(run.mesh):
        for step, batch in enumerate(batches, steps.start + 1):
            run.checkpointer.check()
            if are_several:
                batch["stop"] = stop_flags[run.stop.received is not None]
            # The guard refuses implicit copies between host and device, which would make one wait for the other.
            with jax.profiler.StepTraceAnnotation("train", step_num=step), jax.transfer_guard("disallow"):
                state, metrics = steps.train_step(state, batch)
            if step == steps.start + 1:
                log.info("Step %d: started after %.1f s", step, time.perf_counter() - began)
                run.bar.unpause()  # the time left does not count the compilation
            read_pending()
            pending = step, metrics
            if step == steps.stop:
                ends.add(End.LAST_STEP)
            if run.stop.received and not are_several:
                ends.add(End.STOPPED)
            if any(hook.is_due(step, ends) for hook in hooks):
                read_pending()  # logs a step before it is saved: a kill could lose its row. It may add an end
                for hook in hooks:
                    if hook.is_due(step, ends):
                        hook.after(step, state)
                        ends |= {End.TARGET} if hook.has_reached_target else set()
                        if not hook.is_timed:
                            steps.throughput.pause()
            if ends - {End.LAST_STEP, End.TARGET}:
                run.checkpointer.wait()
                raise _error(run, steps, step, ends)
            if End.TARGET in ends:
                break
    return state


def _error(run: Run, steps: StepRange, step: int, ends: Ends) -> BertJaxError:
    """Returns the error of a loop that ended early, at a step that is saved."""
    if End.NONFINITE in ends:
        return BertJaxError(
            f"max_nonfinite_steps={steps.config.max_nonfinite_steps}: loss, gradient or update were not finite in so "
            f"many steps in a row up to step {step}, which is saved; lower optimizer.learning_rate or raise "
            f"{steps.warmup_key}"
        )
    reason = run.stop.received.name if run.stop.received else "another process was asked to stop"
    return Interrupted(f"{reason}: saved step {step}; rerun the same command to resume")
