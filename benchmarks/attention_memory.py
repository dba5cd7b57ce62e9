"""Compiles BERT-LARGE's step for TPUs with plain attention and with the Pallas kernel; prints memory and instructions.

    python benchmarks/attention_memory.py           # some 30 minutes on two cores

Requires the tpu-aot extra and no TPU. A row is written to the JSON as soon as it exists: a run that is stopped
continues with the first case that lacks a row of this code.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

from record import Record, add_json_argument

from bert_jax.ahead_of_time.compiled_step import compile_step, open_target
from bert_jax.config import load_config
from bert_jax.model import BertConfig
from bert_jax.tracking.throughput import training_flops
from bert_jax.training.phases import plan_phases

GIB = 1 << 30
PREDICTIONS = {128: 20, 512: 76}
"""By the number of tokens of a sequence."""
CASE = ("topology", "seq_len", "rows", "attention", "remat")
"""Keys that identify the case of a row: the arguments of `measure_memory`, in their order."""
CASES = [("v5e:2x2", 512, 16), ("v5e:2x2", 128, 64), ("v6e:2x2", 512, 32), ("v5p:2x2x1", 512, 128)]
"""Topology, tokens and rows per chip."""
VARIANTS = [("pallas", "none"), ("xla", "attention"), ("xla", "none")]
MEASURES = (
    "bert_jax/ahead_of_time/compiled_step.py", "bert_jax/model",
    "bert_jax/parallel", "bert_jax/training/objectives.py",
    "bert_jax/training/optimizer.py", "bert_jax/training/train_step.py",
)  # fmt: skip
MEMORY = {
    "topology": "{topology}",
    "tokens": "{seq_len}",
    "rows per chip": "{rows}",
    "`attention`, `remat`": "{attention}, {remat}",
    "peak / HBM, GiB": "{peak_gib:.2f} / {usable_gib:.2f}{excess}",
    "temporaries, GiB": "{temporaries_gib:.2f}",
}
KERNEL_TOPOLOGY = "v5e:2x2"
PEAK_FLOPS = 197e12  # of v5e, in bfloat16
CLOCK_GHZ = PEAK_FLOPS / (4 * 128 * 128 * 2) / 1e9  # four matrix units of 128 x 128 multiply-adds per cycle
HEADS, LENGTH = 2, 512  # of a step of the kernel's grid
INSTRUCTIONS = {
    "dropout": "{dropout}",
    "instructions, forward": "{forward:,}",
    "backward": "{backward:,}",
    "vector operations per score, forward": "{forward_vector:.1f}",
    "backward ": "{backward_vector:.1f}",
}


def measure_memory(topology: str, seq_len: int, rows: int, attention: str, remat: str) -> dict:
    """Compiles the step for the devices of `topology` with `rows` rows per device; returns its memory in GiB.

    `excess` is empty if the step fits; `temporaries_gib` is missing if the compiler
    refused the step for its memory.
    """
    target = open_target(topology, 1)
    overrides = {
        "data.seq_len": seq_len, "global_batch_size": len(target.devices) * rows, "gradient_accumulation": 1,
        "attention": attention, "remat": remat, "data.max_predictions": PREDICTIONS[seq_len],
    }  # fmt: skip
    config = load_config("bert_large", [(key, str(value)) for key, value in overrides.items()])
    step = compile_step(target, plan_phases(config)[0])
    row = {
        **dict(zip(CASE, (topology, seq_len, rows, attention, remat), strict=True)),
        "peak_gib": step["peak_bytes"] / GIB, "usable_gib": target.hbm_bytes / GIB,
        "excess": "" if step["fits"] else ": does not fit", "compile_seconds": step["compile_seconds"],
    }  # fmt: skip
    return row | {"temporaries_gib": step["temp_bytes"] / GIB} if step["fits"] else row


def measure_in_child(case: tuple) -> dict:
    """Returns `measure_memory` of a case, or a row that says so if the compiler ends the process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(measure_memory, *case).result()
        except BrokenProcessPool:
            return dict(zip(CASE, case, strict=True)) | {
                "peak_gib": None,
                "usable_gib": None,
                "excess": ": the compiler crashes",
            }


def measure_instructions(dropout: float) -> dict:
    """Returns the row of the kernel in the compiler's schedule, for `INSTRUCTIONS`."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"}
        subprocess.run([sys.executable, __file__, "--kernel", f"--dropout={dropout}"], env=environment, check=True)
        row: dict = {"dropout": dropout}
        for kernel in ("forward", "backward"):
            (file,) = Path(folder).glob(f"*attention_{kernel}_*final_hlo-static-per-bundle-utilization.txt")
            head, _, table = file.read_text(encoding="utf-8").partition("== UTILIZATION:\n")
            column = [name.strip() for name in re.findall(r"[A-Z:]+(?=,|\n)", head.split("\n")[1] + "\n")].index("VALU")
            uses = [[int(word) for word in line.split()] for line in table.strip().split("\n")]
            row[kernel] = len(uses)
            lanes = 8 * 128
            row[f"{kernel}_vector"] = sum(use[column] for use in uses) * lanes / (HEADS * LENGTH * LENGTH)
        return row


def estimate_times(rows: list[dict]) -> dict[str, float]:
    """Returns milliseconds of a sequence of 512 tokens in BERT-LARGE, at an instruction per cycle of v5e."""
    layers, heads = 24, 16
    instructions = {row["dropout"]: row["forward"] + row["backward"] for row in rows}
    a_million = layers * heads // HEADS / 1e6
    with_dropout, without = (instructions[dropout] * a_million / CLOCK_GHZ for dropout in (0.1, 0.0))
    model = BertConfig(
        hidden_size=1024, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4096
    )  # fmt: skip
    return {
        "clock_ghz": CLOCK_GHZ,
        "kernel_ms": with_dropout,
        "dropout_ms": with_dropout - without,
        "dropout_share": 1 - without / with_dropout,
        "model_ms": 1e3 * training_flops(model, LENGTH, 76) / PEAK_FLOPS,
    }


def compile_kernel(dropout: float) -> None:
    """Compiles the kernel and its gradient for two heads of 64 features and 32 rows, whose schedules libtpu dumps."""
    import jax
    import jax.numpy as jnp

    from bert_jax.model.pallas_attention import pallas_attention

    sharding = jax.sharding.SingleDeviceSharding(open_target(KERNEL_TOPOLOGY, 1).devices[0])

    def gradient(qkv: jax.Array, ids: jax.Array, keys: jax.Array, weights: jax.Array) -> jax.Array:
        def attend(qkv: jax.Array) -> jax.Array:
            typed = jax.random.wrap_key_data(keys)
            return pallas_attention(qkv, ids, typed, dropout_rate=dropout, causal=False)

        return jax.vjp(attend, qkv)[1](weights)[0]

    rows, heads = 32, 16
    shapes = [
        ((rows, LENGTH, 3, heads, 64), jnp.bfloat16), ((rows, LENGTH), jnp.int32), ((rows, 2), jnp.uint32),
        ((rows, LENGTH, heads, 64), jnp.bfloat16),
    ]  # fmt: skip
    jax.jit(gradient).lower(*(jax.ShapeDtypeStruct(*one, sharding=sharding) for one in shapes)).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", action="store_true", help="compile only the kernel, for the compiler's dump")
    parser.add_argument("--dropout", type=float, default=0.1, help="of the kernel (default: 0.1)")
    add_json_argument(parser, "attention_memory")
    options = parser.parse_args()
    if options.kernel:
        compile_kernel(options.dropout)
        return
    record = Record(options.json, MEASURES, packages=("libtpu",))
    kept = {
        table: [row for row in record.earlier(table) if row.get("code") == record.stamp["code"]]
        for table in ("instructions", "memory")
    }
    for dropout in (0.1, 0.0):
        rows = kept["instructions"]
        if all(row["dropout"] != dropout for row in rows):
            print(f"kernel, dropout {dropout} ...", file=sys.stderr, flush=True)
            rows.append(measure_instructions(dropout) | record.stamp)
        record.set_table("instructions", INSTRUCTIONS, rows)
    record.set_values(**estimate_times(kept["instructions"]))
    for case in CASES:
        for variant in VARIANTS:
            rows, key = kept["memory"], (*case, *variant)
            if all(tuple(row[name] for name in CASE) != key for row in rows):
                print(f"{key} ...", file=sys.stderr, flush=True)
                rows.append(measure_in_child(key) | record.stamp)
            record.set_table("memory", MEMORY, rows)
    print(record.render("memory"), record.render("instructions"), sep="\n\n")


if __name__ == "__main__":
    main()
