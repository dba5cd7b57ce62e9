"""Entry into a workdir, which belongs to one run: an existing run in it must be the same, except for some keys."""

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack, closing

import jax
from etils import epath

from bert_jax.config_keys import RunConfig
from bert_jax.data.loading.masking import Masking
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.runtime.processes import is_first
from bert_jax.runtime.watchdog import StallWatch
from bert_jax.runtime.workdir_lock import WorkdirLock
from bert_jax.sections import flatten, from_mapping
from bert_jax.training.checkpointing.checkpoints import check_place, newest_intact
from bert_jax.training.checks import check_tokenizer
from bert_jax.training.phases import Phase, Plan, plan_phases

log = logging.getLogger(__name__)

# Keys that may change when a run resumes; any other change would make it another run in the same folder. Phases are
# compared by their resulting configs, so that one may be added to a finished run.
CHANGEABLE = (
    "total_steps", "gradient_accumulation", "max_rows_per_device", "log_every_steps", "eval_every_steps",
    "eval_batches", "eval_at_start", "eval_old_data", "max_nonfinite_steps",
    "mesh.", "attention", "remat",
    "gradient_reduce_dtype", "scan_layers", "checkpoint.", "profile.", "tracking.", "stall_", "data.path",
    "data.seq_len", "optimizer.", "phases", "compilation_cache",
)  # fmt: skip


_MAX_PREDICTIONS = "data.max_predictions"  # may change if the number of predictions stays the same


def watch_stalls(config: RunConfig, stack: ExitStack) -> StallWatch:
    """Starts the watchdog of this process, which `stack` closes. It watches the opening of inputs as well."""
    stalls = StallWatch(config.stall_minutes, ends=config.stall_exit)
    stack.callback(stalls.close)
    return stalls


def enter_workdir(folder: epath.Path, stack: ExitStack) -> WorkdirLock:
    """Makes the folder if needed and locks it until `stack` is closed; all processes have to call it.

    Raises InputError if the folder is a file, is in use by another run, or is not shared by all processes.
    """
    check_place(folder)
    if is_first() and remote.exists(folder) and not folder.is_dir():
        raise InputError(f"--workdir={folder}: is a file; expected a folder")
    return stack.enter_context(closing(WorkdirLock(folder)))


def claim_workdir(folder: epath.Path, phases: Sequence[Phase]) -> int | None:
    """Returns the step of a workdir's newest checkpoint, None for a new one. Raises InputError if it holds another run.

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
    changed: dict[str, str] = {}
    plans = plan_phases(from_mapping(type(phases[0].config), before.config))
    for number, (old, new) in enumerate(zip(plans, phases, strict=False)):
        if number and old.start >= step:
            break
        if min(old.stop, step) != min(new.stop, step):
            raise InputError(
                f"--workdir={folder}: is at step {step} and has a phase of steps {_span(old)}, but the config has "
                f"{_span(new)}; a phase that has started can only be extended"
            )
        changed |= _differences(folder, old, new)
        if before.dataset_hashes[number : number + 1] != (new.dataset_hash,):
            raise InputError(
                f"--workdir={folder}: was trained on another dataset than data.path={new.config.data.path} in the "
                f"phase of steps {_span(new)}; choose another folder"
            )
    if changed:
        log.warning("Resuming with changed config keys: %s", "; ".join(changed.values()))
    if step:
        _log_changed_rate(plans, phases, step)
    return step


def _log_changed_rate(before: Sequence[Plan], now: Sequence[Plan], step: int) -> None:
    """Logs the learning rates of step `step` and of the next one if the schedule has changed between them."""
    old, new = (next((plan for plan in plans if plan.stop > step), plans[-1]).schedule() for plans in (before, now))
    if jax.tree.flatten(old) == jax.tree.flatten(new):
        return
    rates = next(plan for plan in before if plan.stop >= step).schedule()(step - 1), old(step), new(step)
    last, expected, following = map(float, jax.device_get(rates))
    if step < now[-1].stop and not math.isclose(following, expected, rel_tol=1e-6):
        log.warning("Learning rate: %.3g at step %d, %.3g at step %d", last, step, following, step + 1)


def _span(plan: Plan) -> str:
    return f"{plan.start}-{plan.stop}"


def _differences(folder: epath.Path, old: Plan, new: Phase) -> dict[str, str]:
    before, now = (dict(flatten(plan.config)) for plan in (old, new))
    keys = sorted({*now} - {"phases"})
    changed = {key: f"{key} {before[key]!r} -> {now[key]!r}" for key in keys if before[key] != now[key]}
    refused = [key for key in changed if not key.startswith(CHANGEABLE)]
    if _MAX_PREDICTIONS in refused and _predictions(old, new.seq_len) == _predictions(new, new.seq_len):
        refused.remove(_MAX_PREDICTIONS)
    if refused:
        raise InputError(
            f"--workdir={folder}: holds a run with another config ({'; '.join(changed[key] for key in refused)}); set "
            f"{', '.join(f'{key}={before[key]}' for key in refused)} again, or choose another folder"
        )
    return changed


def _predictions(plan: Plan, seq_len: int) -> int:
    """Counts the predictions of a full sequence. If equal, shorter sequences and the masks are equal, too."""
    config = plan.config
    masking = Masking(config.data.max_predictions, config.objective.mask_rate)
    return seq_len if config.objective.lm == "ltr" else int(masking.predictions(seq_len))
