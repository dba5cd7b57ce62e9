"""Compares gradient all-reduces in float32 and in bfloat16: held-out loss of a small BERT, and bytes of BERT-LARGE.

    BERT_JAX_DATA=FOLDER python benchmarks/gradient_reduction.py     # some 10 minutes on two cores

Trains the model of configs/quickstart.py on 8 simulated CPU devices, once per seed and type, and evaluates it on the
whole eval split. FOLDER holds corpus/enwiki/*.jsonl.gz; the first file is used. Then compiles BERT-LARGE's step for
256 chips (requires the tpu-aot extra and no TPU). Each row is written to the JSON as soon as it exists; a run that is
stopped continues with the rows that are missing or older than the code. Dataset and runs, in
--folder, are kept for the next call. XLA:CPU adds in float32 what it was given in bfloat16, and rounds the sum.
"""

import json
import os
import shutil
from functools import partial
from pathlib import Path

from processes import bert_jax, data_folder, prepare_dataset
from record import REPOSITORY, Record, make_parser

DEVICES, SEEDS = 8, (0, 1, 2)
TYPES = ("float32", "bfloat16")
VOCABULARY_SIZE = 4_096
SETTINGS = {
    "total_steps": 1_000, "global_batch_size": 32, "objective.mask_rate": 0.25, "eval_every_steps": 0,
    "optimizer.name": "adamw", "optimizer.learning_rate": 2e-3, "optimizer.warmup_steps": 100,
    "checkpoint.every_steps": 1_000_000, "tracking.samples": 0,
}  # fmt: skip
COMPILED = "--config=bert_large:lamb_v5e --topology=v5e:16x16 --phase=0"
MEASURES = (
    "bert_jax/data/loading", "bert_jax/model", "bert_jax/parallel", "bert_jax/training/objectives.py",
    "bert_jax/training/optimizer.py",
    "bert_jax/training/train_step.py", "configs/quickstart.py",
)  # fmt: skip

LOSSES = {
    "seed": "{seed}",
    "float32: MLM loss": "{float32_mlm_loss:.4f}",
    "bfloat16: MLM loss": "{bfloat16_mlm_loss:.4f}",
    "difference": "{mlm_loss_difference:+.1e}",
    "float32: MLM accuracy": "{float32_mlm_accuracy:.2%}",
    "bfloat16: MLM accuracy": "{bfloat16_mlm_accuracy:.2%}",
}
TRAFFIC = {
    "all-reduce in": "{dtype}",
    "MiB per step": "{all_reduce_mib:,.1f}",
    "command": "`{command}`",
}


def prepare(folder: Path) -> Path:
    """Returns the dataset, prepared if it is missing."""
    text = sorted((data_folder() / "corpus" / "enwiki").glob("*.jsonl.gz"))[0]
    vocabulary = ("--input", text, "--size", VOCABULARY_SIZE)
    return prepare_dataset(folder, text, vocabulary, "--seq_len", 32, "--eval_fraction", 0.01)


def train(folder: Path, dtype: str, seed: int) -> dict[str, float]:
    """Trains from scratch on simulated devices and returns the scores of the last evaluation."""
    from bert_jax.config import load_config
    from bert_jax.training.pretrain import pretrain

    settings = SETTINGS | {
        "data.path": str(prepare(folder)), "gradient_reduce_dtype": dtype, "seed": seed,
        "compilation_cache": str(folder.absolute() / "programs"),
    }  # fmt: skip
    workdir = folder / "runs" / f"{dtype}_{seed}"
    shutil.rmtree(workdir, ignore_errors=True)
    return pretrain(load_config("quickstart", settings), str(workdir))


def compare(folder: Path, seed: int) -> list[dict]:
    """Returns the row of a seed."""
    exact, rounded = (train(folder, dtype, seed) for dtype in TYPES)
    row = {"seed": seed, "mlm_loss_difference": rounded["mlm_loss"] - exact["mlm_loss"]}
    row |= {"unigram_loss": exact["unigram_loss"]}
    for dtype, scores in zip(TYPES, (exact, rounded), strict=True):
        row |= {f"{dtype}_{name}": scores[name] for name in ("mlm_loss", "mlm_accuracy")}
    return [row]


def compile_step(dtype: str) -> list[dict]:
    """Compiles BERT-LARGE's step for TPUs and returns the row of its traffic."""
    command = f"bert-jax compile {COMPILED}" + (f" --config.gradient_reduce_dtype={dtype}" if dtype != TYPES[0] else "")
    (found,) = json.loads(bert_jax(*command.split()[1:], "--json", XLA_FLAGS=""))["phases"]
    reduced = sum(one["bytes"] for one in found["collectives"] if "reduce" in one["kind"])
    return [{"dtype": dtype, "all_reduce_mib": reduced / (1 << 20), "command": command}]


def main() -> None:
    parser = make_parser(__doc__, "gradient_reduction")
    parser.add_argument(
        "--folder", type=Path, default=REPOSITORY / "runs" / "gradient_reduction", help="dataset and runs"
    )
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    options.folder.mkdir(parents=True, exist_ok=True)
    record = Record(options.json, MEASURES, packages=("libtpu",))
    works = {(seed,): partial(compare, options.folder, seed) for seed in SEEDS}
    rows = record.fill("losses", LOSSES, ["seed"], works)
    exact = [row["float32_mlm_loss"] for row in rows]
    record.set_values(
        devices=DEVICES, steps=SETTINGS["total_steps"], batch_size=SETTINGS["global_batch_size"],
        unigram_loss=rows[0]["unigram_loss"], spread_over_seeds=max(exact) - min(exact),
        largest_difference=max(abs(row["mlm_loss_difference"]) for row in rows),
    )  # fmt: skip
    record.fill("traffic", TRAFFIC, ["dtype"], {(dtype,): partial(compile_step, dtype) for dtype in TYPES})
    print(record.render("losses"), record.render("traffic"), sep="\n\n")


if __name__ == "__main__":
    main()
