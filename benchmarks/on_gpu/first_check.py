"""Check of the machine by `bert-jax check`, in a process of its own that writes into the benchmark's work folder."""

import json
from pathlib import Path

from on_gpu.cases import Cases
from processes import bert_jax

COLUMNS = {"part": "{case}", "outcome": "{outcome}", "result": "{message}"}


def check(cases: Cases, work: Path) -> None:
    """Runs the check once, and measures each of its parts as a case."""
    for name, message in json.loads(bert_jax("check", "--json", f"--workdir={work}")).items():
        cases.measure(name, lambda message=message: {"message": message})
