"""What `bert-jax compile` does: every phase of a config compiled, described, and mended where it does not fit."""

import logging
from collections.abc import Callable
from typing import Any

from bert_jax.ahead_of_time.compiled_step import Step, compile_step, describe
from bert_jax.ahead_of_time.fit import find_batch, mend, plans
from bert_jax.ahead_of_time.table import gib
from bert_jax.ahead_of_time.target import Target, open_target
from bert_jax.config import ConfigDict
from bert_jax.training.phases import PHASE_KEYS, plan_phases

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
    """Compiles the step of each phase, or of one, for TPUs, and says of each what `describe` does.

    Returns what there is to say of the phase that needs the most memory, with all of them under `phases`, and a line
    for each that does not fit: by how much, and what would mend it.

    Args:
      config: the run; `data.path` may be empty.
      topology: see `open_target`.
      slices: how many of them, joined by a slower network.
      phase: one of the phases, counted from 0; None for all.
      largest_batch: look for the most rows a device that fit, in place of the config's global batch.
      advice: whether to look for a setting that makes what does not fit fit.
      show: called with what there is to say of each phase as soon as it is known.

    Raises InputError for a config that cannot be.
    """
    target = open_target(topology, slices)
    described, problems = [], []
    for plan in plans(config, phase):
        step = find_batch(target, plan, _watch(target)) if largest_batch else compile_step(target, plan)
        about = describe(target, step)
        if not step.fits:
            mended = mend(target, step, _watch(target)) if advice else None
            about["would_fit"] = None
            if mended:
                about["would_fit"] = {"with": mended[0], "peak_bytes": mended[1].wanted_bytes}
            problems.append(_problem(target, config, step, about["would_fit"], advice))
        described.append(about)
        show(about)
    return {**max(described, key=lambda about: about["peak_bytes"]), "phases": described}, problems


def _watch(target: Target) -> Any:
    """Says on stderr what has been compiled: each takes a minute."""

    def watch(step: Step) -> None:
        config = step.plan.config
        log.info(
            "%d rows a device, remat %s, %d microbatches: %s of %s GiB%s (%.0f s)",
            step.rows_a_device, config.remat, config.gradient_accumulation, gib(step.wanted_bytes),
            gib(target.hbm_bytes), "" if step.fits else ", too much", step.compile_seconds,
        )  # fmt: skip

    return watch


def _problem(target: Target, config: ConfigDict, step: Step, would_fit: dict[str, Any] | None, advice: bool) -> str:
    plan = step.plan
    text = (
        f"steps {plan.start + 1}-{plan.stop} want {gib(step.wanted_bytes)} GiB of the {gib(target.hbm_bytes)} GiB of a "
        f"device, {gib(step.wanted_bytes - target.hbm_bytes)} too much"
    )
    if would_fit:
        number = [other.stop for other in plan_phases(config)].index(plan.stop)
        phase = f"phases.{number}." if config.phases else ""
        settings = " ".join(
            f"--config.{phase if key.startswith(PHASE_KEYS) else ''}{key}={value}"
            for key, value in would_fit["with"].items()
        )
        return f"{text}; {gib(would_fit['peak_bytes'])} GiB with {settings}"
    return f"{text}; nothing that was tried makes it fit: take more devices" if advice else text
