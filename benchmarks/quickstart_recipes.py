"""Compares recipes for the quickstart: held-out scores after about equal CPU seconds of training.

    python benchmarks/quickstart_recipes.py                 # some 15 CPU minutes; --only NAME runs one recipe

All recipes see the corpus of launch/quickstart.sh, and all but "quickstart" from 1 to 1.4 million tokens; "quickstart"
is the config itself. Each is evaluated on the whole eval split of its dataset. CPU seconds are those of the training
steps on all cores, without compilation; those of "quickstart" include its evaluations. Datasets, in --folder, are kept
for the next call.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from record import REPOSITORY, Record, add_json_argument

PACKAGES = ("python", "numpy", "scipy", "matplotlib")  # as in launch/quickstart.sh
VOCABULARY_SIZE = 2048
PREPARE = ("--eval_fraction", "0.05", "--max_line_repeats", "1")
MEASURES = (
    "bert_jax/data/loading", "bert_jax/model", "bert_jax/training/objectives.py",
    "bert_jax/training/optimizer.py", "bert_jax/training/train_step.py",
    "configs/bert_tiny.py", "configs/quickstart.py",
)  # fmt: skip

SHORT = {
    "model.hidden_act": "gelu_new", "model.max_position_embeddings": 128, "model.num_attention_heads": 4,
    "optimizer.b2": 0.98, "optimizer.warmup_steps": 200,
}  # fmt: skip
ONE_LAYER = SHORT | {"global_batch_size": 16, "total_steps": 2800, "model.num_hidden_layers": 1}
RECIPES: dict[str, tuple[int, dict[str, Any]]] = {  # tokens per sequence, and what differs from bert_tiny
    "128 tokens": (128, SHORT | {"global_batch_size": 16, "total_steps": 500, "optimizer.warmup_steps": 50}),
    "32 tokens": (32, SHORT | {"global_batch_size": 16, "total_steps": 2000}),
    "32 tokens, batches of 64": (
        32, SHORT | {"global_batch_size": 64, "total_steps": 500, "optimizer.warmup_steps": 50}
    ),
    "32 tokens, 25% masked": (32, SHORT | {"global_batch_size": 16, "total_steps": 2000, "objective.mask_rate": 0.25}),
    "32 tokens, 1 layer": (32, ONE_LAYER),
    "32 tokens, 1 layer, 25% masked": (32, ONE_LAYER | {"objective.mask_rate": 0.25}),
    "32 tokens, 1 layer, 40% masked": (32, ONE_LAYER | {"objective.mask_rate": 0.4}),
    "16 tokens": (16, SHORT | {"global_batch_size": 32, "total_steps": 2000}),
}  # fmt: skip

COLUMNS = {
    "recipe": "{recipe}",
    "steps": "{steps:,}",
    "million tokens": "{million_tokens:.1f}",
    "CPU seconds": "{cpu_seconds:.0f}",
    "MLM loss": "{mlm_loss:.2f}",
    "unigram baseline": "{unigram_loss:.2f}",
    "nats under it": "{nats_under:.2f}",
    "MLM accuracy": "{mlm_accuracy:.1%}",
    "NSP accuracy": "{nsp_accuracy:.1%}",
}


class CpuClock:
    """Progress bars that read the process's CPU seconds at the first and the last training step."""

    def __init__(self) -> None:
        self.first = self.last = 0.0
        self.training = False

    def __call__(self, desc: str = "", **options: Any) -> "CpuClock":
        return self if desc == "pretrain" else CpuClock()

    def update(self, n: float = 1) -> None:
        self.last = time.process_time()
        self.first = self.first or self.last

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None: ...
    def unpause(self) -> None: ...
    def close(self) -> None: ...


def prepare(folder: Path, seq_len: int) -> Path:
    """Returns the dataset of `seq_len` tokens, prepared if it is missing."""
    text, vocabulary, data = folder / "text", folder / "tokenizer.json", folder / f"data{seq_len}"
    cli = [sys.executable, "-m", "bert_jax.cli"]
    if not vocabulary.exists():
        subprocess.run([sys.executable, REPOSITORY / "launch" / "python_docs.py", text, *PACKAGES], check=True)
        size = ["--size", str(VOCABULARY_SIZE)]
        subprocess.run([*cli, "vocab", "--input", text, *size, "--output", vocabulary], check=True)
    if not (data / "dataset.json").exists():
        options = ["--output", data, "--seq_len", str(seq_len), *PREPARE]
        subprocess.run([*cli, "prepare", "--input", text, "--vocab", vocabulary, *options], check=True)
    return data


def train(folder: Path, name: str) -> dict:
    """Trains a recipe from scratch and returns its row."""
    from bert_jax.config import load_config
    from bert_jax.training.pretrain import pretrain

    if name == "quickstart":
        config = load_config("quickstart", [("data.path", str(prepare(folder, 32)))])
    else:
        seq_len, changes = RECIPES[name]
        changes = changes | {
            "data.path": prepare(folder, seq_len), "data.seq_len": seq_len, "eval_every_steps": 0, "eval_batches": -1,
            "checkpoint.every_steps": 1_000_000, "log_every_steps": 100,
        }  # fmt: skip
        config = load_config("bert_tiny", [(key, str(value)) for key, value in changes.items()])
    workdir = folder / "runs" / name.replace(" ", "_").replace(",", "")
    shutil.rmtree(workdir, ignore_errors=True)
    clock = CpuClock()
    scores = pretrain(config, str(workdir), bars=clock)
    tokens = config.total_steps * config.global_batch_size * config.data.seq_len
    return {
        "recipe": name,
        "steps": config.total_steps,
        "million_tokens": tokens / 1e6,
        "cpu_seconds": clock.last - clock.first,
        "nats_under": scores["unigram_loss"] - scores["mlm_loss"],
        **{key: scores[key] for key in ("mlm_loss", "unigram_loss", "mlm_accuracy", "nsp_accuracy")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*RECIPES, "quickstart"], help="one recipe; the others keep their rows")
    parser.add_argument(
        "--folder", type=Path, default=REPOSITORY / "runs" / "quickstart_recipes", help="datasets and runs"
    )
    add_json_argument(parser, "quickstart_recipes")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    options.folder.mkdir(parents=True, exist_ok=True)
    record = Record(options.json, MEASURES)
    for name in [options.only] if options.only else [*RECIPES, "quickstart"]:
        row = train(options.folder, name) | record.stamp
        rows = {row["recipe"]: row for row in record.earlier("recipes")} | {name: row}
        record.set_table("recipes", COLUMNS, [rows[key] for key in (*RECIPES, "quickstart") if key in rows])
    print(record.render("recipes"))


if __name__ == "__main__":
    main()
