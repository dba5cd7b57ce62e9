"""Log lines and progress on stderr."""

import logging
import re
import sys
from collections.abc import Iterator

import pytest

from bert_jax import console
from bert_jax.runtime import processes

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    package = logging.getLogger("bert_jax")
    before = package.handlers, package.level, package.propagate
    console.set_up_logging()
    yield package
    package.handlers, package.propagate = before[0], before[2]
    package.setLevel(before[1])


def test_line_has_time_and_level(logger: logging.Logger, capsys: pytest.CaptureFixture):
    logger.getChild("training").warning("Step %d", 7)
    assert re.fullmatch(rf"{TIME} WARNING Step 7\n", capsys.readouterr().err)


def test_line_of_one_of_several_processes_has_its_index(logger, capsys: pytest.CaptureFixture, monkeypatch):
    monkeypatch.setattr(processes, "joined", lambda: (3, 8))
    logger.info("Step 7")
    assert re.fullmatch(rf"{TIME} INFO \[3/8\] Step 7\n", capsys.readouterr().err)


def test_progress_is_log_lines_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture):
    bar = console.bars()(total=4, initial=1, desc="pretrain", unit="step", mininterval=0)
    for step in range(2, 5):
        bar.set_postfix_str(f"loss {step}")
        bar.update(1)
    bar.close()
    first, *_, last = lines = capsys.readouterr().err.splitlines()
    assert all(re.match(rf"{TIME} INFO pretrain: ", line) for line in lines)
    assert re.search(r"2 of 4 step .*loss 2", first)
    assert re.search(r"4 of 4 step .*loss 4", last)
    assert len(lines) == 3


def test_progress_is_a_bar_on_a_terminal(capsys: pytest.CaptureFixture, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = console.bars()(total=4, desc="pretrain", unit="step")
    bar.update(4)
    bar.close()
    written = capsys.readouterr().err
    assert "100%" in written
    assert "INFO" not in written
