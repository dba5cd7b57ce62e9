"""`bert-jax compile`: compiles the training step of each phase ahead of time, and describes it.

The targets are TPUs by libtpu's names, or the devices of this machine.
"""

import contextlib
import importlib.util
import logging
import math
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jax
from jax.experimental import topologies

from bert_jax.ahead_of_time.hlo import read_collectives, read_parts
from bert_jax.config_keys import PretrainConfig
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.loading.loader import predictions_per_row
from bert_jax.errors import BertJaxError, InputError, install_hint
from bert_jax.parallel.mesh import BATCH_AXES, count_slices, make_mesh
from bert_jax.tracking.throughput import peak_flops, training_flops
from bert_jax.training.checks import check_config, check_mixture, data_paths
from bert_jax.training.initialization import fill_in_from_checkpoint
from bert_jax.training.objectives import objective_name
from bert_jax.training.phases import Plan, abstract_batch, fit_plan, make_masking, plan_phases
from bert_jax.training.pretrain import plan_step

CHIPS = {
    "v2": (7.48, (16, 16)), "v3": (15.48, (32, 32)), "v4": (30.75, (16, 16, 16)), "v5e": (15.75, (16, 16)),
    "v5p": (95.74, (16, 20, 28)), "v6e": (31.25, (16, 16)), "tpu7x": (94.75, (16, 24, 24)),
}  # fmt: skip
"""GiB of a device's memory that a program can use, as libtpu's compiler says; and the largest slice, in chips.

libtpu opens larger slices, which do not exist, and aborts when it compiles.
"""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_ENVIRONMENT = {  # of libtpu
    "TPU_SKIP_MDS_QUERY": "1",  # outside of Google Cloud the query would time out,
    "TPU_WORKER_HOSTNAMES": "localhost",  # and log missing metadata on stderr
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # another process may compile or train at the same time
    # Of the compiler's threads: libtpu 0.0.42.1 overflows its default for fusions of products on v6e and TPU7x.
    "LIBTPU_INIT_ARGS": "--fibers_default_thread_stack_size=16777216",
}


@dataclass(frozen=True)
class Target:
    """Devices to compile for. A program can use `hbm_bytes` of the memory of each; None if unknown, as for CPUs."""

    topology: str
    slices: int
    devices: tuple[Any, ...]
    hbm_bytes: int | None


def open_target(topology: str | None, slices: int = 1) -> Target:
    """Opens TPUs by libtpu's name for the chips of a slice, such as `v5e:4x4` or `v5p:4x4x8`.

    No TPU is needed, and one in use is not touched. None opens the devices of this machine, named as in `cpu:8`.
    InputError if no such slice exists, or libtpu is missing.
    """
    if slices < 1 or (slices > 1 and topology is None):
        raise InputError(f"num_slices={slices}: expected at least 1, or several of a --topology such as v5e:4x4")
    if topology is None:
        devices: tuple[Any, ...] = tuple(jax.devices())
        name = f"{devices[0].platform}:{len(devices)}"
        return Target(name, count_slices(devices), devices, (devices[0].memory_stats() or {}).get("bytes_limit"))
    name, _, shape = topology.partition(":")
    sizes = [int(size) for size in shape.split("x")] if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) else []
    memory, largest = CHIPS.get(name, (0, ()))
    if not sizes or len(sizes) != len(largest) or any(map(int.__gt__, sorted(sizes), sorted(largest))):
        slices_of_chips = ", ".join(f"{chip}:{'x'.join(map(str, most))}" for chip, (_, most) in CHIPS.items())
        raise InputError(f"topology={topology}: expected a slice such as v5e:4x4, of at most {slices_of_chips}")
    if not importlib.util.find_spec("libtpu"):
        raise InputError(f"compile requires libtpu; run: {install_hint('tpu-aot')}")
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if len(sizes) == 2 and math.prod(sizes) < 4:
        options["chips_per_host_bounds"] = [*sizes, 1]  # a part of a host
    if name == "v4":
        options["chip_config_name"] = "megacore"  # a chip is one device, as on Cloud TPU
    jax.config.update("jax_platforms", "cpu")  # only the compiler is used, not a device of this machine
    try:
        devices = tuple(topologies.get_topology_desc(topology, "tpu", **options).devices)
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise InputError(f"topology={topology}: libtpu does not support it ({reason}); try v5e:4x4") from error
    return Target(topology, slices, devices, int(memory * _UNITS["G"]))


def out_of_memory(error: Exception) -> tuple[int, int] | None:
    """Parses (bytes needed, bytes available) of HBM from the compiler's out-of-memory error; None for another error."""
    text = str(error)
    size = r"([\d.]+)([KMGT]?)"
    found = re.search(rf"(?:Used |\(){size}\)? (?:of|exceeds available HBM) \(?{size}", text)
    if "RESOURCE_EXHAUSTED" not in text or "memory space vmem" in text or not found:
        return None
    needed, available = (int(float(found[i]) * _UNITS[found[i + 1]]) for i in (1, 3))
    return needed, available


LARGEST_PARTS = 40
"""Parts of a step in its profile."""
VOCAB_SIZE = 30_522
SEQ_LEN = 128
"""Defaults if neither the config nor a dataset sets them."""
LEFT_OUT = (
    "collectives, custom kernels such as attention=pallas, and gathers on the sparse cores of v5p, v6e and TPU7x, "
    "which have no estimate; overlap of instructions; copies and other instructions bound by memory take what XLA "
    "estimates for them"
)
"""What XLA's cost model leaves out of a step's time."""

_MULTIPLY_ADDS = {
    "TPU v4": 8 * 128**2, "TPU v5 lite": 4 * 128**2, "TPU v5e": 4 * 128**2, "TPU v5": 8 * 128**2,
    "TPU v5p": 8 * 128**2, "TPU v6 lite": 4 * 256**2, "TPU v6e": 4 * 256**2, "TPU7x": 4 * 256**2,
}  # fmt: skip
"""Multiply-adds in a cycle of a JAX device: the number of its matrix units (MXUs) times the square of their width.

A TensorCore of v6e and TPU7x has two units, which XLA's estimate counts as four: products come out at up to 87% of the
peak, and by two units above it.
"""

log = logging.getLogger(__name__)


def compile_phases(
    config: PretrainConfig, topology: str | None, *, slices: int = 1, phase: int | None = None, profile: bool = False
) -> Iterator[dict[str, Any]]:
    """Compiles the step of each phase, or of the one numbered `phase` from 0, and yields what `compile_step` returns.

    `data.path` may be empty. See `open_target` for `topology` and the number of `slices`, which a slower network
    connects. Raises InputError for an invalid config.
    """
    config = fill_in_from_checkpoint(config)
    target = open_target(topology, slices)
    plans = plan_phases(config)
    if phase is not None and not 0 <= phase < len(plans):
        raise InputError(f"phase={phase}: expected 0 to {len(plans) - 1}")
    for plan in plans if phase is None else [plans[phase]]:
        log.info("Compiling steps %d-%d for %s", plan.start + 1, plan.stop, target.topology)
        yield compile_step(target, plan, profile=profile)


def compile_step(target: Target, plan: Plan, *, profile: bool = False) -> dict[str, Any]:
    """Compiles the step of a phase, and describes it for JSON: bytes and seconds of one device, FLOPs of all devices.

    The sizes of a row are those of `data.path` if set, else of the config. `problem` says by how much a step does not
    fit, and which settings need less; it is None for a step that fits. Sizes that are not known are missing or None.
    InputError for a config that is invalid or not divisible over the devices.
    """
    check_config(plan.config, plan.stop - plan.start)
    mesh = make_mesh(plan.config.mesh, target.devices)
    config = plan.config
    if config.data.path:
        datasets = [PreparedDataset(path) for path in data_paths(config)]
        check_mixture(config, datasets)
        seq_len, vocab_size = datasets[0].info.seq_len, datasets[0].tokenizer.vocab_size
    else:
        seq_len = SEQ_LEN if config.data.seq_len == -1 else config.data.seq_len
        vocab_size = VOCAB_SIZE if config.model.vocab_size == -1 else config.model.vocab_size
    sequences = config.data.max_sequences if config.data.packing else 1
    predictions = predictions_per_row(make_masking(config), seq_len, sequences)
    plan, model = fit_plan(plan, mesh, seq_len, vocab_size, config.data.path or "a dataset of data.seq_len")
    rows, microbatches, devices = config.global_batch_size, plan.config.gradient_accumulation, len(target.devices)
    spec, train_step = plan_step(mesh, plan, model)
    batch = abstract_batch(mesh, plan.config, seq_len, predictions, sequences)
    start = time.perf_counter()
    memory, program, hbm = {}, "", target.hbm_bytes
    try:
        with jax.set_mesh(mesh):
            compiled = train_step.lower(spec.abstract, batch).compile()
    except jax.errors.JaxRuntimeError as error:  # only the compiler for TPUs refuses a program that does not fit
        if (needs := out_of_memory(error)) is None:
            raise BertJaxError(f"the compiler failed: {str(error).strip().splitlines()[0]}") from error
        peak, hbm = needs
    else:
        sizes: Any = compiled.memory_analysis()
        memory = {f"{part}_bytes": getattr(sizes, f"{part}_size_in_bytes") for part in ("argument", "output", "temp")}
        peak = sizes.peak_memory_in_bytes
        if target.devices[0].platform == "cpu":  # whose peak is that of the arguments alone
            peak = sum(memory.values()) - sizes.alias_size_in_bytes
        # v5p and v6e run some gathers on sparse cores, as a kind of call that a jaxlib older than libtpu cannot read.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            program = compiled.as_text() or ""
    problem = None
    if hbm and peak > hbm:
        excess = (peak - hbm) / (1 << 30)
        problem = (
            f"steps {plan.start + 1}-{plan.stop}: need {excess:.2f} GiB more per device than the "
            f"{hbm / (1 << 30):.2f} GiB that it has; use more devices, or set remat=attention, gradient_accumulation="
            f"{2 * microbatches}, remat=full, or mesh.fsdp=-1 and mesh.data=1"
        )
    model_flops = rows * training_flops(model, seq_len, predictions, sequences)
    return {
        "topology": target.topology,
        "num_slices": target.slices,
        "devices": devices,
        "mesh": dict(mesh.shape),
        "first_step": plan.start + 1,
        "last_step": plan.stop,
        "objective": objective_name(config),
        "seq_len": seq_len,
        "predictions": predictions,
        "global_batch_size": rows,
        "gradient_accumulation": microbatches,
        "rows_per_device": rows // microbatches // math.prod(mesh.shape[axis] for axis in BATCH_AXES),
        "compile_seconds": round(time.perf_counter() - start, 1),
        "fits": problem is None,
        "peak_bytes": peak,
        **memory,
        "hbm_bytes": hbm,
        "hbm_share": peak / hbm if hbm else None,
        "model_flops": model_flops,
        "collectives": [asdict(c) for c in read_collectives(program, devices, target.slices)] if program else None,
        "estimate": estimate_time(program, target.devices[0].device_kind, model_flops / devices, profile=profile),
        "problem": problem,
    }


def estimate_time(program: str, kind: str, model_flops: float, *, profile: bool = False) -> dict[str, Any] | None:
    """Estimates seconds and MFU of a step: the cycles that XLA:TPU writes into its program, over the chip's clock.

    `kind` is the `device_kind`, `model_flops` are those of a device; `profile` adds the largest parts. Returns None for
    other devices, chips of unknown clock, and an empty program.
    """
    parts, peak = read_parts(program) if program else [], peak_flops(kind)
    if not parts or peak is None or kind not in _MULTIPLY_ADDS:
        return None
    clock, cycles = peak / (2 * _MULTIPLY_ADDS[kind]), sum(part.cycles for part in parts)
    seconds = cycles / clock
    largest = [asdict(p) | {"seconds": p.cycles / clock, "share": p.cycles / cycles} for p in parts[:LARGEST_PARTS]]
    return {"seconds": seconds, "mfu": model_flops / peak / seconds, "clock_hz": clock, "left_out": LEFT_OUT} | (
        {"parts": largest} if profile else {}
    )
