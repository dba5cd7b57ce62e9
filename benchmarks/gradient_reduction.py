"""Compares gradient all-reduces in float32 and in bfloat16: held-out loss of a small BERT, and bytes of BERT-LARGE.

    BERT_JAX_DATA=FOLDER python benchmarks/gradient_reduction.py     # some 10 minutes on two cores

Trains the model of configs/quickstart.py on 8 simulated CPU devices, once per seed and type, and evaluates it on the
whole eval split. FOLDER holds corpus/enwiki/*.jsonl.gz; the first file is used. Then compiles BERT-LARGE's step for
256 chips (requires the tpu-aot extra and no TPU). Each row is written to the JSON as soon as it exists; a run that is
stopped continues with the rows that are missing, then replaces those that are older than the code. Dataset and runs, in
--folder, are kept for the next call. XLA:CPU adds in float32 what it was given in bfloat16, and rounds the sum.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from record import REPOSITORY, Record, add_json_argument

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
    data, vocabulary = folder / "data", folder / "tokenizer.json"
    if "BERT_JAX_DATA" not in os.environ:
        raise SystemExit("BERT_JAX_DATA is not set; set it to the folder that has corpus/enwiki/*.jsonl.gz")
    text = sorted((Path(os.environ["BERT_JAX_DATA"]) / "corpus" / "enwiki").glob("*.jsonl.gz"))[0]
    cli = [sys.executable, "-m", "bert_jax.cli"]
    if not vocabulary.exists():
        size = ["--size", str(VOCABULARY_SIZE)]
        subprocess.run([*cli, "vocab", "--input", text, *size, "--output", vocabulary], check=True)
    if not (data / "dataset.json").exists():
        options = ["--output", data, "--seq_len", "32", "--eval_fraction", "0.01"]
        subprocess.run([*cli, "prepare", "--input", text, "--vocab", vocabulary, *options], check=True)
    return data


def train(folder: Path, dtype: str, seed: int) -> dict[str, float]:
    """Trains from scratch on simulated devices and returns the scores of the last evaluation."""
    from bert_jax.config import load_config
    from bert_jax.training.pretrain import pretrain

    settings = SETTINGS | {
        "data.path": prepare(folder), "gradient_reduce_dtype": dtype, "seed": seed,
        "compilation_cache": folder.absolute() / "programs",
    }  # fmt: skip
    workdir = folder / "runs" / f"{dtype}_{seed}"
    shutil.rmtree(workdir, ignore_errors=True)
    return pretrain(load_config("quickstart", [(key, str(value)) for key, value in settings.items()]), str(workdir))


def compile_step(dtype: str) -> dict:
    """Compiles BERT-LARGE's step for TPUs and returns the row of its traffic."""
    command = f"bert-jax compile {COMPILED}" + (f" --config.gradient_reduce_dtype={dtype}" if dtype != TYPES[0] else "")
    environment = {**os.environ, "XLA_FLAGS": ""}
    words = [sys.executable, "-m", "bert_jax.cli", *command.split()[1:], "--json"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    (found,) = json.loads(done.stdout)["phases"]
    return {
        "dtype": dtype,
        "all_reduce_mib": sum(one["bytes"] for one in found["collectives"] if "reduce" in one["kind"]) / (1 << 20),
        "command": command,
    }


def outdated(keys: Iterable[Any], rows: Mapping[Any, dict], code: str) -> list[Any]:
    """Returns the keys without a row, then those whose row is older than the code."""
    return [key for key in keys if key not in rows] + [key for key in keys if key in rows and rows[key]["code"] != code]


def report(record: Record, losses: Mapping[int, dict], traffic: Mapping[str, dict]) -> None:
    """Records the rows that exist, by seed and by type."""
    if traffic:
        record.set_table("traffic", TRAFFIC, traffic.values())
    if not losses:
        return
    record.set_table("losses", LOSSES, losses.values())
    exact = [row["float32_mlm_loss"] for row in losses.values()]
    record.set_values(
        devices=DEVICES, steps=SETTINGS["total_steps"], batch_size=SETTINGS["global_batch_size"], seeds=len(losses),
        unigram_loss=next(iter(losses.values()))["unigram_loss"], spread_over_seeds=max(exact) - min(exact),
        largest_difference=max(abs(row["mlm_loss_difference"]) for row in losses.values()),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=REPOSITORY / "runs" / "gradient_reduction", help="dataset and runs"
    )
    add_json_argument(parser, "gradient_reduction")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    options.folder.mkdir(parents=True, exist_ok=True)
    record = Record(options.json, MEASURES, packages=("libtpu",))
    stamp = record.stamp
    losses = {row["seed"]: row for row in record.earlier("losses")}
    traffic = {row["dtype"]: row for row in record.earlier("traffic")}
    report(record, losses, traffic)
    for seed in outdated(SEEDS, losses, stamp["code"]):
        scores = {dtype: train(options.folder, dtype, seed) for dtype in TYPES}
        losses[seed] = stamp | {
            "seed": seed,
            **{
                f"{dtype}_{name}": scores[dtype][name]
                for dtype in TYPES
                for name in ("mlm_loss", "mlm_accuracy", "nsp_accuracy")
            },
            "mlm_loss_difference": scores["bfloat16"]["mlm_loss"] - scores["float32"]["mlm_loss"],
            "unigram_loss": scores["float32"]["unigram_loss"],
        }
        report(record, losses, traffic)
    for dtype in outdated(TYPES, traffic, stamp["code"]):
        traffic[dtype] = compile_step(dtype) | stamp
        report(record, losses, traffic)
    print(record.render("losses"), record.render("traffic"), sep="\n\n")


if __name__ == "__main__":
    main()
