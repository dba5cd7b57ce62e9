"""Compiles BERT-LARGE with LAMB's batches for TPU slices of many sizes; prints memory, collectives and XLA's time.

    python benchmarks/tpu_topologies.py                # some 25 minutes on two cores; --only v5e for one chip's rows

Requires the tpu-aot extra and no TPU. Each row names the command that printed it. Each command's rows are written to
the JSON as soon as they exist: a run that is stopped continues with the first command that lacks rows of this code.
"""

import argparse
import json
import subprocess
import sys

from record import Record, add_json_argument

GIB, MIB = 1 << 30, 1 << 20

TOPOLOGIES = {
    "v4": ("2x2x2", "4x8x8"),
    "v5e": ("2x4", "16x16"),
    "v5p": ("2x2x2", "4x8x8"),
    "v6e": ("2x4", "16x16"),
    "tpu7x": ("2x2x1", "4x4x8"),
}
COMMANDS = [
    f"bert-jax compile --config=bert_large:lamb_{chip} --topology={chip}:{shape}"
    for chip, shapes in TOPOLOGIES.items()
    for shape in shapes
] + [
    "bert-jax compile --config=bert_large:lamb --phase=0 --topology=v4:8x8x16",
    f"bert-jax compile --config=bert_large --topology=v4:8x8x16 --config.global_batch_size={1024 * 16}",
    f"bert-jax compile --config=bert_large --topology=v5e:4x4 --config.global_batch_size={16 * 32}",
]
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
    "arguments, temporaries, GiB": "{arguments_gib:.2f}, {temporaries_gib:.2f}",
    "reduced, MiB": "{reduced_mib:,.1f}",
    "gathered, MiB": "{gathered_mib:,.1f}",
    "in loops": "{collectives_in_loops}",
    "estimated step, ms": "{step_ms:,.1f}",
    "estimated MFU": "{mfu_percent:.1f}%",
    "compiled in, s": "{compile_seconds:.0f}",
    "command": "`{command}`",
}


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
    sent, estimate = found["collectives"], found["estimate"] or {}
    return row | {
        "step_ms": 1000 * estimate["seconds"] if estimate else None,
        "mfu_percent": 100 * estimate["mfu"] if estimate else None,
        "compile_seconds": found["compile_seconds"],
        "arguments_gib": found["argument_bytes"] / GIB,
        "temporaries_gib": found["temp_bytes"] / GIB,
        "reduced_mib": None if sent is None else sum(x["bytes"] for x in sent if "reduce" in x["kind"]) / MIB,
        "gathered_mib": None if sent is None else sum(x["bytes"] for x in sent if x["kind"] == "all-gather") / MIB,
        "collectives_in_loops": None if sent is None else sum(x["count"] for x in sent if x["loops"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", metavar="CHIP", help="v4, v5e, v5p, v6e or tpu7x, or a topology such as v5e:2x4"
    )
    add_json_argument(parser, "tpu_topologies")
    options = parser.parse_args()
    record = Record(options.json, MEASURES, packages=("libtpu",))
    rows: dict[str, list[dict]] = {command: [] for command in COMMANDS}
    for row in record.earlier("topologies"):
        rows.setdefault(row["command"], []).append(row)
    failed = []
    for command in COMMANDS:
        current = bool(rows[command]) and all(row.get("code") == record.stamp["code"] for row in rows[command])
        if current or (options.only and f"--topology={options.only}" not in command):
            continue
        print(f"{command} ...", file=sys.stderr, flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "bert_jax.cli", *command.split()[1:], "--json"],
            stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        if done.returncode not in (0, 2):  # 2: a phase does not fit; its row says so
            failed.append(f"{command}: status {done.returncode}")
            continue
        rows[command] = [make_row(found, command) | record.stamp for found in json.loads(done.stdout)["phases"]]
        record.set_table("topologies", COLUMNS, (row for command in COMMANDS for row in rows[command]))
    record.set_table("topologies", COLUMNS, (row for command in COMMANDS for row in rows[command]))
    print(record.render("topologies"))
    if failed:
        raise SystemExit("not compiled, earlier rows kept:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
