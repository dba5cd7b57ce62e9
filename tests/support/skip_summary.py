"""Pytest plugin that lists, after a test run, the skipped tests and the commands that run them."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

PIP = ".venv/bin/python -m pip install --editable"
COMMANDS = (  # part of a skip reason, and the command that runs the tests
    (r"\b(torch|transformers)\b", f"{PIP} '.[parity]'"),
    (r"\btensorflow\b", f"{PIP} '.[tf]'"),
    (r"\bflatbuffers\b", f"{PIP} '.[stablehlo]'"),
    (r"\b(apache_beam|pyarrow)\b", f"{PIP} '.[beam]'"),
    (r"\blibtpu\b|\btpu-aot\b", f"{PIP} '.[tpu-aot]'"),
    (r"\b(seqeval|sklearn|scipy|shellcheck)\b|\bdev extra\b", f"{PIP} '.[dev]'"),
    (r"\b(myst_nb|sphinx_book_theme)\b|\bdocs extra\b", f"{PIP} '.[docs]'"),
    (r"\bwandb\b", f"{PIP} '.[wandb]'"),
    (r"\bchromium\b", "apt-get install chromium"),
    (r"\bBERT_JAX_DATA\b", "BERT_JAX_DATA=FOLDER make test"),
    (r"\bgcloud\b", "install Google Cloud's SDK: https://cloud.google.com/sdk"),
)
MARKERS = {"long": "make test-long", "slurm": "make test-slurm"}
"""Markers of tests that `make test` does not select, and the command that does."""

_DESELECTED = pytest.StashKey[Counter]()


def find_command(reason: str) -> str:
    """Returns the command for a skip reason; "" if the machine cannot run the test."""
    return next((command for pattern, command in COMMANDS if re.search(pattern, reason)), "")


def summarize(reports: Iterable[pytest.TestReport | pytest.CollectReport]) -> list[str]:
    """Returns a line for each command: the number of skips, their reasons, and the command.

    A module that skips as a whole is one skip; xdist reports it once a worker.
    """
    skips = set()
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, (tuple, list)) else str(report.longrepr)
        skips.add((report.nodeid, reason.removeprefix("Skipped: ")))
    by_command: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, reason in sorted(skips):
        by_command[find_command(reason) or reason].append((name, reason))
    lines = []
    for command, found in sorted(by_command.items()):
        reasons = sorted({reason for _, reason in found})
        lines.append(_line(len(found), "; ".join(reasons), "" if reasons == [command] else command))
    return lines


def _line(count: int, reasons: str, command: str) -> str:
    return f"{count:>5}  {reasons}" + (f": {command}" if command else "")


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Counts the tests that the marker expression deselects."""
    for item in items:
        counts = item.config.stash.setdefault(_DESELECTED, Counter())
        counts.update(marker for marker in MARKERS if item.get_closest_marker(marker))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Sends a worker's counts to the main process."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deselected"] = dict(session.config.stash.get(_DESELECTED, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Receives the counts of an xdist worker; each worker has collected every test."""
    counts = getattr(node, "workeroutput", {}).get("deselected", {})
    node.config.stash[_DESELECTED] = Counter(counts) or node.config.stash.get(_DESELECTED, Counter())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints the skipped tests by the command that runs them."""
    lines = summarize(terminalreporter.stats.get("skipped", []))
    if not config.option.keyword:  # which deselects tests, too
        deselected = config.stash.get(_DESELECTED, Counter())
        lines += [_line(count, f"marked {marker}", MARKERS[marker]) for marker, count in sorted(deselected.items())]
    if lines:
        terminalreporter.section("not run", sep="-")
    for line in lines:
        terminalreporter.line(line)
