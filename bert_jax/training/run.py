"""Resources of a run: checkpoints, metrics, stop signal, watchdog and progress bar."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh

from bert_jax.config_keys import RunConfig
from bert_jax.errors import InputError, NotBegun
from bert_jax.files import provenance, remote
from bert_jax.files.format_versions import write_json
from bert_jax.progress import Bars
from bert_jax.runtime.preemption import StopSignal
from bert_jax.runtime.processes import is_first
from bert_jax.runtime.watchdog import StallWatch
from bert_jax.runtime.workdir_lock import WorkdirLock
from bert_jax.sections import flatten, from_mapping, to_dict
from bert_jax.tracking.throughput import StepTracer
from bert_jax.tracking.trackers import MetricsFile, TensorBoard, Tracker, Trackers, WeightsAndBiases
from bert_jax.training.checkpointer import Checkpointer
from bert_jax.training.checkpoints import Checkpoint, check_place, newest_intact
from bert_jax.training.checks import check_tokenizer
from bert_jax.training.optimizer import state_structure
from bert_jax.training.phases import Phase, Plan, plan_phases

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
    def progress(self, name: str, batches: int) -> Iterator[Callable[[], None]]:
        """Shows the progress of an evaluation; yields a function to be called after each batch.

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
    folder: epath.Path, config: RunConfig, mesh: Mesh, checkpointer: Checkpointer, stop: StopSignal, lock: WorkdirLock,
    stalls: StallWatch, bars: Bars, stack: ExitStack, *, start: int, total: int, name: str, inputs: Mapping[str, Any],
    trackers: Sequence[Tracker] = (),
) -> Run:  # fmt: skip
    """Opens metrics, trace and progress bar of a run of `total` steps that continues after `start`; writes its config.

    Adds an entry with `inputs` to its provenance record. `stack` closes what is opened. `name` is the label of the bar,
    `trackers` are those of the caller. Raises NotBegun after a stop signal.
    """
    files: list[Tracker] = []
    services = list(trackers)
    tracking = Trackers(files, services) if is_first() else Trackers()
    if is_first():
        write_json(folder / CONFIG_FILE, to_dict(config))
        stack.callback(tracking.close)
        files += [MetricsFile(folder, start), TensorBoard(folder, start)]
        services += _open_wandb(config.tracking.wandb_project, config.tracking.wandb_entity, folder)
        tracking.log_config(dict(flatten(config)))
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


def _open_wandb(project: str, entity: str, folder: epath.Path) -> list[Tracker]:
    """Returns the tracker of a project of W&B, if there is one and it can be reached: a resumed run must not wait."""
    try:
        return [WeightsAndBiases(project, entity, folder)] if project else []
    except InputError:
        raise
    except Exception:
        log.exception("Weights & Biases could not be reached and is not used; the run continues")
        return []


# Keys that may change when a run resumes; any other change would make it another run in the same folder. Phases are
# compared by their resulting configs, so that one may be added to a finished run.
CHANGEABLE = (
    "total_steps", "gradient_accumulation", "max_rows_per_device", "log_every_steps", "eval_every_steps",
    "eval_batches", "eval_at_start", "max_nonfinite_steps", "mesh.", "attention", "remat", "gradient_reduce_dtype",
    "scan_layers", "checkpoint.", "profile.", "tracking.", "stall_", "data.path", "data.seq_len", "optimizer.",
    "phases", "compilation_cache",
)  # fmt: skip


def enter_workdir(folder: epath.Path, stack: ExitStack) -> WorkdirLock:
    """Makes the folder if needed and locks it until `stack` is closed; all processes have to call it.

    Raises InputError if the folder is a file, is in use by another run, or is not shared by all processes.
    """
    check_place(folder)
    if is_first() and remote.exists(folder) and not folder.is_dir():
        raise InputError(f"--workdir={folder}: is a file; expected a folder")
    return stack.enter_context(closing(WorkdirLock(folder)))


def claim_workdir(folder: epath.Path, phases: Sequence[Phase]) -> Checkpoint | None:
    """Returns a workdir's newest checkpoint, None for a new one. Raises InputError if it holds another run.

    Another run has another vocabulary, dataset or config. Changes of keys in `CHANGEABLE` are allowed and logged.
    """
    before = newest_intact(folder)
    if before is None:
        return None
    step = before.step
    check_tokenizer(before, phases[0].datasets[0])
    if step > phases[-1].stop:
        raise InputError(
            f"--workdir={folder}: is at step {step}, past total_steps={phases[-1].stop}; raise total_steps"
        )
    plans = plan_phases(from_mapping(type(phases[0].config), before.config))
    has, wanted = plans[0].config.optimizer, phases[0].config.optimizer
    if state_structure(has) != state_structure(wanted):
        raise InputError(
            f"--workdir={folder}: its optimizer's state is that of optimizer.name={has.name}, which "
            f"optimizer.name={wanted.name} cannot continue; set optimizer.name={has.name}, or choose another folder"
        )
    changed: dict[str, str] = {}
    for old, new, dataset_hash in zip(plans, phases, before.dataset_hashes, strict=False):
        if min(old.stop, step) != min(new.stop, step):
            raise InputError(
                f"--workdir={folder}: is at step {step} and has a phase of steps {old.start}-{old.stop}, but the "
                f"config has {new.start}-{new.stop}; a phase that has started can only be extended"
            )
        values, kept = dict(flatten(new.config)), dict(flatten(old.config))
        differences = {
            key: f"{key} {kept[key]!r} -> {value!r}" for key, value in sorted(values.items())
            if value != kept[key] and key != "phases"
        }  # fmt: skip
        if refused := [key for key in differences if not key.startswith(CHANGEABLE)]:
            said = "; ".join(differences[key] for key in refused)
            raise InputError(
                f"--workdir={folder}: holds a run with another config ({said}); set "
                f"{', '.join(f'{key}={kept[key]}' for key in refused)} again, or choose another folder"
            )
        changed |= differences
        if dataset_hash != new.dataset_hashes[-1]:
            raise InputError(
                f"--workdir={folder}: was trained on another dataset than data.path={new.config.data.path} in the "
                f"phase of steps {new.start}-{new.stop}; choose another folder"
            )
    if changed:
        log.warning("Resuming with changed config keys: %s", "; ".join(changed.values()))
    if step:
        _log_changed_rate(plans, phases, step)
    return before


def _log_changed_rate(before: Sequence[Plan], now: Sequence[Plan], step: int) -> None:
    """Logs the learning rates of step `step` and of the next one if the schedule has changed between them."""
    old, new = (next((plan for plan in plans if plan.stop > step), plans[-1]).schedule() for plans in (before, now))
    if jax.tree.flatten(old) == jax.tree.flatten(new):
        return
    rates = next(plan for plan in before if plan.stop >= step).schedule()(step - 1), old(step), new(step)
    last, expected, following = map(float, jax.device_get(rates))
    if step < now[-1].stop and not math.isclose(following, expected, rel_tol=1e-6):
        log.warning("Learning rate: %.3g at step %d, %.3g at step %d", last, step, following, step + 1)
