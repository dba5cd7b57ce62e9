"""Compares settings of a phase that trade memory for time: rows per device, remat and attention.

The batch is fixed, and split into microbatches. Larger ones take more memory, and read weights and gradients less
often; remat takes less memory, and more FLOPs.
"""

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bert_jax.ahead_of_time.chips import Roofline
from bert_jax.ahead_of_time.compiled_step import compile_step, describe, moved_bytes
from bert_jax.ahead_of_time.fit import Watch, with_changes
from bert_jax.ahead_of_time.target import Target
from bert_jax.errors import InputError
from bert_jax.model.attention_kernels.kernel_choice import ATTENTIONS
from bert_jax.model.rematerialization import REMAT_POLICIES
from bert_jax.parallel.mesh import BATCH_AXES, make_mesh
from bert_jax.training.phases import Plan

log = logging.getLogger(__name__)

_FIRST_ROWS, _FACTOR = 8, 4


@dataclass(frozen=True)
class Choice:
    """Settings of a phase, with the memory of a device and the work and time of a step of the whole batch.

    Attributes:
      settings: the config values, by key.
      rows_a_device: rows per device and microbatch.
      peak_bytes: peak memory of a device.
      is_compiled: False if the memory is interpolated between compiled numbers of rows.
      flops: model FLOPs and recomputed ones, on all devices.
      at_least_seconds: bound with full overlap of compute, memory and network; None for a device of unknown rates.
      one_after_another_seconds: the same without overlap.
      is_on_front: True if no other choice is at most as large in memory, FLOPs and time without overlap.
    """

    settings: Mapping[str, Any]
    rows_a_device: int
    peak_bytes: int
    is_compiled: bool
    flops: float
    at_least_seconds: float | None
    one_after_another_seconds: float | None
    is_on_front: bool = False

    @property
    def costs(self) -> tuple[float, float, float]:
        """The quantities of the front."""
        return self.peak_bytes, self.flops, self.one_after_another_seconds or 0.0


def find_choices(target: Target, plan: Plan, watch: Watch = lambda _: None) -> list[Choice]:
    """Returns the choices that fit, by decreasing memory, with the Pareto front marked.

    Every remat policy and every attention that the config supports is compiled with a few numbers of rows, each passed
    to `watch`; the memory of other numbers that divide the batch is interpolated.
    """
    mesh = make_mesh(plan.config.mesh, target.devices).shape
    rows, left = divmod(plan.config.global_batch_size, math.prod(mesh[axis] for axis in BATCH_AXES))
    if left:
        raise InputError(
            f"global_batch_size={plan.config.global_batch_size} is not divisible by "
            f"{math.prod(mesh[axis] for axis in BATCH_AXES)} devices (mesh.data x mesh.fsdp)"
        )
    found: list[Choice] = []
    for attention in ATTENTIONS:
        for remat in REMAT_POLICIES:
            try:
                found += _choices_of_variant(target, plan, rows, {"remat": remat, "attention": attention}, watch)
            except InputError as error:  # a kernel for another platform, or one without the config's dropout
                if attention == plan.config.attention:
                    raise
                log.info("Skipping %s", error)
                break
    found.sort(key=lambda choice: choice.costs, reverse=True)
    return [replace(choice, is_on_front=not any(_dominates(other, choice) for other in found)) for choice in found]


def best_choice(choices: Sequence[Choice]) -> Choice | None:
    """Returns the choice of the least time with full overlap, then without, then the fewest FLOPs; None of none."""
    return min(
        choices,
        key=lambda choice: (choice.at_least_seconds or 0.0, *reversed(choice.costs)),
        default=None,
    )


def _dominates(one: Choice, other: Choice) -> bool:
    return one.costs != other.costs and all(a <= b for a, b in zip(one.costs, other.costs, strict=True))


def _choices_of_variant(
    target: Target, plan: Plan, rows: int, variant: Mapping[str, Any], watch: Watch
) -> Iterator[Choice]:
    """Yields the choices of one remat policy and one attention; `rows` are those of a device in the whole batch."""
    assert target.hbm_bytes is not None
    allowed = [count for count in range(1, rows + 1) if rows % count == 0]
    wanted: dict[int, int] = {}
    described: dict[int, dict[str, Any]] = {}  # of those that fit
    count: int | None = max(count for count in allowed if count <= _FIRST_ROWS)
    while count is not None:
        step = compile_step(target, with_changes(plan, **variant, gradient_accumulation=rows // count))
        watch(step)
        wanted[count] = step.wanted_bytes
        if step.fits:
            described[count] = describe(target, step)
        count = _next_count(allowed, wanted, described, target.hbm_bytes or 0)
    for count in allowed:
        if described and min(described) <= count <= max(described):
            settings = {**variant, "gradient_accumulation": rows // count}
            yield _choice(settings, count, described, target)


def _next_count(
    allowed: Sequence[int], wanted: Mapping[int, int], fitting: Collection[int], hbm_bytes: int
) -> int | None:  # fmt: skip
    """Returns the rows to compile next: the most that should fit, by a line through what is known; None if done.

    `wanted` has the memory of the compiled ones, of which `fitting` fit.
    """
    if not fitting:
        return None if allowed[0] in wanted else allowed[0]
    most = max(fitting)
    over = min((count for count in wanted if count not in fitting), default=math.inf)
    between = [count for count in allowed if most < count < over]
    if len(wanted) == 1:
        return min(between, key=lambda count: abs(count - _FACTOR * most), default=None)
    near, other = sorted(wanted, key=lambda count: abs(wanted[count] - hbm_bytes))[:2]
    per_row = (wanted[near] - wanted[other]) / (near - other)
    return max((count for count in between if wanted[near] + per_row * (count - near) <= hbm_bytes), default=None)


def _choice(
    settings: Mapping[str, Any], count: int, described: Mapping[int, Mapping[str, Any]], target: Target
) -> Choice:
    below = max(known for known in described if known <= count)
    above = min(known for known in described if known >= count)
    share = (count - below) / (above - below) if above > below else 0.0
    nearest = dict(described[below])
    for key in ("peak_bytes", "temp_bytes"):
        nearest[key] = round((1 - share) * described[below][key] + share * described[above][key])
    nearest["gradient_accumulation"] = settings["gradient_accumulation"]
    bounds = None
    if nearest["roofline"] and target.accelerator and target.accelerator.hbm:
        memory = moved_bytes(nearest) / target.accelerator.hbm
        network = _network_seconds(settings["gradient_accumulation"], described[below], described[above])
        bounds = Roofline(nearest["roofline"]["compute_seconds"], memory, network)
    return Choice(
        settings, count, nearest["peak_bytes"], count in described,
        nearest["model_flops"] + nearest["recomputed_flops"],
        bounds.at_least if bounds else None, bounds.one_after_another if bounds else None,
    )  # fmt: skip


def _network_seconds(microbatches: int, below: Mapping[str, Any], above: Mapping[str, Any]) -> float | None:
    """Returns the time of a step's collectives, by a line through two compiled ones; None where it is unknown.

    Those after the loop over microbatches take the same time for any number of them. Those of FSDP are in the loop.
    """
    seconds, seconds_above = (step["roofline"]["network_seconds"] for step in (below, above))
    loops, loops_above = (step["gradient_accumulation"] for step in (below, above))
    if seconds is None or seconds_above is None or loops == loops_above:
        return seconds
    return seconds_above + (seconds - seconds_above) * (microbatches - loops_above) / (loops - loops_above)
