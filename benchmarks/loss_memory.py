"""Compiles BERT-LARGE's step for a TPU with the masked-LM loss in chunks and without; prints the memory of both.

    python benchmarks/loss_memory.py                # some 15 minutes on two cores

Requires the tpu-aot extra and no TPU. A row is written to the JSON as soon as it exists: a run that is stopped
continues with the first case that lacks a row of this code.
"""

import argparse
import sys

from record import Record, add_json_argument

from bert_jax.ahead_of_time.compiled_step import VOCAB_SIZE, compile_step, plans
from bert_jax.ahead_of_time.target import Target, open_target
from bert_jax.config import load_config
from bert_jax.model import BertConfig
from bert_jax.training import objectives

GIB = 1 << 30
TOPOLOGY = "v5p:2x2x1"
ROWS_PER_CHIP = 128
COMMON = {
    "data.seq_len": "512", "remat": "full", "gradient_accumulation": "1", "mesh.data": "4",
    "global_batch_size": str(4 * ROWS_PER_CHIP),
}  # fmt: skip
MASKS = {"objective.mask_rate": "0.3"}
LEFT_TO_RIGHT = {"objective.lm": "ltr", "objective.nsp": "False"}
PALLAS = {"attention": "pallas"}
CASES = {
    "masks of 30%, attention=pallas": MASKS | PALLAS,
    "left to right, attention=xla": LEFT_TO_RIGHT,
    "masks of 30%, attention=xla": MASKS,
}
MEASURES = (
    "bert_jax/ahead_of_time/compiled_step.py", "bert_jax/ahead_of_time/target.py",
    "bert_jax/model", "bert_jax/parallel", "bert_jax/training/objectives.py",
    "bert_jax/training/train_step.py",
)  # fmt: skip
COLUMNS = {
    "case": "{case}",
    "predictions per chip": "{predictions:,}",
    "predictions per chunk": "{chunk:,}",
    "fp32 logits, GiB": "{logits_gib:.2f}",
    "peak without chunks, GiB": "{plain_peak_gib:.2f}",
    "peak in chunks, GiB": "{peak_gib:.2f}",
}


def compile_case(target: Target, overrides: dict[str, str]) -> dict:
    """Compiles the step of a case."""
    config = load_config("bert_large", list((COMMON | overrides).items()))
    return compile_step(target, plans(config, None)[0])


def measure(target: Target, case: str) -> dict:
    """Returns the row of a case, for `COLUMNS`."""
    step = compile_case(target, CASES[case])
    predictions = step["rows_per_device"] * step["predictions"]
    words = BertConfig(vocab_size=VOCAB_SIZE).padded_vocab_size
    chunk = objectives.predictions_per_chunk(predictions, words)
    default = objectives.CHUNK_PREDICTIONS
    objectives.CHUNK_PREDICTIONS = predictions
    try:
        plain = compile_case(target, CASES[case])
    finally:
        objectives.CHUNK_PREDICTIONS = default
    return {
        "case": case,
        "predictions": predictions,
        "chunk": chunk,
        "logits_gib": 4 * predictions * words / GIB,
        "plain_peak_gib": plain["peak_bytes"] / GIB,
        "peak_gib": step["peak_bytes"] / GIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_argument(parser, "loss_memory")
    options = parser.parse_args()
    record = Record(options.json, MEASURES, packages=("libtpu",))
    rows = [row for row in record.earlier("memory") if row.get("code") == record.stamp["code"]]
    target = open_target(TOPOLOGY, 1)
    for case in CASES:
        if all(row["case"] != case for row in rows):
            print(f"{case} ...", file=sys.stderr, flush=True)
            rows.append(measure(target, case) | record.stamp)
            record.set_table("memory", COLUMNS, rows)
    record.set_table("memory", COLUMNS, rows)
    print(record.render("memory"))


if __name__ == "__main__":
    main()
