"""Compiles BERT-LARGE's training step for TPUs; prints estimated time, memory and collectives.

    python benchmarks/step_programs.py                 # some 12 minutes on two cores

Requires the tpu-aot extra and no TPU. The time is that of XLA's cost model, which leaves out collectives. A row is
written to the JSON as soon as it exists: a run that is stopped continues with the first case that lacks a row of this
code. Rows of other variants of the step, of which the commit of the record has the code, stay beside it.
"""

import argparse
import sys
from typing import Any

from record import Record, add_json_argument

from bert_jax.ahead_of_time.compiled_step import compile_step, open_target
from bert_jax.config import load_config
from bert_jax.training.phases import plan_phases

GIB, MIB = 1 << 30, 1 << 20
VARIANT = "shard_map"
"""Name of the step in the table."""
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "16 chips, data": ("v5e:4x4", "bert_large", {"global_batch_size": 512}),
    "16 chips, data x fsdp": ("v5e:4x4", "bert_large", {"global_batch_size": 512, "mesh.data": 4, "mesh.fsdp": 4}),
    "16 chips, data x tensor": ("v5e:4x4", "bert_large", {"global_batch_size": 512, "mesh.tensor": 2}),
    "256 chips, 4 microbatches": ("v5e:16x16", "bert_large:lamb_v5e", {"gradient_accumulation": 4}),
    "256 chips, 64 microbatches": ("v5e:16x16", "bert_large:lamb_v5e", {"gradient_accumulation": 64}),
    "1,024 chips": ("v4:8x8x16", "bert_large", {"global_batch_size": 16 * 1024}),
}
"""Topology, config and its overrides; of a config with phases the first is compiled."""
KINDS = ("all-reduce", "all-gather", "reduce-scatter")
MEASURES = (
    "bert_jax/ahead_of_time/compiled_step.py", "bert_jax/ahead_of_time/hlo.py",
    "bert_jax/model", "bert_jax/parallel",
    "bert_jax/tracking/throughput.py", "bert_jax/training/objectives.py",
    "bert_jax/training/optimizer.py", "bert_jax/training/train_step.py",
    "configs/bert_large.py",
)  # fmt: skip
COLUMNS = {
    "step": "{variant}",
    "case": "{case}",
    "rows per chip x microbatches": "{rows} x {microbatches}",
    "estimated ms": "{estimated_ms:,.1f}",
    "at the peak": "{peak_ms:,.1f}",
    "estimated MFU": "{mfu:.1%}",
    "peak GiB": "{peak_gib:.2f}",
    **{f"{kind}s": f"{{{kind.replace('-', '_')}}}" for kind in (*KINDS, "other")},
}


def measure(case: str) -> dict[str, Any]:
    """Compiles a case; returns its row, with the collectives of a step on one chip."""
    topology, name, overrides = CASES[case]
    target = open_target(topology)
    plan = plan_phases(load_config(name, [(key, str(value)) for key, value in overrides.items()]))[0]
    found = compile_step(target, plan, profile=True)
    estimate = found["estimate"]
    row = {
        "variant": VARIANT, "case": case, "topology": topology, "mesh": found["mesh"], "config": name,
        "rows": found["rows_per_device"], "microbatches": found["gradient_accumulation"],
        "peak_gib": found["peak_bytes"] / GIB, "collectives": found["collectives"],
        "estimated_ms": estimate and 1e3 * estimate["seconds"], "mfu": estimate and estimate["mfu"],
        "peak_ms": estimate and 1e3 * estimate["seconds"] * estimate["mfu"], "parts": estimate and estimate["parts"],
    }  # fmt: skip
    for kind in (*KINDS, "other"):
        of_kind = [
            one for one in found["collectives"] or () if (one["kind"] if one["kind"] in KINDS else "other") == kind
        ]
        count, looped = (sum(one["count"] for one in of_kind if one["loops"] >= depth) for depth in (0, 1))
        size = sum(one["bytes"] for one in of_kind) / MIB
        row[kind.replace("-", "_")] = f"{count:,} ({looped:,} in loops), {size:,.1f} MiB" if count else "none"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains the text")
    add_json_argument(parser, "step_programs")
    options = parser.parse_args()
    record = Record(options.json, MEASURES, packages=("libtpu",))
    rows = {(row["case"], row["variant"]): row for row in record.earlier("steps")}

    def in_order() -> list[dict[str, Any]]:
        return sorted(rows.values(), key=lambda row: list(CASES).index(row["case"]))

    for case in (case for case in CASES if options.only in case):
        if rows.get((case, VARIANT), {}).get("code") != record.stamp["code"]:
            print(f"{case} ...", file=sys.stderr, flush=True)
            rows[case, VARIANT] = measure(case) | record.stamp
            record.set_table("steps", COLUMNS, in_order())
    record.set_table("steps", COLUMNS, in_order())
    print(record.render("steps"))


if __name__ == "__main__":
    main()
