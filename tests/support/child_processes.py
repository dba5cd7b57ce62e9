"""Child processes of tests, which are ended with their test, even if it fails or times out.

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
_number = ""  # of the running test; "" if it has started no process
_started: list[subprocess.Popen] = []


def start(command: list, **options: object) -> subprocess.Popen:
    """Starts a process with `subprocess.Popen`; `end_all` ends it if the test has not."""
    global _number
    _number = _number or f"{os.getpid()}-{next(_numbers)}"
    environment = {**(options.pop("env", None) or os.environ), _MARK: _number}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **options)
    _started.append(process)
    return process


def run(command: list, *, timeout: float, **options: object) -> subprocess.CompletedProcess:
    """Runs a command with captured text output; kills its process group after `timeout` seconds."""
    process = start(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException:
        end_all()
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


@pytest.fixture(autouse=True)
def ends_what_it_starts() -> Iterator[None]:
    """Ends the processes of a test that are still running."""
    yield
    end_all()


def end_all() -> None:
    """Kills the running processes of the test, with all descendants."""
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
    """Returns ids of processes whose environment contains `entry`; none without /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if entry in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found
