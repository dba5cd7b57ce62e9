"""`bert-jax compile`: compiles and describes every phase, finds a fix for one that does not fit, compares settings.

It can write the compiled steps to a file, which `pretrain` loads.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

from bert_jax.ahead_of_time.compiled_step import Step, compile_step, describe
from bert_jax.ahead_of_time.fit import find_batch, find_fix, plans
from bert_jax.ahead_of_time.gpu_target import is_gpu
from bert_jax.ahead_of_time.pareto import best_choice, find_choices
from bert_jax.ahead_of_time.table import gib
from bert_jax.ahead_of_time.target import Target, local_target, open_target
from bert_jax.config import ConfigDict
from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.runtime.compilation_cache import without_cache
from bert_jax.runtime.saved_programs import write_programs
from bert_jax.training.initialization.checkpoint_values import fill_in_from_checkpoint
from bert_jax.training.phases import PHASE_KEYS, Plan, plan_phases

FORMAT_VERSION = 1
"""The format of the output with `--json`."""

log = logging.getLogger(__name__)


def compile_config(
    config: ConfigDict,
    topology: str | None,
    *,
    output: str = "",
    slices: int = 1,
    phase: int | None = None,
    largest_batch: bool = False,
    advice: bool = True,
    show: Callable[[dict[str, Any]], Any] = lambda _: None,
) -> tuple[dict[str, Any], list[str]]:
    """Compiles the step of each phase, or of one, and describes each with `describe`.

    Returns the description of the phase that needs the most memory, with those of all phases under `phases`, and a
    message for each phase that does not fit: by how much, and a setting that would fix it.

    Args:
      config: the run; `data.path` may be empty.
      topology: TPUs or GPUs, see `open_target`; None for the devices of this machine.
      output: a file for the compiled steps, if all of them fit; see `saved_programs`.
      slices: number of slices, connected by a slower network.
      phase: one of the phases, numbered from 0; None for all.
      largest_batch: find the maximum rows per device that fit, instead of using the config's global batch.
      advice: search for a setting with which a phase that does not fit would.
      show: called with the description of each phase as soon as it is compiled.

    Raises InputError for an invalid config.
    """
    config = fill_in_from_checkpoint(config)
    if output and topology is not None and is_gpu(topology):
        raise InputError(
            f"--output with --topology={topology}: a program for GPUs is not kept, because it was compiled without "
            "timing its kernels; compile on the machine with the GPUs, without --topology"
        )
    if output:  # before minutes of work
        file = remote.absolute(output)
        if output.endswith("/") or (not remote.is_remote(file) and file.is_dir()):
            raise InputError(f"--output={output}: is a folder; expected a file, such as {file / 'bert.compiled'}")
        atomic.make_folder(file.parent)
    target = local_target() if topology is None else open_target(topology, slices)
    if largest_batch and target.hbm_bytes is None:
        raise InputError(f"--find_batch: the memory of {target.topology} is unknown; set --topology")
    described, problems, programs = [], [], []
    for plan in plans(config, phase):
        log.info("Compiling steps %d-%d for %s", plan.start + 1, plan.stop, target.topology)
        with without_cache() if output else nullcontext():
            if largest_batch:
                step = find_batch(target, plan, _watch(target))
            if output or not largest_batch:
                step = compile_step(target, step.plan if largest_batch else plan, keeps_program=bool(output))
        description = describe(target, step)
        if not step.fits:
            fix = find_fix(target, step, _watch(target)) if advice else None
            description["would_fit"] = None
            if fix:
                description["would_fit"] = {"with": fix[0], "peak_bytes": fix[1].wanted_bytes}
            problems.append(_problem(target, config, step, description["would_fit"], advice))
        described.append(description)
        programs += [step.program] if step.program else []
        show(description)
    if output and not problems:
        size = write_programs(output, programs)
        log.info("Wrote the compiled steps to %s (%.1f MB)", output, size / 1e6)
    largest = max(described, key=lambda description: description["peak_bytes"])
    return {"format_version": FORMAT_VERSION, **largest, "phases": described}, problems


def _watch(target: Target) -> Any:
    """Returns a callback that logs each compilation, which takes about a minute."""

    def watch(step: Step) -> None:
        assert target.hbm_bytes is not None
        config = step.plan.config
        log.info(
            "Compiled %d rows per device, remat %s, %d microbatches: %s of %s GiB of HBM%s (%.0f s)",
            step.rows_a_device, config.remat, config.gradient_accumulation, gib(step.wanted_bytes),
            gib(target.hbm_bytes), "" if step.fits else ", does not fit", step.compile_seconds,
        )  # fmt: skip

    return watch


def _problem(target: Target, config: ConfigDict, step: Step, would_fit: dict[str, Any] | None, advice: bool) -> str:
    assert target.hbm_bytes is not None
    plan = step.plan
    text = (
        f"steps {plan.start + 1}-{plan.stop}: need {gib(step.wanted_bytes)} GiB per device, which has "
        f"{gib(target.hbm_bytes)} GiB, {gib(step.wanted_bytes - target.hbm_bytes)} GiB too little"
    )
    if would_fit:
        settings = " ".join(_flags(config, plan, would_fit["with"]))
        return f"{text}; needs {gib(would_fit['peak_bytes'])} GiB with {settings}"
    return f"{text}; no setting found that fits, use more devices" if advice else text


def _flags(config: ConfigDict, plan: Plan, settings: Mapping[str, Any]) -> list[str]:
    """Returns the command-line options that change a phase's settings."""
    number = [other.stop for other in plan_phases(config)].index(plan.stop)
    phase = f"phases.{number}." if config.phases else ""
    return [f"--config.{phase if key.startswith(PHASE_KEYS) else ''}{key}={value}" for key, value in settings.items()]


def compare_settings(
    config: ConfigDict,
    topology: str | None,
    *,
    slices: int = 1,
    phase: int | None = None,
    show: Callable[[dict[str, Any]], Any] = lambda _: None,
) -> dict[str, Any]:
    """Compares rows per device, remat and attention for each phase; returns `{"phases": [...]}` for JSON.

    Each phase has its `choices` (see `Choice`), and the `best` settings, None if nothing fits, with the options that
    set them. Arguments and errors are those of `compile_config`.
    """
    config = fill_in_from_checkpoint(config)
    target = local_target() if topology is None else open_target(topology, slices)
    if target.hbm_bytes is None:
        raise InputError(f"--pareto: the memory of {target.topology} is unknown; set --topology")
    phases = []
    for plan in plans(config, phase):
        log.info("Comparing settings of steps %d-%d for %s", plan.start + 1, plan.stop, target.topology)
        choices = find_choices(target, plan, _watch(target))
        best = best_choice(choices)
        phases.append(
            {
                "topology": target.topology,
                "num_slices": target.slices,
                "devices": len(target.devices),
                "steps": [plan.start + 1, plan.stop],
                "global_batch_size": plan.config.global_batch_size,
                "hbm_bytes": target.hbm_bytes,
                "choices": [asdict(choice) for choice in choices],
                "best": best and {"with": best.settings, "options": _flags(config, plan, best.settings)},
            }
        )
        show(phases[-1])
    return {"phases": phases}
