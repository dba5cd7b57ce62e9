"""Searches for the largest batch that fits, and for a setting with which a step fits."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from bert_jax.ahead_of_time.compiled_step import Step, compile_step
from bert_jax.ahead_of_time.table import gib
from bert_jax.ahead_of_time.target import Target
from bert_jax.config import ConfigDict, flatten
from bert_jax.errors import InputError
from bert_jax.parallel.mesh import BATCH_AXES, make_mesh
from bert_jax.training.checks import MAX_GLOBAL_BATCH_SIZE, check_config
from bert_jax.training.phases import Plan, plan_phases

Watch = Callable[[Step], Any]


def plans(config: ConfigDict, phase: int | None) -> list[Plan]:
    """Returns the phases of a run to compile: all, or the given one. InputError if there is no such phase."""
    check_config(config, config.total_steps)
    found = plan_phases(config)
    if phase is not None and not 0 <= phase < len(found):
        raise InputError(f"--phase={phase}: expected 0 to {len(found) - 1}")
    return found if phase is None else [found[phase]]


def with_changes(plan: Plan, **changes: Any) -> Plan:
    """Returns the plan with changed config values; double underscores in `changes` stand for dots."""
    config = plan.config.copy_and_resolve_references()
    with config.unlocked():
        config.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return Plan(plan.start, plan.stop, config)


def find_batch(target: Target, plan: Plan, watch: Watch = lambda _: None) -> Step:
    """Finds the step with the maximum rows per device, in one microbatch, that fits.

    Memory grows about linearly with the rows, so that a few compilations suffice; each is passed to `watch`. Above 16
    rows the result is a multiple of 8, and it is at most that of `MAX_GLOBAL_BATCH_SIZE`. InputError if not even one
    row fits.
    """
    assert target.hbm_bytes is not None
    mesh = make_mesh(plan.config.mesh, target.devices).shape
    copies = math.prod(mesh[axis] for axis in BATCH_AXES)
    most = MAX_GLOBAL_BATCH_SIZE // copies
    tried: dict[int, Step] = {}

    def attempt(rows: int) -> Step:
        step = compile_step(target, with_changes(plan, global_batch_size=rows * copies, gradient_accumulation=1))
        watch(step)
        tried[rows] = step
        return step

    attempt(min(8, most))
    while (rows := _next_rows(tried, target.hbm_bytes, most)) is not None:
        attempt(rows)
    fitting = [rows for rows, step in tried.items() if step.fits]
    if not fitting:
        raise InputError(
            f"{target.topology}: one row per device needs {gib(tried[1].wanted_bytes)} GiB, expected at most "
            f"{gib(target.hbm_bytes)} GiB; set remat=full, or mesh.fsdp=-1 and mesh.data=1, or use more devices"
        )
    return tried[max(fitting)]


def _next_rows(tried: dict[int, Step], there_is: int, allowed: int) -> int | None:
    """Returns the rows to try next, up to `allowed`, by interpolating to a full memory; None if the search is done."""
    fits = max((rows for rows, step in tried.items() if step.fits), default=0)
    over = min((rows for rows, step in tried.items() if not step.fits), default=None)
    grain = 8 if fits >= 16 else 1
    largest = allowed // grain * grain if over is None else over - grain
    if fits >= largest:
        return None
    if len(tried) == 1:
        return min(2 * fits, largest) if over is None else over // 2
    near, other = sorted(tried, key=lambda rows: abs(tried[rows].wanted_bytes - there_is))[:2]
    a_row = (tried[near].wanted_bytes - tried[other].wanted_bytes) / (near - other)
    guess = near + int((there_is - tried[near].wanted_bytes) / a_row) if a_row > 0 else 2 * near
    most = min(8 * max(tried), largest) if over is None else largest
    return min(max(guess // grain * grain, fits + grain), most)


def find_fix(target: Target, step: Step, watch: Watch = lambda _: None) -> tuple[dict[str, Any], Step] | None:
    """Returns the first setting, in order of increasing cost in time, with which a step fits, and that step; or None.

    Each setting is compiled, and passed to `watch`.
    """
    present = dict(flatten(step.plan.config))
    seen: list[dict[str, Any]] = []
    for changes in _remedies(target, step):
        if changes in seen or all(present[key.replace("__", ".")] == value for key, value in changes.items()):
            continue
        seen.append(changes)
        try:
            tried = compile_step(target, with_changes(step.plan, **changes))
        except InputError:  # sizes that are not divisible
            continue
        watch(tried)
        if tried.fits:
            return {key.replace("__", "."): value for key, value in changes.items()}, tried
    return None


def _remedies(target: Target, step: Step) -> Iterator[dict[str, Any]]:
    assert target.hbm_bytes is not None
    config, rows = step.plan.config, step.rows_a_device
    fsdp = {"mesh__data": 1, "mesh__fsdp": -1}
    if step.state_bytes > target.hbm_bytes // 2:
        yield {"mesh__zero1": True}
        yield fsdp
        yield {**fsdp, "remat": "full"}
    order = ("none", "attention", "dots", "full")
    stronger = order[order.index(config.remat) + 1 :]
    yield from ({"remat": remat} for remat in stronger if remat != "dots")
    factors = [factor for factor in (2, 4, 8, 16, 32, 64, 128, 256) if rows % factor == 0]
    more = [config.gradient_accumulation * factor for factor in factors]
    yield from ({"gradient_accumulation": count} for count in more)
    if more and stronger:
        yield {"gradient_accumulation": more[-1], "remat": "full"}
    yield {**fsdp, "remat": "full"}
