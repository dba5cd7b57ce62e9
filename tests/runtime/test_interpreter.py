"""Errors in background threads are seen, but for those that are raised again elsewhere."""

import logging
import sys
import threading
from collections.abc import Callable, Iterator

import orbax.checkpoint as ocp
import pytest
from support import helpers

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


# --- Memory ------------------------------------------------------------------------------------------------------


PROGRAM = """
import resource, sys
from bert_jax.runtime.interpreter import tune_malloc

if sys.argv[1] == "keep":
    tune_malloc()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * (int(sys.argv[2]) << 20)  # freed at once
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
@pytest.mark.parametrize("megabytes", [64, pytest.param(2200, marks=pytest.mark.long)])
def test_reallocation_costs_no_page_faults(megabytes: int):
    assert int(helpers.run_python(PROGRAM, "leave", megabytes)) > 1000  # of 16,384 pages, where they are 4 KB
    assert int(helpers.run_python(PROGRAM, "keep", megabytes)) < 100
