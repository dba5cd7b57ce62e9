"""Commands that run while files cannot be read or written."""

import subprocess
from pathlib import Path

from support import runs

LIMIT = 240
"""Seconds after which a command hangs."""
TRAINING = {**runs.SETTINGS, "total_steps": 8, "checkpoint.every_steps": 4, "optimizer.warmup_steps": 2}


def last_line(done: subprocess.CompletedProcess, status: int) -> str:
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().split("\n")[-1]


def vocab(corpus: Path, output: Path) -> list[object]:
    return ["vocab", "--input", corpus, "--output", output, "--size", 120]
