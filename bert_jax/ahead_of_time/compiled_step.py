"""Compiles the training step of a phase ahead of time, and describes it."""

import importlib.metadata
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax

from bert_jax.ahead_of_time.chips import roofline
from bert_jax.ahead_of_time.hlo import read_collectives, read_loops
from bert_jax.ahead_of_time.target import Target, out_of_memory
from bert_jax.config import ConfigDict
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.loading.loader import predictions_per_row
from bert_jax.errors import BertJaxError, InputError
from bert_jax.extras import install_hint
from bert_jax.model import BertConfig
from bert_jax.parallel.mesh import BATCH_AXES, check_divisibility, fill_in_accumulation, make_mesh
from bert_jax.runtime.saved_programs import Program, without_source_lines
from bert_jax.tracking.flops import recomputed_flops, training_flops
from bert_jax.training.checks import bert_config, check_attention, check_config, compute_dtype, data_paths
from bert_jax.training.phase_data import abstract_batch, make_masking
from bert_jax.training.phases import Plan
from bert_jax.training.planning.saved_step import program_settings
from bert_jax.training.pretrain import plan_step

VERSIONS = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
"""Packages of the compiler, whose versions are described."""

VOCAB_SIZE = 30_522
SEQ_LEN = 128
"""Defaults if neither the config nor a dataset sets them."""


@dataclass(frozen=True)
class RowSizes:
    """Sizes of a batch's rows: L tokens, P predictions, K sequences; and the vocabulary's size."""

    seq_len: int
    predictions: int
    sequences: int
    vocab_size: int


def _rows(config: ConfigDict) -> RowSizes:
    """Reads the sizes from `data.path` if set, else from `data.seq_len` and `model.vocab_size`, else the defaults."""
    if config.data.path:
        dataset = PreparedDataset(data_paths(config)[0])
        seq_len, vocab_size = dataset.info.seq_len, dataset.tokenizer.vocab_size
        if config.data.seq_len not in (-1, seq_len):
            raise InputError(f"data.seq_len={config.data.seq_len}: {dataset.folder} has sequences of {seq_len} tokens")
    else:
        seq_len = SEQ_LEN if config.data.seq_len == -1 else config.data.seq_len
        vocab_size = VOCAB_SIZE if config.model.vocab_size == -1 else config.model.vocab_size
    if seq_len < 1:
        raise InputError(f"data.seq_len={seq_len}: expected at least 1, or -1")
    sequences = config.data.max_sequences if config.data.packing else 1
    return RowSizes(seq_len, predictions_per_row(make_masking(config), seq_len, sequences), sequences, vocab_size)


@dataclass(frozen=True)
class Step:
    """A compiled training step; `memory` and `text` are None if it does not fit.

    Attributes:
      wanted_bytes: peak memory of a device.
      state_bytes: the part of parameters, moments and counters.
      memory: argument, output and temporary bytes.
      text: the program's text; None if it cannot be read, for the reason in `unread`.
      compile_seconds: compilation time.
      program: the program, for a file of programs, if it is kept.
    """

    plan: Plan
    model: BertConfig
    rows: RowSizes
    mesh: dict[str, int]
    wanted_bytes: int
    state_bytes: int
    memory: dict[str, int] | None
    text: str | None
    unread: str
    compile_seconds: float
    program: Program | None = None

    @property
    def fits(self) -> bool:
        """True if the step fits into a device's memory."""
        return self.memory is not None

    @property
    def rows_a_device(self) -> int:
        """Rows per device and microbatch."""
        config = self.plan.config
        return config.global_batch_size // config.gradient_accumulation // math.prod(self.mesh[a] for a in BATCH_AXES)


def compile_step(target: Target, plan: Plan, *, keeps_program: bool = False) -> Step:
    """Compiles the step of a phase; the result has its `program` if that is kept, which takes memory.

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
    if target.is_gpu and config.attention == "cudnn":
        raise InputError(
            "attention=cudnn: cuDNN compiles its kernels on a GPU; compile on the machine with the GPUs, without "
            "--topology, or set attention=triton or attention=xla"
        )
    spec, train_step = plan_step(mesh, plan, model)
    batch = abstract_batch(mesh, config, rows.seq_len, rows.predictions, rows.sequences)
    state_bytes = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(spec.abstract)
    )

    def result(
        wanted: int, memory: dict[str, int] | None, text: str | None, unread: str = "", program: Program | None = None
    ) -> Step:
        seconds = time.perf_counter() - start
        return Step(
            plan, model, rows, dict(mesh.shape), wanted, state_bytes, memory, text, unread, round(seconds, 1), program
        )

    start = time.perf_counter()
    with jax.set_mesh(mesh), without_source_lines():
        lowered = train_step.lower(spec.abstract, batch)
    try:
        compiled = lowered.compile(target.compiler_options or None)
    except jax.errors.JaxRuntimeError as error:
        if needs := out_of_memory(error):
            return result(needs[0], None, None)
        raise BertJaxError(f"the compiler failed: {_first_line(error)}") from error
    sizes: Any = compiled.memory_analysis()
    if target.is_gpu and target.hbm_bytes and sizes.peak_memory_in_bytes > target.hbm_bytes:
        return result(sizes.peak_memory_in_bytes, None, None)  # only the compiler for TPUs refuses such a program
    memory = {
        "argument_bytes": sizes.argument_size_in_bytes,
        "output_bytes": sizes.output_size_in_bytes,
        "temp_bytes": sizes.temp_size_in_bytes,
    }
    try:
        text, unread = compiled.as_text(), ""
    except jax.errors.JaxRuntimeError as error:
        # v5p and v6e run some gathers and scatters on sparse cores, as a kind of call unknown to an older jaxlib.
        text = None
        unread = (
            f"jaxlib {importlib.metadata.version('jaxlib')} cannot read programs of libtpu "
            f"{importlib.metadata.version('libtpu')}; install matching versions with: {install_hint('tpu-aot')} "
            f"({_first_line(error)})"
        )
    program = Program(lowered, compiled, list(mesh.devices.flat), program_settings(mesh, config, model, batch))
    return result(sizes.peak_memory_in_bytes, memory, text, unread, program if keeps_program else None)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def moved_bytes(described: Mapping[str, Any]) -> int:
    """Returns the bytes that a step reads and writes in a device's memory, an estimate; see `chips.ASSUMPTIONS`."""
    state = described["argument_bytes"] + described["output_bytes"]
    return state + 2 * described["gradient_accumulation"] * described["temp_bytes"]


def describe(target: Target, step: Step) -> dict[str, Any]:
    """Describes a step for JSON: bytes of one device, FLOPs of one step on all devices."""
    config, rows = step.plan.config, step.rows
    collectives = None if step.text is None else read_collectives(step.text, step.mesh, target.slices)
    batch, devices = config.global_batch_size, len(target.devices)
    model_flops = batch * training_flops(step.model, rows.seq_len, rows.predictions, rows.sequences)
    recomputed = batch * recomputed_flops(step.model, rows.seq_len, config.remat, config.attention)
    memory: dict[str, int | None] = dict.fromkeys(("argument_bytes", "output_bytes", "temp_bytes"))
    memory |= step.memory or {}
    described = {
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
        "fits": step.fits,
        "peak_bytes": step.wanted_bytes,
        **memory,
        "state_bytes": step.state_bytes,
        "hbm_bytes": target.hbm_bytes,
        "hbm_share": round(step.wanted_bytes / target.hbm_bytes, 4) if target.hbm_bytes else None,
        "collectives": None if collectives is None else [asdict(one) for one in collectives],
        "collectives_unread": step.unread or None,
        "loops": None if step.text is None else read_loops(step.text),
        "model_flops": model_flops,
        "recomputed_flops": recomputed,
        "compile_seconds": step.compile_seconds,
        "versions": {name: _version(name) for name in VERSIONS},
        "roofline": None,
        "memory_bytes": None,
    }
    if step.memory:
        described["memory_bytes"] = moved = moved_bytes(described)
        if target.accelerator and target.accelerator.hbm:
            bounds = roofline(
                target.accelerator, flops=(model_flops + recomputed) / devices, memory_bytes=moved,
                collectives=collectives,
            )  # fmt: skip
            described["roofline"] = {
                **asdict(bounds), "at_least_seconds": bounds.at_least, "bound": bounds.bound,
                "one_after_another_seconds": bounds.one_after_another,
                "rows_per_second_at_most": batch / bounds.at_least,
            }  # fmt: skip
    return described
