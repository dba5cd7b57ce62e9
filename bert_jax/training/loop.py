"""Training loop of pre-training and fine-tuning: takes batches, writes metrics, evaluations and checkpoints."""

import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bert_jax.batch import Batch, HostBatch
from bert_jax.data.loading.prefetch import Prefetch
from bert_jax.errors import BertJaxError, Interrupted
from bert_jax.parallel.host_batches import put_batch, rows_here
from bert_jax.tracking.running_means import RunningMeans
from bert_jax.tracking.throughput import Throughput, summary
from bert_jax.training.run import Run
from bert_jax.training.state import TrainState
from bert_jax.training.train_step import Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRange:
    """Steps `start` + 1 to `stop`, evaluated and saved at the end.

    Attributes:
      train_step: the step from `make_train_step`.
      make_batch: maps the number of steps done to this process's rows of the next batch; called in another thread.
      batch_size: rows of the global batch.
      microbatches: number of microbatches in a step.
      throughput: measures the rates of steps.
      log_every, save_every: intervals in steps.
      evaluates_after: maps a step to whether an evaluation follows it.
      max_nonfinite_steps: non-finite steps in a row that end the run.
      extra_metrics: maps a step to additional values to log.
      evaluate: maps a step and its state to scores; None for no evaluation.
      save: starts saving the state of a step, with the sums of metrics that are not logged yet.
      warmup_key: config key of the warm-up, for the error about non-finite steps.
    """

    start: int
    stop: int
    train_step: Callable[[TrainState, Batch[Any]], tuple[TrainState, Metrics]]
    make_batch: Callable[[int], HostBatch]
    batch_size: int
    microbatches: int
    throughput: Throughput
    log_every: int
    save_every: int
    evaluates_after: Callable[[int], bool]
    max_nonfinite_steps: int
    extra_metrics: Callable[[int], dict[str, float]]
    evaluate: Callable[[int, TrainState], dict[str, float]] | None
    save: Callable[[int, TrainState, dict[str, Any]], None]
    warmup_key: str = "optimizer.warmup_steps"


def run_steps(run: Run, steps: StepRange, state: TrainState) -> tuple[TrainState, dict[str, float]]:
    """Runs a step range from the state after `start` steps, which is donated. Returns state and last evaluation.

    Raises Interrupted after a stop signal to any process, and BertJaxError after too many non-finite steps in a row,
    both with the state saved.
    """
    are_several = jax.process_count() > 1

    rows = len(rows_here(run.mesh, steps.batch_size, steps.microbatches))

    def put(batch: HostBatch) -> Batch[jax.Array]:
        return put_batch(run.mesh, batch, steps.microbatches, batch_size=steps.batch_size)

    # Tells the other processes of a stop signal with each batch. It is added just before the step: a prefetched batch
    # would carry a SIGTERM several steps later.
    stop_flags = [put({"stop": np.full(rows, is_asked, np.int32)}) for is_asked in (0, 1)] if are_several else []

    def make_batch(step: int) -> Batch[jax.Array]:
        return put(steps.make_batch(step))

    batches = Prefetch(make_batch, steps.start, steps.stop)
    run.bar.set_postfix_str("compiling")
    began = time.perf_counter()
    throughput = steps.throughput
    evaluation: dict[str, float] = {}
    means = RunningMeans(run.checkpointer.unlogged if steps.start == run.start else None)
    pending: Any = None  # metrics of the previous step, read while the device runs the current one
    stops_together = False  # some process received a stop signal; all know it since the same step

    def read_pending() -> bool:
        """Reads and logs the metrics of the pending step. Returns True after too many non-finite steps in a row."""
        nonlocal pending, stops_together
        if pending is None:
            return False
        (at, device_values), pending = pending, None
        values = jax.device_get(device_values)
        stops_together = bool(values.pop("stop", 0))
        throughput.finished(at, batches.waited)
        run.stalls.beat(at)
        means.add({name: value.item() for name, value in values.items()})
        if at % steps.log_every == 0 or at == steps.stop:
            row = means.take() | throughput.rates(at) | steps.extra_metrics(at)
            run.writer.write(at, row)
            run.bar.set_postfix_str(summary(row))
        run.bar.update(1)
        return bool(values["nonfinite_streak"] >= steps.max_nonfinite_steps)

    with closing(batches), jax.set_mesh(run.mesh), jax.transfer_guard("disallow"):
        for step, batch in enumerate(batches, steps.start + 1):
            run.checkpointer.check()
            if run.lease:
                run.lease.check()
            is_hopeless = False
            if run.tracer.begins(step):
                is_hopeless = read_pending()
                throughput.pause()
                run.tracer.start()
            if are_several:
                batch = batch | stop_flags[run.stop.received is not None]
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, metrics = steps.train_step(state, batch)
            if step == steps.start + 1:
                log.info("Step %d: compiled after %.1f s", step, time.perf_counter() - began)
            is_hopeless = read_pending() or is_hopeless
            pending = step, metrics
            is_last = step == steps.stop
            is_stop = stops_together if are_several else run.stop.received is not None
            is_eval = steps.evaluate is not None and (is_last or steps.evaluates_after(step))
            is_save = is_last or is_hopeless or is_stop or step % steps.save_every == 0
            is_traced = run.tracer.ends(step)
            if is_eval or is_save or is_traced:  # log a step before saving it: a kill could lose the row
                is_hopeless = read_pending() or is_hopeless
                is_save = is_save or is_hopeless
            if is_traced:
                run.tracer.close()
                throughput.pause()
            if is_eval and steps.evaluate is not None:
                evaluation = steps.evaluate(step, state)
                throughput.pause()
            if is_save:
                steps.save(step, state, means.to_dict())
            if is_hopeless or is_stop:
                run.checkpointer.wait()
            if is_hopeless:
                raise BertJaxError(
                    f"max_nonfinite_steps={steps.max_nonfinite_steps}: loss, gradient or update were not finite in so "
                    f"many steps in a row up to step {step}, which is saved; lower optimizer.learning_rate or raise "
                    f"{steps.warmup_key}"
                )
            if is_stop:
                why = run.stop.received.name if run.stop.received else "another process was asked to stop"
                raise Interrupted(f"{why}: saved step {step}; rerun the same command to resume")
    return state, evaluation
