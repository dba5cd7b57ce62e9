"""Commands that run while files cannot be read or written, and what they leave."""

import subprocess
from pathlib import Path

from support import helpers, runs

LIMIT = 240
"""Seconds after which a command hangs."""
TRAINING = {**runs.SETTINGS, "total_steps": 8, "checkpoint.every_steps": 4, "optimizer.warmup_steps": 2}
NOT_COMPARED = ("provenance.json", "README.md", "lock")


def last_line(done: subprocess.CompletedProcess, status: int) -> str:
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().split("\n")[-1]


def content(path: Path) -> dict[str, bytes]:
    """Returns the files below a path by name, without those that hold times."""
    paths = path.rglob("*") if path.is_dir() else [path]
    return {
        str(one.relative_to(path)): one.read_bytes() for one in paths if one.is_file() and one.name not in NOT_COMPARED
    }


def vocab(corpus: Path, output: Path) -> list[object]:
    return ["vocab", "--input", corpus, "--output", output, "--size", 120]


def command(name: str, made: Path, dataset: Path, corpus: Path, vocabulary: Path, output: Path) -> list[object]:
    training = helpers.flags({**TRAINING, "data.path": dataset})
    return {
        "vocab": vocab(corpus, output / "tokenizer.json"),
        "prepare": ["prepare", "--input", corpus, "--vocab", vocabulary, "--output", output, "--sentences", "lines"],
        "pretrain": ["pretrain", "--config=bert_tiny", f"--workdir={output}", *training],
        "export": ["export", "--checkpoint", made / "run", "--output", output],
        "import": ["import", "--source", made / "hf", "--output", output],
        "features": ["features", "--layers", "-1", "--checkpoint", made / "run", "--input", made / "lines.txt",
                     "--output", output / "features.jsonl"],
        "predict": ["predict", "--checkpoint", made / "classifier", "--input", made / "task.csv", "--output",
                    output / "predictions.jsonl"],
    }[name]  # fmt: skip


COMMANDS = ("vocab", "prepare", "pretrain", "export", "import", "features", "predict")
