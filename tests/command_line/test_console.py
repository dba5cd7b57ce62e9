"""Log lines and progress on stderr."""

import io
import logging
import re
import sys
from collections.abc import Iterator

import pytest

from bert_jax.command_line import console
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


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device")])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_that_cannot_be_written_are_lost(error: OSError, is_terminal: bool, logger, monkeypatch):
    class Ended(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    stderr = Ended()
    stderr.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stderr", stderr)
    logger.info("Step 7")
    with pytest.raises(OSError, match=error.strerror):
        print("Step 7", file=sys.stderr)


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


@pytest.mark.parametrize(
    ("columns", "shown", "cut"),
    [
        (30, ["pretrain", "12%", "184/1500"], ["nsp", "#"]),
        (70, ["184/1500 step", "left", "mlm 6.220 (4%)"], ["12,345"]),
        (150, ["mlm 6.220 (4%)", "nsp 0.693 (50%)", "12,345 tok/s", "#"], []),
    ],
)
def test_bar_shows_what_is_worth_most_in_its_width(columns: int, shown: list[str], cut: list[str], monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = console.bars()(total=1500, desc="pretrain", unit="step", ncols=columns, dynamic_ncols=False, ascii=True)
    bar.set_postfix_str("mlm 6.220 (4%)  nsp 0.693 (50%)  12,345 tok/s  loss 6.912")
    bar.update(184)
    line = str(bar)
    bar.close()
    assert len(line) <= columns
    assert [part for part in shown if part not in line] == []
    assert [part for part in cut if part in line] == []


def test_lines_of_metrics_are_not_written_to_a_terminal(logger, capsys: pytest.CaptureFixture, monkeypatch):
    logger.info("step 1/2", extra={"on_bar": True})
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    logger.info("step 2/2", extra={"on_bar": True})
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == ["1/2"]


def test_quiet_shows_errors_alone(logger, capsys: pytest.CaptureFixture):
    console.set_up_logging(quiet=True)
    logger.warning("Step 7")
    logger.error("Step 8")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("Step 8")


def test_progress_is_a_bar_on_a_terminal(capsys: pytest.CaptureFixture, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = console.bars()(total=4, desc="pretrain", unit="step")
    bar.update(4)
    bar.close()
    written = capsys.readouterr().err
    assert "100%" in written
    assert "INFO" not in written
