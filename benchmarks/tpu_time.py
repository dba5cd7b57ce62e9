"""Compiles BERT-LARGE with LAMB's batches for slices of 256 and 1,024 TPUs; prints memory, collectives and XLA's time.

    python benchmarks/tpu_time.py                      # some 50 minutes on two cores; --only v5e for one chip's rows

Requires the tpu-aot extra and no TPU. Each row names the command that printed it. Each command's rows are written to
the JSON as soon as they exist: a run that is stopped continues with the first command that lacks rows of this code.

XLA estimates no collectives. Those that overlap with nothing are added to its time, as if rings along all axes of a
torus moved their bytes at the links' published speed: an all-reduce moves each twice, an all-gather once. A v5e and v6e
slice is a torus along an axis of 16 chips, and the others along an axis that is a multiple of 4; elsewhere rings take
twice as long.
"""

import json
from functools import partial

from processes import bert_jax
from record import Record, make_parser

GIB, MIB = 1 << 30, 1 << 20

THOUSAND = "bert-jax compile --config=bert_large:lamb --topology=v4:8x8x16"
COMMANDS = [
    *(
        f"bert-jax compile --config=bert_large:lamb_{topology.partition(':')[0]} --topology={topology}"
        for topology in ("v4:4x8x8", "v5e:16x16", "v5p:4x8x8", "v6e:16x16", "tpu7x:4x4x8")
    ),
    THOUSAND,
    f"bert-jax compile --config=bert_large --topology=v4:8x8x16 --config.global_batch_size={1024 * 16}",
    f"bert-jax compile --config=bert_large --topology=v5e:4x4 --config.global_batch_size={16 * 32}",
]
LINKS = {"v4": 9e10, "v5e": 9e10, "v5p": 1.8e11, "v6e": 1.8e11, "tpu7x": 1.8e11}
"""Bytes a second along one axis of the torus, both directions together (https://jax-ml.github.io/scaling-book/tpus)."""
MEASURES = (
    "bert_jax/ahead_of_time/compiled_step.py", "bert_jax/ahead_of_time/hlo.py",
    "bert_jax/model", "bert_jax/parallel",
    "bert_jax/training/objectives.py", "bert_jax/training/optimizer.py",
    "bert_jax/training/train_step.py",
    "configs/bert_large.py",
)  # fmt: skip

COLUMNS = {
    "devices": "{chips:,}",
    "tokens": "{seq_len}",
    "rows per device x microbatches": "{rows_per_chip} x {microbatches}",
    "peak / HBM, GiB": "{peak_gib:.2f} / {hbm_gib:.2f}{excess}",
    "reduced, MiB": "{reduced_mib:,.1f}",
    "gathered, MiB": "{gathered_mib:,.1f}",
    "in loops": "{collectives_in_loops}",
    "estimated ms": "{step_ms:,.1f}",
    "estimated MFU": "{mfu_percent:.1f}%",
    "collectives alone, ms": "{alone_ms:,.1f}",
    "hours": "{hours:.1f}",
    "compiled in, s": "{compile_seconds:.0f}",
    "command": "`{command}`",
}
"""`alone` are collectives that overlap with nothing; the hours are those of the phase, with them."""


def make_row(found: dict, command: str) -> dict:
    """Returns the row of a phase, for `COLUMNS`."""
    row = {
        "chips": found["devices"],
        "seq_len": found["seq_len"],
        "rows_per_chip": found["rows_per_device"],
        "microbatches": found["gradient_accumulation"],
        "peak_gib": found["peak_bytes"] / GIB,
        "hbm_gib": found["hbm_bytes"] / GIB,
        "excess": "" if found["fits"] else ": does not fit",
        "command": command,
    }
    if not found["fits"]:
        return row
    sent, milliseconds = found["collectives"], 1e3 * found["estimate"]["seconds"]
    alone = 1e3 * sum(ring_seconds(one, found["topology"]) for one in sent if not one["asynchronous"])
    return row | {
        "step_ms": milliseconds,
        "mfu_percent": 100 * found["estimate"]["mfu"],
        "alone_ms": alone,
        "hours": (milliseconds + alone) / 3.6e6 * (found["last_step"] - found["first_step"] + 1),
        "compile_seconds": found["compile_seconds"],
        "reduced_mib": sum(one["bytes"] for one in sent if "reduce" in one["kind"]) / MIB,
        "gathered_mib": sum(one["bytes"] for one in sent if one["kind"] == "all-gather") / MIB,
        "collectives_in_loops": sum(one["count"] for one in sent if one["loops"]),
    }


def ring_seconds(collective: dict, topology: str) -> float:
    """Returns the seconds of a collective over a whole slice."""
    chip, _, shape = topology.partition(":")
    sizes = [int(size) for size in shape.split("x")]
    is_torus = all(size % (16 if len(sizes) == 2 else 4) == 0 for size in sizes)
    speed = LINKS[chip] * len(sizes) / (1 if is_torus else 2)
    return collective["bytes"] * (2 if collective["kind"] == "all-reduce" else 1) / speed


def compile_command(command: str) -> list[dict]:
    """Returns the rows of a command's phases. Its status is 2 if a phase does not fit; the row says so."""
    phases = json.loads(bert_jax(*command.split()[1:], "--json", statuses=(0, 2)))["phases"]
    return [make_row(found, command) for found in phases]


def main() -> None:
    parser = make_parser(__doc__, "tpu_time")
    parser.add_argument("--only", default="", metavar="TEXT", help="commands that contain the text, such as v5e:4x4")
    options = parser.parse_args()
    record = Record(options.json, MEASURES, packages=("libtpu",))
    works = {(command,): partial(compile_command, command) for command in COMMANDS}
    rows = record.fill("topologies", COLUMNS, ["command"], works, options.only)
    minutes = 60 * sum(row.get("hours", 0) for row in rows if row["command"] == THOUSAND)
    record.set_values(minutes_on_1024_chips=minutes)
    print(record.render("topologies"))


if __name__ == "__main__":
    main()
