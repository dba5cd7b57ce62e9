"""One run at a time writes in a workdir."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import child_processes
import helpers
import pytest
from etils import epath
from gcs import Emulator
from runs import train_command

from bert_jax.errors import BertJaxError, InputError
from bert_jax.training.lease import LEASE_FILE, Lease


def take(folder: Path, **times: float) -> Lease:
    return Lease(epath.Path(folder), **{"renew": 0.05, "stale": 0.4, **times})


def holder(folder: Path) -> dict[str, object]:
    return json.loads((folder / LEASE_FILE).read_text())


def leave_behind(folder: Path, **changed: object) -> None:
    """The lease of a run that was killed."""
    lease = take(folder)
    left = {**holder(folder), **changed}
    lease.close()
    (folder / LEASE_FILE).write_text(json.dumps(left))


def test_a_workdir_in_use_is_refused_with_host_and_process_and_free_afterwards(tmp_path: Path):
    lease = take(tmp_path)
    with pytest.raises(InputError, match=f"in use by another run, process {os.getpid()} on {os.uname().nodename}"):
        take(tmp_path)
    lease.check()
    lease.close()
    assert not list(tmp_path.iterdir())
    take(tmp_path).close()


def test_a_lease_of_a_dead_process_of_this_machine_is_taken_at_once(tmp_path: Path):
    dead = child_processes.start([sys.executable, "-c", ""])
    dead.wait()
    leave_behind(tmp_path, pid=dead.pid)
    began = time.monotonic()
    take(tmp_path, stale=60.0).close()
    assert time.monotonic() - began < 5


def test_a_process_id_that_is_used_again_is_not_the_run(tmp_path: Path):
    leave_behind(tmp_path, started="1")
    take(tmp_path, stale=60.0).close()


def test_a_lease_of_another_machine_is_taken_if_nobody_renews_it(tmp_path: Path):
    leave_behind(tmp_path, host="elsewhere", machine="another")
    began = time.monotonic()
    lease = take(tmp_path)
    assert time.monotonic() - began >= 0.4
    assert holder(tmp_path)["host"] == os.uname().nodename
    lease.close()


def test_a_lease_of_another_machine_is_refused_if_it_is_renewed(tmp_path: Path):
    script = f"""
import json, pathlib, time
path = pathlib.Path({str(tmp_path / LEASE_FILE)!r})
for number in range(200):
    about = json.loads(path.read_text()) | {{"renewed": number}}
    (path.parent / "next").write_text(json.dumps(about))
    (path.parent / "next").replace(path)
    time.sleep(0.05)
"""
    leave_behind(tmp_path, host="elsewhere", machine="another", pid=7)
    renewing = child_processes.start([sys.executable, "-c", script])
    try:
        with pytest.raises(InputError, match="process 7 on elsewhere"):
            take(tmp_path, stale=5.0)
    finally:
        renewing.kill()
        renewing.wait()


@pytest.mark.parametrize("content", ["", "{}", "[1]", "no JSON"])
def test_a_lease_that_cannot_be_read_counts_as_one_of_another_machine(content: str, tmp_path: Path):
    (tmp_path / LEASE_FILE).write_text(content)
    began = time.monotonic()
    take(tmp_path).close()
    assert time.monotonic() - began >= 0.4


def test_a_run_whose_workdir_was_taken_learns_of_it_and_leaves_it_alone(tmp_path: Path):
    lease = take(tmp_path)
    other = {**holder(tmp_path), "token": "another", "host": "elsewhere", "pid": 7}
    (tmp_path / LEASE_FILE).write_text(json.dumps(other))
    time.sleep(0.3)
    with pytest.raises(BertJaxError, match="taken over by process 7 on elsewhere"):
        lease.check()
    lease.close()
    assert holder(tmp_path) == other


@pytest.mark.long
def test_two_runs_in_one_workdir_and_one_after_a_kill(dataset_dir: Path, tmp_path: Path):
    long = {"total_steps": 100_000, "eval_every_steps": 0}
    first = child_processes.start(
        train_command(dataset_dir, tmp_path, **long), env=helpers.child_environment(), stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 100
        while not (tmp_path / "metrics.jsonl").exists():
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        second = subprocess.run(
            train_command(dataset_dir, tmp_path, **long), env=helpers.child_environment(), capture_output=True,
            text=True, timeout=100, check=False,
        )  # fmt: skip
        assert second.returncode == 2
        line = second.stderr.strip().split("\n")[-1]
        assert f"in use by another run, process {first.pid} on " in line
        assert "Traceback" not in second.stderr
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert (tmp_path / LEASE_FILE).exists()
    third = subprocess.run(
        train_command(dataset_dir, tmp_path, total_steps=2, optimizer__warmup_steps=1, checkpoint__every_steps=60),
        env=helpers.child_environment(), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert "is gone" in third.stderr
    assert not (tmp_path / LEASE_FILE).exists()


def test_a_lease_in_a_store(store: Emulator):
    folder = epath.Path("gs://bucket/run")
    lease = Lease(folder, renew=0.05, stale=0.4)
    with pytest.raises(InputError, match=f"gs://bucket/run is in use by another run, process {os.getpid()} on "):
        Lease(folder, renew=0.05, stale=0.4)
    lease.check()
    lease.close()
    assert store.names() == []
