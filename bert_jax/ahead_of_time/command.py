"""`bert-jax compile`: compiles and describes every phase of a config, and finds a fix for a phase that does not fit."""

import logging
from collections.abc import Callable
from typing import Any

from bert_jax.ahead_of_time.compiled_step import Step, compile_step, describe
from bert_jax.ahead_of_time.fit import find_batch, find_fix, plans
from bert_jax.ahead_of_time.table import gib
from bert_jax.ahead_of_time.target import Target, open_target
from bert_jax.config import ConfigDict
from bert_jax.training.initialization.checkpoint_values import fill_in_from_checkpoint
from bert_jax.training.phases import PHASE_KEYS, plan_phases

FORMAT_VERSION = 1
"""The format of the output with `--json`."""

log = logging.getLogger(__name__)


def compile_config(
    config: ConfigDict,
    topology: str,
    *,
    slices: int = 1,
    phase: int | None = None,
    largest_batch: bool = False,
    advice: bool = True,
    show: Callable[[dict[str, Any]], Any] = lambda _: None,
) -> tuple[dict[str, Any], list[str]]:
    """Compiles the step of each phase, or of one, for TPUs, and describes each with `describe`.

    Returns the description of the phase that needs the most memory, with those of all phases under `phases`, and a
    message for each phase that does not fit: by how much, and a setting that would fix it.

    Args:
      config: the run; `data.path` may be empty.
      topology: see `open_target`.
      slices: number of slices, connected by a slower network.
      phase: one of the phases, numbered from 0; None for all.
      largest_batch: find the maximum rows per device that fit, instead of using the config's global batch.
      advice: search for a setting with which a phase that does not fit would.
      show: called with the description of each phase as soon as it is compiled.

    Raises InputError for an invalid config.
    """
    config = fill_in_from_checkpoint(config)
    target = open_target(topology, slices)
    described, problems = [], []
    for plan in plans(config, phase):
        log.info("Compiling steps %d-%d for %s", plan.start + 1, plan.stop, topology)
        step = find_batch(target, plan, _watch(target)) if largest_batch else compile_step(target, plan)
        description = describe(target, step)
        if not step.fits:
            fix = find_fix(target, step, _watch(target)) if advice else None
            description["would_fit"] = None
            if fix:
                description["would_fit"] = {"with": fix[0], "peak_bytes": fix[1].wanted_bytes}
            problems.append(_problem(target, config, step, description["would_fit"], advice))
        described.append(description)
        show(description)
    largest = max(described, key=lambda description: description["peak_bytes"])
    return {"format_version": FORMAT_VERSION, **largest, "phases": described}, problems


def _watch(target: Target) -> Any:
    """Returns a callback that logs each compilation, which takes about a minute."""

    def watch(step: Step) -> None:
        config = step.plan.config
        log.info(
            "Compiled %d rows per device, remat %s, %d microbatches: %s of %s GiB of HBM%s (%.0f s)",
            step.rows_a_device, config.remat, config.gradient_accumulation, gib(step.wanted_bytes),
            gib(target.hbm_bytes), "" if step.fits else ", does not fit", step.compile_seconds,
        )  # fmt: skip

    return watch


def _problem(target: Target, config: ConfigDict, step: Step, would_fit: dict[str, Any] | None, advice: bool) -> str:
    plan = step.plan
    text = (
        f"steps {plan.start + 1}-{plan.stop}: need {gib(step.wanted_bytes)} GiB per device, which has "
        f"{gib(target.hbm_bytes)} GiB, {gib(step.wanted_bytes - target.hbm_bytes)} GiB too little"
    )
    if would_fit:
        number = [other.stop for other in plan_phases(config)].index(plan.stop)
        phase = f"phases.{number}." if config.phases else ""
        settings = " ".join(
            f"--config.{phase if key.startswith(PHASE_KEYS) else ''}{key}={value}"
            for key, value in would_fit["with"].items()
        )
        return f"{text}; needs {gib(would_fit['peak_bytes'])} GiB with {settings}"
    return f"{text}; no setting found that fits, use more devices" if advice else text
