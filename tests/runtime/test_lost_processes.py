"""A process that is killed, frozen or fails ends the others in time, with a line that says what happened."""

import functools
import json
import logging
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from etils import epath
from support.several import finish, start

from bert_jax.errors import BertJaxError
from bert_jax.runtime import processes
from bert_jax.runtime.first_process import FirstProcessWatch
from bert_jax.runtime.heartbeats import RESTART_ADVICE, Peers
from bert_jax.runtime.ticker import Ticker
from bert_jax.tracking.metrics import read_metrics
from bert_jax.training.checkpointing.checkpoints import newest_step

MANY = {"total_steps": 20_000, "eval_every_steps": 0, "eval_batches": 0, "checkpoint__every_steps": 20}
LIMIT = 120.0  # seconds for the others to end in


def running(dataset: Path, workdir: Path, count: int = 2, **more: object) -> list[subprocess.Popen]:
    """Processes that have made some steps and saved one."""
    processes = start(count, dataset, workdir, **MANY, **more)
    deadline = time.monotonic() + 200
    while newest_step(epath.Path(workdir)) is None:
        for process in processes:
            assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return processes


def ended(process: subprocess.Popen, status: int) -> str:
    """Returns the stderr of a process, which has to end in time with `status`."""
    began = time.monotonic()
    written = process.communicate(timeout=LIMIT + 60)[1]
    assert process.returncode == status, written
    assert time.monotonic() - began < LIMIT
    return written


@pytest.mark.long
def test_killed_process_ends_the_others_and_the_run_resumes_with_fewer(dataset_dir: Path, tmp_path: Path):
    first, second = running(dataset_dir, tmp_path)
    second.kill()
    line = next(line for line in ended(first, 1).split("\n") if "Process 1 (" in line)
    assert f"pid {second.pid})" in line
    assert RESTART_ADVICE in line
    second.communicate()
    saved = int(newest_step(epath.Path(tmp_path)).name)
    finish(start(1, dataset_dir, tmp_path, **{**MANY, "total_steps": saved + 2}))
    assert [row["step"] for row in read_metrics(epath.Path(tmp_path))] == list(range(1, saved + 3))


@pytest.mark.long
def test_without_the_first_process_the_others_end(dataset_dir: Path, tmp_path: Path):
    first, second = running(dataset_dir, tmp_path)
    first.kill()
    line = next(line for line in ended(second, 1).split("\n") if "Process 0 " in line)
    assert RESTART_ADVICE in line
    first.communicate()


@pytest.mark.long
@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_process_counts_as_lost_and_ends_when_resumed(frozen: int, dataset_dir: Path, tmp_path: Path):
    processes = running(dataset_dir, tmp_path)
    processes[frozen].send_signal(signal.SIGSTOP)
    try:
        ended(processes[1 - frozen], 1)
    finally:
        processes[frozen].send_signal(signal.SIGCONT)
    ended(processes[frozen], 1)


@pytest.mark.long
def test_stall_is_reported_by_every_process_and_the_run_continues(dataset_dir: Path, tmp_path: Path):
    processes = running(dataset_dir, tmp_path, stall_minutes=4 / 60)
    shutil.rmtree(tmp_path / "stalls", ignore_errors=True)  # compiling may have taken as long
    processes[1].send_signal(signal.SIGSTOP)  # for less than it takes to count as lost
    time.sleep(10)
    processes[1].send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 60
    while len(reports := sorted(path.name for path in (tmp_path / "stalls").glob("*.txt"))) < 2:
        assert time.monotonic() < deadline, reports
        time.sleep(0.1)
    before = read_metrics(epath.Path(tmp_path))[-1]["step"]
    while read_metrics(epath.Path(tmp_path))[-1]["step"] < before + 5:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    processes[0].send_signal(signal.SIGTERM)
    written = finish(processes, expect=75)
    assert {name.rsplit("-", 1)[-1] for name in reports} == {"0.txt", "1.txt"}
    assert all("thread MainThread:" in text for text in written)


@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.long)])
def test_failure_of_one_process_ends_all_with_its_status(failing: int, dataset_dir: Path, tmp_path: Path):
    paths = [dataset_dir, dataset_dir]
    paths[failing] = tmp_path / "nowhere"
    written = finish(start(2, paths, tmp_path / "run", **MANY), expect=2)
    assert str(paths[failing]) in written[failing].strip().split("\n")[-1]
    other = next(line for line in written[1 - failing].split("\n") if f"Process {failing} (" in line)
    assert str(paths[failing]) in other
    assert "Traceback" not in "".join(written)


PATIENCE = 2.0  # seconds of a stand-in without heartbeats before it counts as lost


class MemoryStore:
    """A stand-in for the store of JAX's coordination service, for processes that are threads."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.looks = 0

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        if key in self.kept and not allow_overwrite:
            raise RuntimeError("ALREADY_EXISTS")
        self.kept[key] = value

    def key_value_try_get(self, key: str) -> str:
        if key not in self.kept:
            raise RuntimeError("NOT_FOUND")
        return self.kept[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        self.looks += 1
        return [(name, value) for name, value in list(self.kept.items()) if name.startswith(key)]


def watching(store: MemoryStore, count: int, ends: dict[int, int]) -> list[Peers]:
    def leave(number: int) -> object:
        return lambda status: ends.setdefault(number, status)

    times = {"every": 0.02, "patience": PATIENCE, "linger": 8.0}
    return [Peers(store, number, count, leave=leave(number), **times) for number in range(count)]


def wait_for(condition: object) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_all_processes_exit_with_the_status_of_the_first_failure():
    store, ends = MemoryStore(), {}
    peers = watching(store, 3, ends)
    peers[1].report(2, "ended the run: no such file")
    peers[2].report(1, "ended the run: a collective failed")
    assert json.loads(store.kept["bert_jax/failure"])["status"] == 2
    wait_for(lambda: 0 in ends)
    assert ends[0] == 2
    peers[0].close()


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_failed_collective_ends_a_process_as_its_cause_does(is_reported: bool, monkeypatch, caplog):
    """A collective fails at once where the others have ended; the reason is known some seconds later."""
    store, ends = MemoryStore(), {}
    times = {"every": 0.2, "patience": PATIENCE, "linger": 0.1}
    other = Peers(store, 1, 2, leave=lambda status: None, **times)
    monkeypatch.setattr(processes, "_join", lambda environment: store)
    monkeypatch.setattr(
        processes, "Peers", functools.partial(Peers, leave=lambda status: ends.setdefault(0, status), **times)
    )
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "_joined", None)
    monkeypatch.setattr(processes, "_is_reported", False)
    if is_reported:
        other.report(75, "ended the run: SIGTERM: stopped before step 1")
    else:
        other._ticker.close()  # killed
    with pytest.raises(BertJaxError, match="Gloo"), processes.joined_processes({}):
        raise jax.errors.JaxRuntimeError("Gloo all-reduce failed")
    assert ends == {0: 75 if is_reported else 1}
    assert "Process 1 (" in caplog.text


def test_finished_process_is_not_lost():
    ends: dict[int, int] = {}
    store = MemoryStore()
    peers = watching(store, 2, ends)
    peers[1].close()
    closed, end = store.looks, time.monotonic() + 2 * PATIENCE
    wait_for(lambda: time.monotonic() > end and store.looks > closed + 2)
    assert not ends
    peers[0].close()


def test_a_silent_process_is_lost(caplog: pytest.LogCaptureFixture):
    ends: dict[int, int] = {}
    peers = watching(MemoryStore(), 3, ends)
    peers[2]._ticker.close()
    wait_for(lambda: len(ends) == 2)
    assert ends == {0: 1, 1: 1}
    assert "Process 2 (" in caplog.text
    for peer in peers:
        peer.close()


def test_a_process_that_was_stopped_for_long_ends_at_once(caplog: pytest.LogCaptureFixture):
    """It must not write what is in its buffers: the others have ended, and another run may be in the workdir."""
    store, ends = MemoryStore(), {}
    (peer,) = watching(store, 1, ends)
    peer._ticker.close()
    peer._watched_at -= 2 * PATIENCE
    peer._watch()
    assert ends == {0: 1}
    assert RESTART_ADVICE in caplog.text


def test_process_0_that_hears_nobody_waits_for_nobody(caplog: pytest.LogCaptureFixture):
    """It is cut off: none of the others can read its report, and JAX would abort it meanwhile."""
    store, ends = MemoryStore(), {}
    first, *others = watching(store, 4, ends)
    for other in others:
        other._ticker.close()
    began = time.monotonic()
    wait_for(lambda: 0 in ends)
    assert time.monotonic() - began < PATIENCE + 6, "not the seconds that it gives others to read the report"
    assert ends == {0: 1}
    first._ticker.close()


@pytest.mark.parametrize(("number", "ends_itself"), [(0, True), (1, False)])
def test_process_0_gives_way_where_the_others_may_count_it_as_lost(number: int, ends_itself: bool):
    """Their count begins at the last answer, up to a heartbeat before it was stopped."""
    ends: dict[int, int] = {}
    peers = watching(MemoryStore(), 2, ends)
    for peer in peers:
        peer._ticker.close()
    peers[number]._watched_at -= PATIENCE
    peers[number]._watch()
    assert (number in ends) == ends_itself


def watch_first(address: tuple[str, int], silence: float = 0.0) -> tuple[FirstProcessWatch, list[int]]:
    ends: list[int] = []
    watch = FirstProcessWatch(
        f"{address[0]}:{address[1]}", lambda: silence, patience=30.0, advice="start again", leave=ends.append
    )
    return watch, ends


def test_closed_port_of_process_0_ends_the_others_at_once(caplog: pytest.LogCaptureFixture):
    server = socket.create_server(("127.0.0.1", 0))
    watch, ends = watch_first(server.getsockname())
    first, _ = server.accept()
    first.close()  # as the service does with a connection on which nothing is asked
    second, _ = server.accept()
    assert ends == []
    began = time.monotonic()
    server.close()
    second.close()
    wait_for(lambda: ends)
    assert ends == [1]
    assert time.monotonic() - began < 2
    assert "Process 0 " in caplog.text
    watch.close()


def test_abort_for_another_reason_ends_with_sigabrt():
    """The abort is delayed, so that a line about process 0 comes first if that is the reason."""
    script = """
import os, socket
from bert_jax.runtime.first_process import FirstProcessWatch
server = socket.create_server(("127.0.0.1", 0))
watch = FirstProcessWatch("127.0.0.1:%d" % server.getsockname()[1], lambda: 0.0, patience=30.0, advice="")
os.abort()
"""
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == -signal.SIGABRT
    assert ended.stderr == ""
    assert time.monotonic() - began > 5


def test_a_silent_first_process_ends_the_others():
    with socket.create_server(("127.0.0.1", 0)) as server:  # whose system accepts, as for a frozen process
        watch, ends = watch_first(server.getsockname(), silence=31.0)
        wait_for(lambda: ends)
    assert ends == [1]
    watch.close()


@pytest.mark.parametrize(
    ("error", "tracebacks"), [(KeyError("of a type that nobody expects"), 1), (OSError("full"), 0)]
)
def test_failed_periodic_action_is_logged_and_called_again(
    error: Exception, tracebacks: int, caplog: pytest.LogCaptureFixture
):
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise error

    ticker = Ticker(fail, 0.01, "watched")
    wait_for(lambda: len(calls) >= 3)
    ticker.close()
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) >= 2
    assert all("watched" in record.getMessage() and type(error).__name__ in record.getMessage() for record in errors)
    assert sum(record.exc_info not in (None, False) for record in errors) == tracebacks
