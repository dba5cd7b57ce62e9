"""One run writes to a workdir at a time, and all its processes see the same folder."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from etils import epath
from support import child_processes, gcs, helpers

from bert_jax.errors import BertJaxError, InputError
from bert_jax.runtime import workdir_lock
from bert_jax.runtime.workdir_lock import LOCK_FILE, WorkdirLock


def test_a_workdir_in_use_is_refused_with_host_and_process(tmp_path: Path):
    lock = WorkdirLock(epath.Path(tmp_path))
    holder = f"process {os.getpid()} on {os.uname().nodename}"
    with pytest.raises(BertJaxError, match=rf"workdir={tmp_path}: .*{holder}, .* delete {tmp_path / LOCK_FILE} ") as no:
        WorkdirLock(epath.Path(tmp_path))
    assert no.value.exit_status == 1  # which a launcher repeats: on NFS the lock of a machine that is gone may stay
    lock.confirm()
    (tmp_path / LOCK_FILE).unlink()
    WorkdirLock(epath.Path(tmp_path)).close()
    lock.close()
    WorkdirLock(epath.Path(tmp_path)).close()


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path):
    code = (
        "import time; from etils import epath; from bert_jax.runtime.workdir_lock import WorkdirLock\n"
        f"WorkdirLock(epath.Path({str(tmp_path)!r})); print('locked', flush=True); time.sleep(600)"
    )
    child = child_processes.start(
        [sys.executable, "-c", code], env=helpers.child_environment(), stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "locked\n"
    with pytest.raises(BertJaxError, match=rf"process {child.pid} on"):
        WorkdirLock(epath.Path(tmp_path))
    child.kill()
    child.wait()
    WorkdirLock(epath.Path(tmp_path)).close()


def test_a_deleted_workdir_ends_the_run(tmp_path: Path):
    lock = WorkdirLock(epath.Path(tmp_path))
    (tmp_path / LOCK_FILE).unlink()
    with pytest.raises(BertJaxError, match=f"workdir={tmp_path}: "):
        lock.confirm()
    assert not list(tmp_path.iterdir())
    lock.close()


def test_in_a_store_the_run_that_begins_last_owns_the_workdir(store: gcs.Emulator):
    folder = epath.Path("gs://bucket/run")
    first = WorkdirLock(folder)
    first.confirm()
    second = WorkdirLock(folder)
    with pytest.raises(InputError, match=f"workdir=gs://bucket/run: .*process {os.getpid()} on"):
        first.confirm()
    second.confirm()
    second.close()


def test_two_processes_that_do_not_share_a_workdir_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Simulates process 1 of two: the lock of process 0 does not appear, or appears late."""
    monkeypatch.setattr("jax.process_index", lambda: 1)
    monkeypatch.setattr(workdir_lock, "is_first", lambda: False)
    monkeypatch.setattr(workdir_lock.multihost_utils, "sync_global_devices", lambda name: None)
    monkeypatch.setattr(workdir_lock, "shared_name", lambda: "name")
    monkeypatch.setattr(workdir_lock, "WAIT_SECONDS", 0.3)
    with pytest.raises(InputError, match=rf"workdir={tmp_path}: process 1 .*gs://"):
        WorkdirLock(epath.Path(tmp_path))
    monkeypatch.setattr(workdir_lock, "WAIT_SECONDS", 30.0)
    threading.Timer(0.3, (tmp_path / LOCK_FILE).write_text, ["process 7 on host, run name"]).start()
    WorkdirLock(epath.Path(tmp_path)).confirm()
