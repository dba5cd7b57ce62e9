"""Processes that tests start, each of which ends with its test: when it fails or times out, too.

A child leads a group of its own. What it starts may leave the group, as `setsid` and servers do, but not without the
environment, which carries the number of the test's own.
"""

import contextlib
import itertools
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_MARK = "BERT_JAX_TESTS_CHILD"
_numbers = itertools.count()
_number = ""  # of the test that runs; "" where none has started anything
_started: list[subprocess.Popen] = []


def start(command: list, **options: object) -> subprocess.Popen:
    """`subprocess.Popen`, for a process that `end_all` ends if the test has not."""
    global _number
    _number = _number or f"{os.getpid()}-{next(_numbers)}"
    environment = {**(options.pop("env", None) or os.environ), _MARK: _number}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **options)
    _started.append(process)
    return process


def run(command: list, *, timeout: float, **options: object) -> subprocess.CompletedProcess:
    """`subprocess.run` with its output captured as text; past `timeout` seconds the whole group is killed."""
    process = start(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException:
        end_all()
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


@pytest.fixture(autouse=True)
def ends_what_it_starts() -> Iterator[None]:
    """Ends what a test has started and is still there."""
    yield
    end_all()


def end_all() -> None:
    """Kills what the test has started and is still there, children of children included."""
    global _number
    if not _number:
        return
    for process in _started:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for pid in _marked(f"{_MARK}={_number}".encode()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in _started:
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    _started.clear()
    _number = ""


def _marked(entry: bytes) -> list[int]:
    """Process ids whose environment has `entry`; none where there is no /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if entry in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found
