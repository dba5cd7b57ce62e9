"""A process that is killed, frozen or fails ends the others in time, with a line that says what happened."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import child_processes, helpers
from support.several import SETTINGS, finish, start, start_commands

MANY = {"total_steps": 20_000, "eval_every_steps": 0, "eval_batches": 0, "checkpoint__every_steps": 20}
LIMIT = 120.0  # seconds for the others to end in


def running(dataset: Path, workdir: Path, count: int = 2, **more: object) -> list[subprocess.Popen]:
    """Processes that have made some steps and saved one."""
    processes = start(count, dataset, workdir, **MANY, **more)
    child_processes.wait_until(lambda: helpers.kept_steps(workdir), *processes)
    return processes


def ended(process: subprocess.Popen, status: int) -> str:
    """Returns the stderr of a process, which has to end in time with `status`."""
    began = time.monotonic()
    written = process.communicate(timeout=LIMIT + 60)[1]
    assert process.returncode == status, written
    assert time.monotonic() - began < LIMIT
    return written


def is_said(text: str) -> bool:
    """Returns whether a process says what JAX knows of a lost process, or that a collective has failed."""
    return any(line in text for line in ("JAX distributed service", "a collective failed", "Process 0 has ended"))


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_process_ends_the_others_and_the_run_resumes_with_fewer(
    lost: int, sent: signal.Signals, dataset_dir: Path, tmp_path: Path
):
    processes = running(dataset_dir, tmp_path)
    processes[lost].send_signal(sent)
    began = time.monotonic()
    written = processes[1 - lost].communicate(timeout=LIMIT + 60)[1]
    assert time.monotonic() - began < LIMIT
    assert processes[1 - lost].returncode in (1, -signal.SIGABRT), written
    assert is_said(written), written
    processes[lost].kill()
    processes[lost].communicate()
    saved = helpers.kept_steps(tmp_path)[-1]
    finish(start(1, dataset_dir, tmp_path, **{**MANY, "total_steps": saved + 2}))
    assert [row["step"] for row in helpers.rows(tmp_path)] == list(range(1, saved + 3))


@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.long)])
def test_failure_of_one_process_ends_all_with_its_status(failing: int, dataset_dir: Path, tmp_path: Path):
    paths = [dataset_dir, dataset_dir]
    paths[failing] = tmp_path / "nowhere"
    written = finish(start(2, paths, tmp_path / "run", **MANY), expect=2)
    assert str(paths[failing]) in written[failing].strip().split("\n")[-1]
    other = next(line for line in written[1 - failing].split("\n") if f"Process {failing} ended" in line)
    assert str(paths[failing]) in other
    assert "Traceback" not in "".join(written)


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="requires prlimit")
def test_a_checkpoint_that_one_process_cannot_write_ends_all(dataset_dir: Path, tmp_path: Path):
    """The kernel refuses files of more than 2,000 bytes to one process, as a full disk of one host does."""
    flags = helpers.flags({**SETTINGS, "data.path": dataset_dir, "total_steps": 20_000, "eval_every_steps": 0})
    command = helpers.command("pretrain", "--config=bert_tiny", f"--workdir={tmp_path / 'run'}", *flags)
    began = time.monotonic()
    processes = start_commands([command, ["prlimit", "--fsize=2000", *command]])
    written = [process.communicate(timeout=LIMIT + 60)[1] for process in processes]
    assert time.monotonic() - began < 60
    assert [process.returncode for process in processes] == [1, 1], written
    assert not helpers.kept_steps(tmp_path / "run")
    assert "checkpoint (" in written[0]
    assert os.strerror(errno.EFBIG) in written[1].strip().split("\n")[-1]
    assert "Process 1 ended the run: " in written[0]
    assert "Traceback" not in "".join(written)


TOGETHER = """
import os, sys, time, jax
from bert_jax.errors import InputError
from bert_jax.runtime.processes import joined_processes
number = int(os.environ["JAX_PROCESS_ID"])
with joined_processes():
    BODY
print("done")
"""


def together(body: str, **variables: str) -> list[subprocess.Popen]:
    """Starts two joined processes that run `body`."""
    return start_commands([[sys.executable, "-c", TOGETHER.replace("BODY", body)]] * 2, **variables)


@pytest.mark.parametrize("seconds", [3, pytest.param(80, marks=pytest.mark.long)])
def test_all_wait_for_what_one_process_does_alone_at_the_end(seconds: int):
    """Such as an upload of metrics by process 0. JAX's shutdown aborts those that wait for more than a minute."""
    written = finish(together(f"time.sleep({seconds} if number == 0 else 0)"))
    assert not any("Shutdown barrier" in text or "Traceback" in text for text in written)


def test_processes_that_find_different_checkpoints_end():
    """Cases are the workdir of a run that still saves, and a listing that NFS has cached."""
    body = """from bert_jax.runtime.processes import BertJaxError, check_agreement
    check_agreement("init", "same")
    try:
        check_agreement("step", str(5 + number))
    except BertJaxError as error:
        print(error, file=sys.stderr)"""
    for number, written in enumerate(finish(together(body))):
        assert f"step: {5 + number} here, and another in another process" in written


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_process_ends_the_others_within_seconds(failing: int):
    processes = together(f"if number == {failing}: raise KeyError('broken')\n    time.sleep(600)")
    began = time.monotonic()
    other = ended(processes[1 - failing], 1)
    assert time.monotonic() - began < 60
    assert f"Process {failing} ended the run: 'broken'" in other
    processes[failing].kill()
    processes[failing].communicate()
