"""Child processes of tests, which are ended with their test, even if it fails or times out.

A child leads a group of its own.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

_started: list[subprocess.Popen] = []  # by the running test


def start(command: list, **options: object) -> subprocess.Popen:
    """Starts a process with `subprocess.Popen`; `end_all` ends it if the test has not."""
    process = subprocess.Popen(command, start_new_session=True, **options)
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


def wait_until(is_time: Callable[[], object], *processes: subprocess.Popen, seconds: float = 200) -> None:
    """Waits while the processes run, and fails if one of them ends or after `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_time():
        for process in processes:
            assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def ends_what_it_starts() -> Iterator[None]:
    """Ends the processes of a test that are still running."""
    yield
    end_all()


def end_all() -> None:
    """Kills the running processes of the test, with their groups."""
    for process in _started:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    _started.clear()
