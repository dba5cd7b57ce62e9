"""Compiles BERT-LARGE with LAMB's batches for TPU slices of many sizes; prints memory, collectives and lower bounds.

    python benchmarks/tpu_topologies.py                # some 25 minutes on two cores; --only v5e for one chip's rows

Requires the tpu-aot extra and no TPU. Each row names the command that printed it.
"""

import argparse
import json
import subprocess
import sys

GIB, MIB = 1 << 30, 1 << 20

TOPOLOGIES = {
    "v4": ("2x2x2", "4x8x8"),
    "v5e": ("2x4", "16x16"),
    "v5p": ("2x2x2", "4x8x8"),
    "v6e": ("2x4", "16x16"),
}
COMMANDS = [
    f"bert-jax compile --config=bert_large:lamb_{chip} --topology={chip}:{shape}"
    for chip, shapes in TOPOLOGIES.items()
    for shape in shapes
] + ["bert-jax compile --config=bert_large:lamb --phase=0 --topology=v4:8x8x16"]

HEAD = (
    "| chips | tokens | rows per chip x microbatches | peak / HBM, GiB | arguments, temporaries, GiB | "
    "all-reduce, MiB | in loops | at least, ms: compute, memory, network | rows/s at most | command |"
)


def row(found: dict, command: str) -> str:
    """Returns the row of a phase, in the columns of `HEAD`."""
    memory = f"{found['peak_bytes'] / GIB:.2f} / {found['hbm_bytes'] / GIB:.2f}"
    rows = f"{found['devices']:,} | {found['seq_len']} | {found['rows_a_device']} x {found['gradient_accumulation']}"
    if not found["fits"]:
        return f"| {rows} | {memory}: does not fit | | | | | | `{command}` |"
    bounds = found["roofline"]
    parts = ", ".join(
        "?" if bounds[f"{part}_seconds"] is None else f"{1e3 * bounds[f'{part}_seconds']:,.0f}"
        for part in ("compute", "memory", "network")
    )
    sent = found["collectives"]
    reduced = "?" if sent is None else f"{sum(one['bytes'] for one in sent if one['kind'] == 'all-reduce') / MIB:,.1f}"
    looped = "?" if sent is None else str(sum(one["count"] for one in sent if one["loops"]))
    return (
        f"| {rows} | {memory} | {found['argument_bytes'] / GIB:.2f}, {found['temp_bytes'] / GIB:.2f} | {reduced} | "
        f"{looped} | {parts} | {bounds['rows_per_second_at_most']:,.0f} | `{command}` |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="CHIP", help="v4, v5e, v5p or v6e, or a topology such as v5e:2x4")
    options = parser.parse_args()
    print(HEAD)
    print("|" + " --- |" * HEAD.count(" |"))
    for command in COMMANDS:
        if options.only and f"--topology={options.only}" not in command:
            continue
        arguments = command.split()[1:]
        done = subprocess.run(
            [sys.executable, "-m", "bert_jax.cli", *arguments, "--json", "--no-advice"],
            stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        if done.returncode not in (0, 2):  # 2: a phase does not fit; its row says so
            raise SystemExit(done.returncode)
        for found in json.loads(done.stdout)["phases"]:
            print(row(found, command), flush=True)


if __name__ == "__main__":
    main()
