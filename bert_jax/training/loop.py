"""The loop over steps: batches in, metrics, evaluations and checkpoints out. Pre-training and fine-tuning share it."""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bert_jax.data.loading.prefetch import Prefetch
from bert_jax.errors import BertJaxError, Interrupted
from bert_jax.parallel.host_batches import put_batch, rows_here
from bert_jax.tracking.running_means import RunningMeans
from bert_jax.tracking.throughput import Throughput, summary
from bert_jax.training.run import Run
from bert_jax.training.state import TrainState
from bert_jax.training.train_step import STOP, Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stretch:
    """Steps `start` + 1 to `stop`, which are evaluated and saved at the end.

    Attributes:
      train_step: as `make_train_step` compiles it.
      make_batch: steps done to the rows that this process makes of the next one's batch; called in another thread.
      batch_size: rows of the whole batch.
      microbatches: of a step.
      throughput: what a step comes to.
      log_every, save_every: steps.
      evaluates_after: whether there is an evaluation after a step.
      max_nonfinite_steps: in a row, before the run ends.
      about: a step to what else its row says.
      evaluate: parameters, and what to call for each batch, to a row; None is no evaluation.
      save: begins to save the state of a step, with the metrics of the steps that no row has yet.
      warmup_key: the config's key of the warm-up, for the message of a run that ends in non-finite steps.
    """

    start: int
    stop: int
    train_step: Callable[[TrainState, Mapping[str, Any]], tuple[TrainState, Metrics]]
    make_batch: Callable[[int], dict[str, np.ndarray]]
    batch_size: int
    microbatches: int
    throughput: Throughput
    log_every: int
    save_every: int
    evaluates_after: Callable[[int], bool]
    max_nonfinite_steps: int
    about: Callable[[int], dict[str, float]]
    evaluate: Callable[[int, TrainState], dict[str, float]] | None
    save: Callable[[int, TrainState, dict[str, Any]], None]
    warmup_key: str = "optimizer.warmup_steps"


def run_steps(run: Run, stretch: Stretch, state: TrainState) -> tuple[TrainState, dict[str, float]]:
    """Runs a stretch from the state after its `start` steps, which is donated. Returns state and last evaluation.

    Raises Interrupted once a process is asked to stop, and BertJaxError where too many steps are not finite in a row,
    both with the state saved.
    """
    are_several = jax.process_count() > 1

    rows = len(rows_here(run.mesh, stretch.batch_size, stretch.microbatches))

    def put(batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return put_batch(run.mesh, batch, stretch.microbatches, batch_size=stretch.batch_size)

    # What this process tells the others with each batch. It is added to a batch as late as the step takes it: a batch
    # made ahead would tell of a SIGTERM several steps later.
    stop_flags = [put({STOP: np.full(rows, asked, np.int32)}) for asked in (0, 1)] if are_several else []

    def make_batch(step: int) -> dict[str, jax.Array]:
        return put(stretch.make_batch(step))

    batches = Prefetch(make_batch, stretch.start, stretch.stop)
    run.bar.set_postfix_str("compiling")
    began = time.perf_counter()
    throughput = stretch.throughput
    evaluation: dict[str, float] = {}
    means = RunningMeans(run.checkpointer.unlogged if stretch.start == run.start else None)
    pending: Any = None  # the metrics of the step before: read while the device works on this one
    stops_together = False  # a process was asked to stop, and all know since the same step

    def settle() -> bool:
        """Reads the metrics of the pending step and logs them. True where too many in a row were not finite."""
        nonlocal pending, stops_together
        if pending is None:
            return False
        (at, device_values), pending = pending, None
        values = jax.device_get(device_values)
        stops_together = bool(values.pop(STOP, 0))
        throughput.finished(at, batches.waited)
        run.stalls.beat(at)
        means.add({name: value.item() for name, value in values.items()})
        if at % stretch.log_every == 0 or at == stretch.stop:
            row = means.take() | throughput.rates(at) | stretch.about(at)
            run.writer.write(at, row)
            run.bar.set_postfix_str(summary(row))
        run.bar.update(1)
        return bool(values["nonfinite_streak"] >= stretch.max_nonfinite_steps)

    with closing(batches), jax.set_mesh(run.mesh), jax.transfer_guard("disallow"):
        for step, batch in enumerate(batches, stretch.start + 1):
            run.checkpointer.check()
            if run.lease:
                run.lease.check()
            is_hopeless = False
            if run.tracer.begins(step):
                is_hopeless = settle()
                throughput.pause()
                run.tracer.start()
            if are_several:
                batch = batch | stop_flags[run.stop.received is not None]
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, metrics = stretch.train_step(state, batch)
            if step == stretch.start + 1:
                log.info("step %d: compiled after %.1f s", step, time.perf_counter() - began)
            is_hopeless = settle() or is_hopeless
            pending = step, metrics
            is_last = step == stretch.stop
            is_stop = stops_together if are_several else run.stop.received is not None
            is_eval = stretch.evaluate is not None and (is_last or stretch.evaluates_after(step))
            is_save = is_last or is_hopeless or is_stop or step % stretch.save_every == 0
            is_traced = run.tracer.ends(step)
            if is_eval or is_save or is_traced:  # a step's row is written before it is saved, or a kill could lose it
                is_hopeless = settle() or is_hopeless
                is_save = is_save or is_hopeless
            if is_traced:
                run.tracer.close()
                throughput.pause()
            if is_eval and stretch.evaluate is not None:
                evaluation = stretch.evaluate(step, state)
                throughput.pause()
            if is_save:
                stretch.save(step, state, means.to_dict())
            if is_hopeless or is_stop:
                run.checkpointer.wait()
            if is_hopeless:
                raise BertJaxError(
                    f"loss, gradient or update were not finite {stretch.max_nonfinite_steps} times in a row, up to "
                    f"step {step}, which is saved: lower optimizer.learning_rate or raise {stretch.warmup_key}"
                )
            if is_stop:
                why = run.stop.received.name if run.stop.received else "another process was asked to stop"
                raise Interrupted(f"{why}: saved step {step}; the same command goes on from there")
    return state, evaluation
