"""Compiles BERT-LARGE's step for NVIDIA GPUs, and the Triton kernels of attention; prints memory and registers.

    python benchmarks/gpu_memory.py           # some 15 minutes on two cores

Requires the gpu-aot extra and no GPU. The rows of a batch are those of the recipes in configs/bert_large.py. A row is
written to the JSON as soon as it exists: a run that is stopped continues with the first case that lacks a row of this
code.
"""

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from compiled_memory import CASE, measure_memory
from record import Record, add_json_argument

from bert_jax.ahead_of_time.target import open_target
from bert_jax.configs.bert_large import CHIPS

GPUS = 8
KINDS = ("h100", "h200", "b200")
VARIANTS = [("triton", "none"), ("xla", "attention"), ("xla", "none")]
MEASURES = (
    "bert_jax/ahead_of_time/compiled_step.py", "bert_jax/ahead_of_time/gpu_target.py", "bert_jax/model",
    "bert_jax/parallel", "bert_jax/training/cross_entropy.py", "bert_jax/training/objectives.py",
    "bert_jax/training/optimizer.py", "bert_jax/training/state.py", "bert_jax/training/train_step.py",
    "configs/bert_large.py",
)  # fmt: skip
MEMORY = {
    "topology": "{topology}",
    "tokens": "{seq_len}",
    "rows per GPU": "{rows}",
    "`attention`, `remat`": "{attention}, {remat}",
    "peak / usable, GiB": "{peak_gib:.2f} / {usable_gib:.2f}{excess}",
    "temporaries, GiB": "{temporaries_gib:.2f}",
}
KERNELS = {
    "GPU": "{gpu}",
    "kernel": "`{kernel}`",
    "dropout": "{dropout}",
    "registers per thread": "{registers}",
    "spilled bytes": "{spilled_bytes}",
    "tensor-core instructions": "{products} `{instruction}`",
}
KERNEL_GPUS = ("a100", "h100", "b200")
ROWS, HEADS, HEAD, LENGTH = 8, 16, 64, 512
PRODUCTS = ("wgmma.mma_async", "tcgen05.mma", "mma.sync")
"""Instructions of PTX for products on tensor cores: of Hopper, of Blackwell, and of all."""


def memory_cases() -> Iterator[tuple[str, int, int, str, str]]:
    """Yields topology, tokens, rows per GPU, attention and remat."""
    for kind in KINDS:
        for seq_len, rows in zip((128, 512), CHIPS[kind], strict=True):
            for variant in VARIANTS:
                yield f"{kind}:{GPUS}", seq_len, rows, *variant


def measure_kernels(gpu: str, dropout: float) -> list[dict]:
    """Returns the rows of the three kernels, for `KERNELS`: what NVIDIA's assembler prints of XLA's PTX."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}".strip()
        command = [sys.executable, __file__, f"--kernels={gpu}", f"--dropout={dropout}"]
        subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags}, check=True)
        rows = []
        for file in Path(folder).glob("*.ptx"):
            ptx = file.read_text(encoding="utf-8")
            for name in re.findall(r"\.entry (attention_\w+)", ptx):
                rows.append({"gpu": gpu, "kernel": name, "dropout": dropout, **assemble(file, ptx)})
    return sorted(rows, key=lambda row: ("forward" not in row["kernel"], row["kernel"]))


def assemble(file: Path, ptx: str) -> dict:
    """Returns the registers, spills and tensor-core instructions of a file with one kernel."""
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    done = subprocess.run(
        [find_assembler(), "-v", f"-arch={target[1]}", file, "-o", os.devnull], capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    instruction = next((name for name in PRODUCTS if name in ptx), PRODUCTS[-1])
    return {
        "registers": int(re.search(r"Used (\d+) registers", done.stderr)[1]),
        "spilled_bytes": int(re.search(r"(\d+) bytes spill stores", done.stderr)[1]),
        "products": ptx.count(instruction),
        "instruction": instruction,
    }


def find_assembler() -> Path:
    """Returns the path of ptxas in the package nvidia-cuda-nvcc."""
    files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    return next(Path(file.locate()) for file in files if file.name == "ptxas")


def compile_kernels(gpu: str, dropout: float) -> None:
    """Compiles the kernels of a gradient in bfloat16, whose PTX XLA dumps."""
    import jax
    import jax.numpy as jnp

    from bert_jax.model.attention_kernels.triton_attention import triton_attention

    target = open_target(f"{gpu}:1", 1)
    sharding = jax.sharding.SingleDeviceSharding(target.devices[0])

    def gradient(qkv: jax.Array, ids: jax.Array, keys: jax.Array, weights: jax.Array) -> jax.Array:
        def attend(qkv: jax.Array) -> jax.Array:
            typed = jax.random.wrap_key_data(keys)
            return triton_attention(qkv, ids, typed, dropout_rate=dropout, causal=False)

        context, backward = jax.vjp(attend, qkv)
        return context, backward(weights)[0]

    shapes = [
        ((ROWS, LENGTH, 3, HEADS, HEAD), jnp.bfloat16), ((ROWS, LENGTH), jnp.int32), ((ROWS, 2), jnp.uint32),
        ((ROWS, LENGTH, HEADS, HEAD), jnp.bfloat16),
    ]  # fmt: skip
    lowered = jax.jit(gradient).lower(*(jax.ShapeDtypeStruct(*one, sharding=sharding) for one in shapes))
    lowered.compile(target.compiler_options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", metavar="GPU", help="compile only the kernels, for the compiler's dump")
    parser.add_argument("--dropout", type=float, default=0.1, help="of the kernels (default: 0.1)")
    add_json_argument(parser, "gpu_memory")
    options = parser.parse_args()
    if options.kernels:
        compile_kernels(options.kernels, options.dropout)
        return
    record = Record(options.json, MEASURES, packages=("jax-cuda13-plugin", "nvidia-cuda-nvcc"))
    kept = {
        table: [row for row in record.earlier(table) if row.get("code") == record.stamp["code"]]
        for table in ("kernels", "memory")
    }
    for gpu in KERNEL_GPUS:
        for dropout in (0.1, 0.0):
            rows = kept["kernels"]
            if all((row["gpu"], row["dropout"]) != (gpu, dropout) for row in rows):
                print(f"kernels of {gpu}, dropout {dropout} ...", file=sys.stderr, flush=True)
                rows += [row | record.stamp for row in measure_kernels(gpu, dropout)]
            record.set_table("kernels", KERNELS, rows)
    for case in memory_cases():
        rows = kept["memory"]
        if all(tuple(row[name] for name in CASE) != case for row in rows):
            print(f"{case} ...", file=sys.stderr, flush=True)
            rows.append(measure_memory(*case) | record.stamp)
        record.set_table("memory", MEMORY, rows)
    print(record.render("memory"), record.render("kernels"), sep="\n\n")


if __name__ == "__main__":
    main()
