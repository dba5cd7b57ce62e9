"""`bert-jax compile`: compiles the training step of each phase ahead of time, and describes it."""

import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax

from bert_jax.ahead_of_time.chips import clock_rate, roofline
from bert_jax.ahead_of_time.hlo import count_kernels, read_collectives, read_loops, read_parts
from bert_jax.ahead_of_time.target import Target, open_target, out_of_memory
from bert_jax.config_keys import PretrainConfig
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.loading.loader import predictions_per_row
from bert_jax.errors import BertJaxError, InputError
from bert_jax.extras import install_hint
from bert_jax.model import BertConfig
from bert_jax.parallel.mesh import BATCH_AXES, check_divisibility, fill_in_accumulation, make_mesh
from bert_jax.tracking.flops import recomputed_flops, training_flops
from bert_jax.training.checkpoint_values import fill_in_from_checkpoint
from bert_jax.training.checks import bert_config, check_attention, check_config, compute_dtype, data_paths
from bert_jax.training.phases import Plan, abstract_batch, make_masking, plan_phases
from bert_jax.training.pretrain import plan_step

FORMAT_VERSION = 1
"""The format of the output with `--json`."""
LARGEST_PARTS = 40
"""Parts of a step in its profile."""
VOCAB_SIZE = 30_522
SEQ_LEN = 128
"""Defaults if neither the config nor a dataset sets them."""
LEFT_OUT = (
    "collectives and custom kernels, which have no estimate; overlap of instructions; copies and other instructions "
    "bound by memory take what XLA estimates for them"
)
"""What XLA's cost model leaves out of a step's time."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowSizes:
    """Sizes of a batch's rows: L tokens, P predictions, K sequences; and the vocabulary's size."""

    seq_len: int
    predictions: int
    sequences: int
    vocab_size: int


@dataclass(frozen=True)
class Step:
    """A compiled training step.

    Attributes:
      peak_bytes: peak memory of a device.
      memory: argument, output and temporary bytes; None if the step does not fit into a device's memory.
      text: the program's text; None if the step does not fit, or if jaxlib cannot read programs of this libtpu.
      compile_seconds: compilation time.
    """

    plan: Plan
    model: BertConfig
    rows: RowSizes
    mesh: dict[str, int]
    peak_bytes: int
    memory: dict[str, int] | None
    text: str | None
    compile_seconds: float

    @property
    def rows_a_device(self) -> int:
        """Rows per device and microbatch."""
        config = self.plan.config
        return config.global_batch_size // config.gradient_accumulation // math.prod(self.mesh[a] for a in BATCH_AXES)


def compile_config(
    config: PretrainConfig,
    topology: str | None,
    *,
    slices: int = 1,
    phase: int | None = None,
    profile: bool = False,
    show: Callable[[dict[str, Any]], Any] = lambda _: None,
) -> tuple[dict[str, Any], list[str]]:
    """Compiles the step of each phase, or of one, and describes each with `describe`.

    Returns the description of the phase that needs the most memory, with those of all phases under `phases`, and a
    message for each phase that does not fit: by how much, and settings that need less.

    Args:
      config: the run; `data.path` may be empty.
      topology: TPUs or GPUs, see `open_target`; None for the devices of this machine.
      slices: number of slices, connected by a slower network.
      phase: one of the phases, numbered from 0; None for all.
      profile: describe the largest parts of the estimated time.
      show: called with the description of each phase as soon as it is compiled.

    Raises InputError for an invalid config.
    """
    config = fill_in_from_checkpoint(config)
    target = open_target(topology, slices)
    described, problems = [], []
    for plan in plans(config, phase):
        log.info("Compiling steps %d-%d for %s", plan.start + 1, plan.stop, target.topology)
        step = compile_step(target, plan)
        described.append(describe(target, step, profile=profile))
        show(described[-1])
        if step.memory is None:
            needed, usable = (size / (1 << 30) for size in (step.peak_bytes, target.hbm_bytes or 0))
            problems.append(
                f"steps {plan.start + 1}-{plan.stop}: need {needed:.2f} GiB per device, which has {usable:.2f} GiB, "
                f"{needed - usable:.2f} GiB too little; use more devices, or set remat=attention, "
                f"gradient_accumulation={2 * step.plan.config.gradient_accumulation}, remat=full, mesh.zero1=True, or "
                "mesh.fsdp=-1 and mesh.data=1"
            )
    largest = max(described, key=lambda description: description["peak_bytes"])
    return {"format_version": FORMAT_VERSION, **largest, "phases": described}, problems


def plans(config: PretrainConfig, phase: int | None = None) -> list[Plan]:
    """Returns the phases of a run to compile: all, or the given one. InputError if there is no such phase."""
    check_config(config, config.total_steps)
    phases = plan_phases(config)
    if phase is not None and not 0 <= phase < len(phases):
        raise InputError(f"--phase={phase}: expected 0 to {len(phases) - 1}")
    return phases if phase is None else [phases[phase]]


def compile_step(target: Target, plan: Plan, make_step: Callable[..., Any] = plan_step) -> Step:
    """Compiles the step of a phase.

    `make_step(mesh, plan, model)` returns the plan of the state, and a step with the method `lower(state, batch)`.
    InputError for a config that is invalid or not divisible over the devices.
    """
    config = plan.config
    check_config(config, plan.stop - plan.start)
    mesh = make_mesh(config.mesh, target.devices)
    config = fill_in_accumulation(mesh, config)
    plan = Plan(plan.start, plan.stop, config)
    rows = _rows(config)
    model = bert_config(config, rows.vocab_size, rows.seq_len, config.data.path or "a dataset of data.seq_len")
    check_divisibility(mesh, model, config.global_batch_size, config.gradient_accumulation)
    check_attention(config, model, rows.seq_len, mesh)
    if target.is_absent_gpu and config.attention == "cudnn":
        raise InputError(
            "attention=cudnn: cuDNN compiles its kernels on a GPU; compile on the machine with the GPUs, without "
            "--topology, or set attention=xla"
        )
    spec, train_step = make_step(mesh, plan, model)
    batch = abstract_batch(mesh, config, rows.seq_len, rows.predictions, rows.sequences)
    start = time.perf_counter()
    memory = text = None
    try:
        with jax.set_mesh(mesh):
            compiled = train_step.lower(spec.abstract, batch).compile(target.compiler_options)
        sizes: Any = compiled.memory_analysis()
        peak = sizes.peak_memory_in_bytes
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).strip().split("\n")[0]
        if (needs := out_of_memory(error)) is None:
            raise BertJaxError(f"the compiler failed: {reason}") from error
        peak = needs[0]
    else:  # only the compiler for TPUs refuses a program that does not fit
        if not (target.is_absent_gpu and target.hbm_bytes and peak > target.hbm_bytes):
            memory = {
                f"{part}_bytes": getattr(sizes, f"{part}_size_in_bytes") for part in ("argument", "output", "temp")
            }
            # v5p and v6e run some gathers on sparse cores, as a kind of call that an older jaxlib cannot read.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                text = compiled.as_text()
    return Step(plan, model, rows, dict(mesh.shape), peak, memory, text, round(time.perf_counter() - start, 1))


def _rows(config: PretrainConfig) -> RowSizes:
    """Reads the sizes from `data.path` if set, else from `data.seq_len` and `model.vocab_size`, else the defaults."""
    if config.data.path:
        dataset = PreparedDataset(data_paths(config)[0])
        seq_len, vocab_size = dataset.info.seq_len, dataset.tokenizer.vocab_size
        if config.data.seq_len not in (-1, seq_len):
            raise InputError(f"data.seq_len={config.data.seq_len}: {dataset.folder} has sequences of {seq_len} tokens")
    else:
        seq_len = SEQ_LEN if config.data.seq_len == -1 else config.data.seq_len
        vocab_size = VOCAB_SIZE if config.model.vocab_size == -1 else config.model.vocab_size
    sequences = config.data.max_sequences if config.data.packing else 1
    return RowSizes(seq_len, predictions_per_row(make_masking(config), seq_len, sequences), sequences, vocab_size)


def describe(target: Target, step: Step, *, profile: bool = False) -> dict[str, Any]:
    """Describes a step for JSON: bytes and seconds of one device, FLOPs of one step on all devices.

    `estimate` has the time by XLA's cost model: the cycles that XLA:TPU estimates for fusions, copies and others, in
    all iterations of the loops, divided by the chip's clock. It is deterministic, on any machine. `profile` adds its
    largest parts. Where there is no estimate, `no_estimate` has the reason.
    """
    config, rows, accelerator = step.plan.config, step.rows, target.accelerator
    collectives = None if step.text is None else read_collectives(step.text, step.mesh, target.slices)
    batch, devices = config.global_batch_size, len(target.devices)
    model_flops = batch * training_flops(step.model, rows.seq_len, rows.predictions, rows.sequences)
    recomputed = batch * recomputed_flops(step.model, rows.seq_len, config.remat, config.attention)
    bounds, estimate, no_estimate = None, None, f"the program cannot be read; run: {install_hint('tpu-aot')}"
    if step.memory and accelerator and accelerator.hbm:
        moved = step.memory["argument_bytes"] + step.memory["output_bytes"]
        moved += 2 * config.gradient_accumulation * step.memory["temp_bytes"]
        flops = (model_flops + recomputed) / devices
        bounds = roofline(accelerator, flops=flops, memory_bytes=moved, collectives=collectives)
        bounds["rows_per_second_at_most"] = batch / bounds["at_least_seconds"]
    if step.text:
        kind, parts = target.devices[0].device_kind, read_parts(step.text)
        clock, cycles = clock_rate(kind), sum(part.cycles for part in parts)
        if not parts:
            no_estimate = f"XLA estimates no cycles for {target.devices[0].platform}, only for TPUs"
        elif accelerator is None or clock is None:
            no_estimate = f"the clock of {kind} is not known"
        else:
            estimate = {
                "seconds": cycles / clock,
                "mfu": model_flops / devices / accelerator.peak_flops / (cycles / clock),
                "clock_hz": clock,
                "custom_kernels": count_kernels(step.text),
                "left_out": LEFT_OUT,
            }
            if profile:
                estimate["parts"] = [
                    {**asdict(part), "seconds": part.cycles / clock, "share": part.cycles / cycles}
                    for part in parts[:LARGEST_PARTS]
                ]
    return {
        "topology": target.topology,
        "num_slices": target.slices,
        "devices": devices,
        "mesh": step.mesh,
        "steps": [step.plan.start + 1, step.plan.stop],
        "global_batch_size": batch,
        "gradient_accumulation": config.gradient_accumulation,
        "rows_a_device": step.rows_a_device,
        **asdict(rows),
        "dtype": compute_dtype(config.dtype, target.devices[0].platform).name,
        "attention": config.attention,
        "remat": config.remat,
        "compile_seconds": step.compile_seconds,
        "fits": step.memory is not None,
        "peak_bytes": step.peak_bytes,
        **(step.memory or {}),
        "hbm_bytes": target.hbm_bytes,
        "hbm_share": step.peak_bytes / target.hbm_bytes if target.hbm_bytes else None,
        "model_flops": model_flops,
        "recomputed_flops": recomputed,
        "collectives": None if collectives is None else [asdict(collective) for collective in collectives],
        "loops": None if step.text is None else read_loops(step.text),
        "roofline": bounds,
        "estimate": estimate,
        "no_estimate": None if estimate or not step.memory else no_estimate,
    }
