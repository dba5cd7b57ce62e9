"""Compiles BERT-LARGE's step for TPUs with each set of compiler flags of launch/xla_flags.sh; prints what it changes.

    python benchmarks/xla_flags.py [--chips v5e v6e]        # some 60 minutes on two cores

Requires the tpu-aot extra and no TPU. Each compilation is a process of its own: flags are read when libtpu is loaded. A
row is written to the JSON as soon as it exists: a run that is stopped continues with the first case that lacks a row of
this code.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from record import Record, add_json_argument

MIB = 1 << 20
SCRIPT = Path(__file__).parents[1] / "launch" / "xla_flags.sh"
SETS = ("none", "async_all_gather", "async_all_reduce", "data_parallel", "sparse_core")
WITHOUT_SPARSE_CORES = ("v5e",)
TOPOLOGIES = {"v5e": "v5e:4x4", "v5p": "v5p:2x2x4", "v6e": "v6e:4x4", "tpu7x": "tpu7x:2x2x4"}
"""16 chips each."""
MESHES = {"data": (), "fsdp": ("--config.mesh.fsdp=-1", "--config.mesh.data=1")}
ROWS_PER_DEVICE = 16
COMMON = (
    "--config=bert_large", "--config.data.seq_len=128", "--config.data.max_predictions=20",
    "--config.gradient_accumulation=1", "--json",
)  # fmt: skip
MEASURES = (
    "bert_jax/ahead_of_time/compiled_step.py", "bert_jax/ahead_of_time/hlo.py",
    "bert_jax/ahead_of_time/target.py", "bert_jax/model", "bert_jax/parallel",
    "bert_jax/training/objectives.py", "bert_jax/training/optimizer.py",
    "bert_jax/training/train_step.py",
    "launch/xla_flags.sh",
)  # fmt: skip
COLUMNS = {
    "topology": "`{topology}`",
    "mesh": "{mesh}",
    "flags": "{flags}",
    "peak, MiB": "{peak_mib:,.0f}",
    "all-reduces, asynchronous of all": "{all_reduce}",
    "all-gathers": "{all_gather}",
    "reduce-scatters": "{reduce_scatter}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    add_json_argument(parser, "xla_flags")
    options = parser.parse_args()
    record = Record(options.json, MEASURES, packages=("libtpu",))
    rows = {(row["topology"], row["mesh"], row["flags"]): row for row in record.earlier("flags")}
    cases = [
        (topology, mesh, flags)
        for chip, topology in TOPOLOGIES.items()
        for mesh in MESHES
        for flags in SETS
        if flags != "sparse_core" or chip not in WITHOUT_SPARSE_CORES
    ]
    for case in cases:
        if case[0].split(":")[0] in options.chips and rows.get(case, {}).get("code") != record.stamp["code"]:
            rows[case] = measure(*case) | record.stamp
            record.set_table("flags", COLUMNS, [rows[one] for one in cases if one in rows])
    record.set_table("flags", COLUMNS, [rows[one] for one in cases if one in rows])
    print(record.render("flags"))


def measure(topology: str, mesh: str, flags: str) -> dict[str, Any]:
    """Compiles a case; returns its row. A set that the compiler refuses has dashes."""
    print(f"{topology}, {mesh}, {flags} ...", file=sys.stderr, flush=True)
    row: dict[str, Any] = {"topology": topology, "mesh": mesh, "flags": flags}
    environment = {**os.environ, "LIBTPU_INIT_ARGS": "" if flags == "none" else _flags(flags)}
    devices = (2 if topology.startswith("tpu7x") else 1) * 16
    command = [
        sys.executable, "-m", "bert_jax.cli", "compile", *COMMON, f"--topology={topology}", *MESHES[mesh],
        f"--config.global_batch_size={ROWS_PER_DEVICE * devices}",
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr.strip().splitlines()[-1], file=sys.stderr)
        return row | {"peak_mib": None, "all_reduce": None, "all_gather": None, "reduce_scatter": None}
    (phase,) = json.loads(done.stdout)["phases"]
    row["peak_mib"] = phase["peak_bytes"] / MIB
    for kind in ("all-reduce", "all-gather", "reduce-scatter"):
        found = phase["collectives"]
        row[kind.replace("-", "_")] = None if found is None else _share([one for one in found if one["kind"] == kind])
    return row


def _flags(name: str) -> str:
    return subprocess.run([SCRIPT, name], capture_output=True, text=True, check=True).stdout.strip()


def _share(collectives: list[dict[str, Any]]) -> str:
    count = sum(one["count"] for one in collectives)
    return f"{sum(one['asynchronous'] for one in collectives):,} of {count:,}" if count else "none"


if __name__ == "__main__":
    main()
