"""Resources of a run: checkpoints, metrics, stop signal, watchdog and progress bar."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh

from bert_jax.config_keys import PretrainConfig, RunConfig
from bert_jax.errors import InputError, NotBegun
from bert_jax.files import provenance, remote
from bert_jax.files.atomic import write_json
from bert_jax.model import BertConfig
from bert_jax.parallel.mesh import make_mesh
from bert_jax.progress import Bars
from bert_jax.runtime.compilation_cache import kept_programs
from bert_jax.runtime.interpreter import StallWatch, StopSignal
from bert_jax.runtime.processes import is_first
from bert_jax.runtime.workdir_lock import WorkdirLock
from bert_jax.sections import Section, flatten, from_mapping, to_dict, with_values
from bert_jax.tracking.trackers import MetricsFile, TensorBoard, Tracker, Trackers, WeightsAndBiases
from bert_jax.training.checkpointer import Checkpointer
from bert_jax.training.checkpoints import Checkpoint, check_place, newest_intact, other_vocabulary_error
from bert_jax.training.phases import Phase, Plan, plan_phases
from bert_jax.training.train_step import TrainState

log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"


def workdir_path(workdir: str) -> epath.Path:
    """Returns the absolute path of a workdir. Raises InputError for an empty one."""
    if not workdir:
        raise InputError("workdir=: the path is empty; expected a folder, such as runs/tiny")
    return remote.absolute(workdir)


@dataclass
class Run:
    """Resources of a run, which its phases share; `begin_run` closes them.

    Attributes:
      name: label of its progress bar.
      folder: the workdir.
      mesh: the devices.
      stop: tells of a stop signal.
      stalls: the watchdog.
      bars: makes progress bars.
      services: the caller's trackers.
      stack: closes what is opened.
      lock: the ownership of the workdir, from `enter_workdir` on.
      checkpointer: saves and restores its states; this and what follows from `open` on.
      trackers: all trackers.
      bar: progress of the whole run.
      start: steps done when the run was opened.
      total: steps of the whole run.
    """

    name: str
    folder: epath.Path
    mesh: Mesh
    stop: StopSignal
    stalls: StallWatch
    bars: Bars
    services: Sequence[Tracker]
    stack: ExitStack
    lock: WorkdirLock = field(init=False)
    checkpointer: Checkpointer = field(init=False)
    trackers: Trackers = field(init=False)
    bar: Any = field(init=False)
    start: int = field(init=False)
    total: int = field(init=False)

    def enter_workdir(self) -> None:
        """Makes the workdir if needed and locks it; all processes have to call it.

        Raises InputError if the folder is a file, or is not shared by all processes, and as `WorkdirLock` does.
        """
        check_place(self.folder)
        if is_first() and remote.exists(self.folder) and not self.folder.is_dir():
            raise InputError(f"workdir={self.folder}: is a file; expected a folder")
        self.lock = self.stack.enter_context(closing(WorkdirLock(self.folder)))

    def open(
        self, config: RunConfig, checkpointer: Checkpointer, *, start: int, total: int, inputs: Mapping[str, Any]
    ) -> None:
        """Opens metrics and progress bar of a run of `total` steps that continues after `start`; writes its config.

        Adds an entry with `inputs` to its provenance record. Raises NotBegun after a stop signal.
        """
        self.checkpointer, self.start, self.total = checkpointer, start, total
        trackers: list[Tracker] = []
        self.trackers = Trackers(trackers)
        if is_first():
            trackers += self.services
            write_json(self.folder / CONFIG_FILE, to_dict(config))
            self.stack.callback(self.trackers.close)
            trackers[:0] = [MetricsFile(self.folder, start), TensorBoard(self.folder, start)]
            trackers += _open_wandb(config.tracking.wandb_project, self.folder)
            self.trackers.log_config(dict(flatten(config)))
        entry = provenance.record(inputs, devices=describe_devices(), start_step=start)
        checkpointer.description["provenance"] = entry
        if is_first():
            provenance.append(self.folder, entry)
        if self.stop.received:
            raise NotBegun(
                f"{self.stop.received.name}: stopped before step {start + 1}; rerun the same command to resume"
            )
        self.bar = self.bars(total=total, initial=start, desc=self.name, unit="step")
        self.stack.callback(self.bar.close)

    def save(self, step: int, state: TrainState, model: BertConfig, position: Mapping[str, Any]) -> None:
        """Saves a checkpoint as `Checkpointer.save`, once the metrics are written and if the workdir is still owned."""
        self.lock.confirm()
        self.trackers.flush()
        self.checkpointer.save(step, state, model, position)

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


@contextmanager
def begin_run(
    config: RunConfig, workdir: str, name: str, *, stop: StopSignal | None, bars: Bars, trackers: Sequence[Tracker]
) -> Iterator[Run]:
    """Context manager of a run: stop signals, watchdog, mesh and the cache of programs; the rest opens in its steps.

    `stop` is None unless the caller's is active already. Raises InputError for an empty workdir or an invalid mesh.
    """
    folder = workdir_path(workdir)
    with ExitStack() as stack:
        stop = stop or stack.enter_context(StopSignal())
        stalls = stack.enter_context(closing(StallWatch(config.stall_minutes, ends=config.stall_exit)))
        mesh = make_mesh(config.mesh)
        stack.enter_context(kept_programs(config.compilation_cache, folder))
        yield Run(name, folder, mesh, stop, stalls, bars, trackers, stack)


def describe_devices() -> dict[str, Any]:
    """Returns `platform`, `kind`, `count` and `processes` of JAX's devices, for a provenance record."""
    first = jax.devices()[0]
    return {
        "platform": first.platform, "kind": first.device_kind, "count": jax.device_count(),
        "processes": jax.process_count(),
    }  # fmt: skip


def _open_wandb(project: str, folder: epath.Path) -> list[Tracker]:
    """Returns the tracker of a project of W&B, if there is one and it can be reached: a resumed run must not wait."""
    try:
        return [WeightsAndBiases(project, folder)] if project else []
    except InputError:
        raise
    except Exception:
        log.exception("Weights & Biases could not be reached and is not used; the run continues")
        return []


# Keys that may change when a run resumes; any other change would make it another run in the same folder. Phases are
# compared by their resulting configs, so that one may be added to a finished run.
CHANGEABLE = (
    "total_steps", "gradient_accumulation", "max_rows_per_device", "log_every_steps", "eval_every_steps",
    "eval_batches", "eval_at_start", "max_nonfinite_steps", "target.", "mesh.", "attention", "remat",
    "gradient_reduce_dtype", "scan_layers", "checkpoint.", "profile.", "tracking.", "stall_", "data.path",
    "data.seq_len", "data.skip_steps", "optimizer.", "phases", "repeat_positions", "compilation_cache",
)  # fmt: skip


def check_same_config(folder: epath.Path, before: Section, now: Section, changeable: tuple[str, ...]) -> dict[str, str]:
    """Returns "KEY OLD -> NEW" for each key in which the config of a run differs from the one it began with.

    Raises InputError, with `folder`, if one of them does not start with an entry of `changeable`.
    """
    kept = dict(flatten(before))
    changed = {key: f"{key} {kept[key]!r} -> {value!r}" for key, value in sorted(flatten(now)) if value != kept[key]}
    if refused := [key for key in changed if not key.startswith(changeable)]:
        raise InputError(
            f"workdir={folder}: holds a run with another config ({'; '.join(changed[key] for key in refused)}); set "
            f"{', '.join(f'{key}={kept[key]}' for key in refused)} again, or choose another folder"
        )
    return changed


def claim_workdir(folder: epath.Path, phases: Sequence[Phase]) -> Checkpoint | None:
    """Returns a workdir's newest checkpoint, None for a new one. Raises InputError if it holds another run.

    Another run has another vocabulary, dataset or config. Changes of keys in `CHANGEABLE` are allowed and logged.
    """
    before = newest_intact(folder)
    if before is None:
        return None
    step = before.step
    if before.tokenizer.sha256 != (dataset := phases[0].datasets[0]).tokenizer.sha256:
        raise other_vocabulary_error(before, dataset)
    if step > phases[-1].stop:
        raise InputError(f"workdir={folder}: is at step {step}, past total_steps={phases[-1].stop}; raise total_steps")
    plans = plan_phases(from_mapping(type(phases[0].config), before.config))
    optimizers = plans[0].config.optimizer.name, phases[0].config.optimizer.name
    if len({*optimizers}) > 1 and "muon" in optimizers:
        raise InputError(
            f"optimizer.name={optimizers[1]}: {folder} holds a run with {optimizers[0]}, and muon's state has other "
            f"arrays than that of the others; set optimizer.name={optimizers[0]}, or init={folder} and another workdir"
        )
    _check_skipped(folder, step, plans[0].config, phases[0].config)
    changed: dict[str, str] = {}
    for old, new, dataset_hash in zip(plans, phases, before.dataset_hashes, strict=False):
        if min(old.stop, step) != min(new.stop, step):
            raise InputError(
                f"workdir={folder}: is at step {step} and has a phase of steps {old.start}-{old.stop}, but the "
                f"config has {new.start}-{new.stop}; a phase that has started can only be extended"
            )
        inferred = {"gradient_accumulation": -1} if old.config.gradient_accumulation == -1 else {}
        changed |= check_same_config(folder, old.config, with_values(new.config, inferred), CHANGEABLE)
        if dataset_hash != new.dataset_hashes[-1]:
            raise InputError(
                f"workdir={folder}: was trained on another dataset than data.path={new.config.data.path} in the "
                f"phase of steps {new.start}-{new.stop}; choose another folder"
            )
    changed.pop("phases", None)  # compared one by one
    if changed:
        log.warning("Changed config keys: %s", "; ".join(changed.values()))
    if step:
        _log_changed_rate(plans, phases, step)
    return before


def _check_skipped(folder: epath.Path, step: int, before: PretrainConfig, now: PretrainConfig) -> None:
    """Raises InputError if ranges of `data.skip_steps` that begin at `step` or earlier differ from those trained with.

    The run would otherwise repeat batches, or drop others than the key says.
    """
    old, new = ({pair for pair in config.data.skipped() if pair[0] <= step} for config in (before, now))
    if different := sorted(old ^ new):
        first, last = different[0]
        was, fix = ("with", "keep") if different[0] in old else ("without", "drop")
        raise InputError(
            f"data.skip_steps={first}:{last}: {folder} is at step {step} and was trained {was} this range; {fix} it, "
            f"or move checkpoints after step {first - 1} away to resume before it"
        )


def _log_changed_rate(before: Sequence[Plan], now: Sequence[Plan], step: int) -> None:
    """Logs the learning rates of step `step` and of the next one if the schedule has changed between them."""
    old, new = (next((plan for plan in plans if plan.stop > step), plans[-1]).schedule() for plans in (before, now))
    if jax.tree.flatten(old) == jax.tree.flatten(new):
        return
    rates = next(plan for plan in before if plan.stop >= step).schedule()(step - 1), old(step), new(step)
    last, expected, following = map(float, jax.device_get(rates))
    if step < now[-1].stop and not math.isclose(following, expected, rel_tol=1e-6):
        log.warning("Learning rate: %.3g at step %d, %.3g at step %d", last, step, following, step + 1)
