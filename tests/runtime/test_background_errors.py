"""Errors in background threads are seen, but for those that are raised again elsewhere."""

import logging
import sys
import threading
from collections.abc import Callable, Iterator

import orbax.checkpoint as ocp
import pytest

from bert_jax.runtime.interpreter import show_background_errors


@pytest.fixture
def hooks() -> Iterator[None]:
    before = threading.excepthook, sys.unraisablehook, sys.excepthook
    levels = {name: logging.getLogger(name).level for name in ("absl", "asyncio")}
    show_background_errors()
    yield
    threading.excepthook, sys.unraisablehook, sys.excepthook = before
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def shown(fail: Callable[[], object], caplog: pytest.LogCaptureFixture) -> list[str]:
    thread = threading.Thread(target=fail, name="watched")
    thread.start()
    thread.join()
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_error_that_ends_a_thread_is_logged(hooks: None, caplog: pytest.LogCaptureFixture):
    (line,) = shown(lambda: 1 // 0, caplog)
    assert "watched" in line
    assert "ZeroDivisionError" in line


def test_error_that_orbax_reraises_is_not_logged(hooks: None, caplog: pytest.LogCaptureFixture):
    assert shown(lambda: ocp.args.Composite(**{"a": 1})["b"], caplog) == []
