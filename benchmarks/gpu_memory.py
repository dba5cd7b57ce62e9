"""Compiles BERT-LARGE's step for NVIDIA GPUs; prints its memory.

    python benchmarks/gpu_memory.py           # some 10 minutes on two cores

Requires the gpu-aot extra and no GPU. The rows of a batch are those of the recipes in configs/bert_large.py. A row is
written to the JSON as soon as it exists: a run that is stopped continues with the first case that lacks a row of this
code.
"""

import argparse
import sys
from collections.abc import Iterator

from compiled_memory import CASE, measure_memory
from record import Record, add_json_argument

from bert_jax.configs.bert_large import CHIPS

GPUS = 8
KINDS = ("h100", "h200", "b200")
VARIANTS = [("xla", "attention"), ("xla", "none")]
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


def memory_cases() -> Iterator[tuple[str, int, int, str, str]]:
    """Yields topology, tokens, rows per GPU, attention and remat."""
    for kind in KINDS:
        for seq_len, rows in zip((128, 512), CHIPS[kind], strict=True):
            for variant in VARIANTS:
                yield f"{kind}:{GPUS}", seq_len, rows, *variant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_argument(parser, "gpu_memory")
    options = parser.parse_args()
    record = Record(options.json, MEASURES, packages=("jax-cuda13-plugin",))
    rows = [row for row in record.earlier("memory") if row.get("code") == record.stamp["code"]]
    for case in memory_cases():
        if all(tuple(row[name] for name in CASE) != case for row in rows):
            print(f"{case} ...", file=sys.stderr, flush=True)
            rows.append(measure_memory(*case) | record.stamp)
        record.set_table("memory", MEMORY, rows)
    print(record.render("memory"))


if __name__ == "__main__":
    main()
