"""Check of the machine by `bert-jax check`, in a process of its own that writes into the benchmark's work folder."""

import json
import subprocess
import sys
from pathlib import Path

from on_gpu.cases import Cases

COLUMNS = {"part": "{case}", "outcome": "{outcome}", "result": "{message}"}


def check(cases: Cases, work: Path) -> None:
    """Runs the check once, and measures each of its parts as a case."""
    done = subprocess.run(
        [sys.executable, "-m", "bert_jax.cli", "check", "--json", f"--workdir={work}"],
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"bert-jax check ended with status {done.returncode}")
    for name, message in json.loads(done.stdout).items():
        cases.measure(name, lambda message=message: {"message": message})
