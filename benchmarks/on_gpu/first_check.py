"""Check of the machine by `bert-jax check`, in a process of its own that writes into the benchmark's work folder."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from on_gpu.cases import Cases

COLUMNS = {"part": "{case}", "outcome": "{outcome}", "seconds": "{part_seconds:.1f}", "result": "{message}"}


def check(cases: Cases, work: Path) -> None:
    """Runs the check once, and measures each of its parts as a case; a failed part is a failed case."""
    done = subprocess.run(
        [sys.executable, "-m", "bert_jax.cli", "check", "--json", f"--workdir={work}"],
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if not done.stdout:
        raise RuntimeError(f"bert-jax check ended with status {done.returncode} and no result")
    for part in json.loads(done.stdout)["parts"]:
        cases.measure(part["name"], lambda part=part: _row(part))


def _row(part: dict[str, Any]) -> dict[str, Any]:
    if not part["ok"]:
        raise RuntimeError(part["message"])
    return {"part_seconds": part["seconds"], "message": part["message"]}
