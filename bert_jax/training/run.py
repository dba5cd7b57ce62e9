"""Resources of a run: checkpoints, metrics, stop signal, watchdog and progress bar."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh

from bert_jax.config_keys import RunConfig
from bert_jax.errors import InputError, NotBegun
from bert_jax.files import provenance
from bert_jax.files.format_versions import write_json
from bert_jax.progress import Bars
from bert_jax.runtime.preemption import StopSignal
from bert_jax.runtime.processes import is_first
from bert_jax.runtime.watchdog import StallWatch
from bert_jax.runtime.workdir_lock import WorkdirLock
from bert_jax.sections import flatten, to_dict
from bert_jax.tracking.metrics import MetricsFile
from bert_jax.tracking.profiling import StepTracer
from bert_jax.tracking.tensorboard import TensorBoard
from bert_jax.tracking.tracker import RunRecord, Tracker, Trackers
from bert_jax.tracking.wandb_tracker import WeightsAndBiases
from bert_jax.training.checkpointing.checkpointer import Checkpointer

log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class Run:
    """Resources that all phases of a run share."""

    folder: epath.Path  # the workdir
    mesh: Mesh
    checkpointer: Checkpointer
    trackers: Trackers
    stop: StopSignal
    stalls: StallWatch
    tracer: StepTracer
    bars: Bars
    bar: Any  # progress of the whole run
    start: int  # steps done when the run was opened
    total: int  # steps of the whole run

    def check(self) -> None:
        """Raises the error of a save that failed in the background."""
        self.checkpointer.check()

    @contextmanager
    def progress(self, step: int, name: str, batches: int) -> Iterator[Callable[[], None]]:
        """Shows the progress of an evaluation after `step`; yields a function to be called after each batch.

        Each batch is progress for the watchdog as well.
        """
        with closing(self.bars(total=batches, desc=name, unit="batch", leave=False)) as bar:

            def on_batch() -> None:
                bar.update(1)
                self.stalls.beat()

            yield on_batch


def describe_devices() -> dict[str, Any]:
    """Returns `platform`, `kind`, `count` and `processes` of JAX's devices, for a provenance record."""
    first = jax.devices()[0]
    return {
        "platform": first.platform, "kind": first.device_kind, "count": jax.device_count(),
        "processes": jax.process_count(),
    }  # fmt: skip


def log_result(checkpoint: epath.Path | None, step: int, scores: str, commands: Sequence[str]) -> None:
    """Logs the result of a run that finished at `step`, its checkpoint, and the commands of `bert-jax` that use it."""
    log.info("Finished step %d: %s; checkpoint %s", step, scores or "nothing is scored", checkpoint)
    for command in commands:
        log.info("Next: bert-jax %s", command)


def open_run(
    folder: epath.Path, config: RunConfig, mesh: Mesh, checkpointer: Checkpointer, stop: StopSignal,
    watch: tuple[WorkdirLock, StallWatch], bars: Bars, stack: ExitStack, *, start: int, total: int, name: str,
    inputs: Mapping[str, Any], trackers: Sequence[Tracker] = (),
) -> Run:  # fmt: skip
    """Opens metrics, trace and progress bar of a run of `total` steps that continues after `start`; writes its config.

    Adds an entry with `inputs` to its provenance record. `stack` closes what is opened. `watch` has the results of
    `enter_workdir` and `watch_stalls`, `name` is the label of the bar, `trackers` are those of the caller. Raises
    NotBegun after a stop signal.
    """
    if is_first():
        write_json(folder / CONFIG_FILE, to_dict(config))
    tracking = _open_trackers(folder, config, start, trackers, stack) if is_first() else Trackers()
    lock, stalls = watch
    checkpointer.before_each_save(lock.confirm)
    checkpointer.before_each_save(tracking.flush)
    if stop.received:
        raise NotBegun(f"{stop.received.name}: stopped before step {start + 1}; rerun the same command to resume")
    checkpointer.provenance = provenance.record(inputs, devices=describe_devices(), start_step=start)
    if is_first():
        provenance.append(folder, checkpointer.provenance)
    bar = bars(total=total, initial=start, desc=name, unit="step")
    stack.callback(bar.close)
    tracer = StepTracer(config.profile.steps, folder, records=is_first())
    stack.callback(tracer.close)
    return Run(folder, mesh, checkpointer, tracking, stop, stalls, tracer, bars, bar, start, total)


def _open_trackers(
    folder: epath.Path, config: RunConfig, start: int, others: Sequence[Tracker], stack: ExitStack
) -> Trackers:
    """Opens the trackers of the workdir and of the config, and logs the config to all. `stack` closes them."""
    files: list[Tracker] = []
    services = list(others)
    trackers = Trackers(files, services)
    stack.callback(trackers.close)
    files.append(MetricsFile(folder, start))
    files.append(TensorBoard(folder, start))
    if config.tracking.wandb_project:
        try:
            services.append(WeightsAndBiases(config.tracking.wandb_project, config.tracking.wandb_entity, folder))
        except InputError:
            raise
        except Exception:  # a resumed run must not wait for a service that is down
            log.exception("Weights & Biases could not be reached and is not used; the run continues")
    trackers.log_config(RunRecord(folder, dict(flatten(config)), start))
    return trackers
