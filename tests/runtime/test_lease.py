"""One run at a time writes in a workdir."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from etils import epath
from support import child_processes, helpers
from support.gcs import Emulator
from support.runs import train_command

from bert_jax.errors import BertJaxError, InputError
from bert_jax.files.json_checksums import is_intact
from bert_jax.runtime.lease import LEASE_FILE, Lease
from bert_jax.runtime.lease_file import Found, open_lease_file


def take(folder: Path, **settings: Any) -> Lease:
    return Lease(epath.Path(folder), **{"renew": 0.05, "stale": 0.4, **settings})


class Clock:
    """A clock that a test sets, in seconds."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def holder(folder: Path) -> dict[str, object]:
    """The lease without its checksum, as tests change it."""
    found = json.loads((folder / LEASE_FILE).read_text())
    assert is_intact(found)
    return {name: value for name, value in found.items() if name != "checksum"}


def leave_behind(folder: Path, **changed: object) -> None:
    """The lease of a run that was killed."""
    lease = take(folder)
    left = {**holder(folder), **changed}
    lease.close()
    (folder / LEASE_FILE).write_text(json.dumps(left))


def test_workdir_in_use_is_refused_with_host_and_process(tmp_path: Path):
    lease = take(tmp_path)
    with pytest.raises(InputError, match=f"{tmp_path}.*process {os.getpid()} on {os.uname().nodename}"):
        take(tmp_path)
    lease.check()
    lease.close()
    assert not list(tmp_path.iterdir())
    take(tmp_path).close()


def test_lease_of_a_dead_local_process_is_taken_over_at_once(tmp_path: Path):
    dead = child_processes.start([sys.executable, "-c", ""])
    dead.wait()
    leave_behind(tmp_path, pid=dead.pid)
    began = time.monotonic()
    take(tmp_path, stale=60.0).close()
    assert time.monotonic() - began < 5


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_lease_of_a_killed_process_that_nobody_has_waited_for_is_taken_over_at_once(tmp_path: Path):
    """The first process of a container may not wait for its children."""
    lease = tmp_path / LEASE_FILE
    code = (
        "import time; from etils import epath; from bert_jax.runtime.lease import Lease\n"
        f"Lease(epath.Path({str(tmp_path)!r})); time.sleep(600)"
    )
    child = child_processes.start([sys.executable, "-c", code], env=helpers.child_environment())
    deadline = time.monotonic() + 60
    while not lease.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.kill()
    while Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
        time.sleep(0.01)
    began = time.monotonic()
    take(tmp_path, stale=60.0).close()
    assert time.monotonic() - began < 5


def test_reused_process_id_is_not_the_holder(tmp_path: Path):
    leave_behind(tmp_path, started="1")
    take(tmp_path, stale=60.0).close()


def test_expired_lease_of_another_machine_is_taken_over(tmp_path: Path):
    leave_behind(tmp_path, host="elsewhere", machine="another")
    began = time.monotonic()
    lease = take(tmp_path)
    assert time.monotonic() - began >= 0.4
    assert holder(tmp_path)["host"] == os.uname().nodename
    lease.close()


def test_renewed_lease_of_another_machine_is_refused(tmp_path: Path):
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


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[1]", b"no JSON", b'{"host": "vm\xcf"}', b"[" * 100_000,
     json.dumps({"host": "a", "pid": "7", "machine": "", "started": "", "token": "", "renewed": 0}).encode()],
    ids=["empty", "object", "list", "text", "utf8", "nested", "types"],
)  # fmt: skip
def test_unreadable_lease_counts_as_held_by_another_machine(content: bytes, tmp_path: Path):
    (tmp_path / LEASE_FILE).write_bytes(content)
    began = time.monotonic()
    take(tmp_path).close()
    assert time.monotonic() - began >= 0.4


def test_a_changed_process_id_does_not_make_the_holder_look_dead(tmp_path: Path):
    lease = take(tmp_path, renew=0.2)
    text = (tmp_path / LEASE_FILE).read_text()
    (tmp_path / LEASE_FILE).write_text(text.replace(f'"pid": {os.getpid()}', '"pid": 9999999'))
    with pytest.raises(InputError, match=f"process {os.getpid()} "):  # it has renewed its lease meanwhile
        take(tmp_path, stale=5.0)
    lease.check()
    lease.close()


def test_run_whose_lease_was_taken_over_stops_and_keeps_the_file(tmp_path: Path):
    clock = Clock()
    lease = take(tmp_path, renew=60.0, now=clock)
    other = {**holder(tmp_path), "token": "another", "host": "elsewhere", "pid": 7}
    (tmp_path / LEASE_FILE).write_text(json.dumps(other))
    clock.seconds = 0.5
    with pytest.raises(BertJaxError, match="process 7 on elsewhere"):
        lease.check()
    lease.close()
    assert holder(tmp_path) == other


class RefreshError(Exception):
    """An error of no type that a renewal expects, as google.auth's."""


def fails(monkeypatch: pytest.MonkeyPatch, lease: Lease, times: int = 1 << 30) -> None:
    """Lets the next renewals fail."""
    real, left = lease._file.renew, [times]

    def renew(*arguments: object) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise RefreshError("metadata server")
        real(*arguments)

    monkeypatch.setattr(lease._file, "renew", renew)


def test_a_lease_is_renewed_after_an_error_of_any_type(tmp_path: Path, monkeypatch, caplog):
    lease = take(tmp_path)
    fails(monkeypatch, lease, times=2)
    before = holder(tmp_path)["renewed"]
    deadline = time.monotonic() + 10
    while holder(tmp_path)["renewed"] < before + 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert "RefreshError" in caplog.text
    lease.check()
    lease.close()


def test_run_stops_before_an_unrenewed_lease_expires(tmp_path: Path, monkeypatch):
    clock = Clock()
    lease = take(tmp_path, now=clock)
    fails(monkeypatch, lease)
    lease.check()
    clock.seconds = 0.5
    with pytest.raises(BertJaxError, match=rf"{LEASE_FILE} .*RefreshError"):
        lease.check()
    lease.close()


def test_after_a_freeze_the_lease_is_renewed_before_anything_is_written(tmp_path: Path):
    clock = Clock()
    lease = take(tmp_path, renew=60.0, now=clock)
    lease.check()
    assert holder(tmp_path)["renewed"] == 0
    clock.seconds = 0.5
    lease.check()
    assert holder(tmp_path)["renewed"] == 1
    clock.seconds = 1.0
    (tmp_path / LEASE_FILE).write_text(json.dumps({**holder(tmp_path), "token": "another", "pid": 7}))
    with pytest.raises(BertJaxError, match="process 7 on"):
        lease.check()
    lease.close()


def test_a_save_confirms_the_lease_at_once(tmp_path: Path):
    lease = take(tmp_path, renew=60.0, stale=60.0)
    lease.confirm()
    (tmp_path / LEASE_FILE).write_text(json.dumps({**holder(tmp_path), "token": "another", "pid": 7}))
    lease.check()
    with pytest.raises(BertJaxError, match="process 7 on"):
        lease.confirm()
    lease.close()


def test_a_deleted_workdir_ends_the_run(tmp_path: Path):
    lease = take(tmp_path)
    (tmp_path / LEASE_FILE).unlink()
    lease.confirm()
    assert holder(tmp_path)["pid"] == os.getpid()
    shutil.rmtree(tmp_path)
    with pytest.raises(BertJaxError, match=f"{tmp_path}"):
        lease.confirm()
    lease.close()


@pytest.fixture(params=["disk", "store"])
def lease_path(request: pytest.FixtureRequest, tmp_path: Path) -> epath.Path:
    if request.param == "store":
        request.getfixturevalue("store")
        return epath.Path("gs://bucket/run/lease.json")
    return epath.Path(tmp_path / "lease.json")


def test_one_of_many_contenders_creates_and_one_takes_over_a_lease(lease_path: epath.Path):
    contents = [f"contender {number}".encode() for number in range(8)]

    def winners(step: Callable[[bytes], None]) -> list[bytes]:
        start = threading.Barrier(len(contents))

        def contend(content: bytes) -> bool:
            start.wait()
            try:
                step(content)
            except FileExistsError:
                return False
            return True

        with ThreadPoolExecutor(len(contents)) as pool:
            won = list(pool.map(contend, contents))
        return [content for content, is_winner in zip(contents, won, strict=True) if is_winner]

    (first,) = winners(lambda content: open_lease_file(lease_path).create(content))
    found = open_lease_file(lease_path).read()
    assert found.content == first
    (second,) = winners(lambda content: open_lease_file(lease_path).take_over(found, content + b", again"))
    assert open_lease_file(lease_path).read().content == second + b", again"


def test_changed_lease_file_is_not_taken_over_renewed_or_deleted(lease_path: epath.Path):
    file = open_lease_file(lease_path)
    file.create(b"mine")
    found = file.read()
    file.renew(lambda found: found.content == b"mine", b"renewed")
    with pytest.raises(FileExistsError):
        file.take_over(found, b"another")
    with pytest.raises(FileExistsError):
        file.renew(lambda found: found.content == b"mine", b"again")
    file.release(lambda found: found.content == b"mine")
    assert file.read() == Found(b"renewed", file.read().generation)
    file.release(lambda found: found.content == b"renewed")
    assert file.read() is None


def test_create_repeated_after_a_lost_response_succeeds(store: Emulator):
    file = open_lease_file(epath.Path("gs://bucket/run/lease.json"))
    file.create(b"mine")
    file.create(b"mine")
    with pytest.raises(FileExistsError):
        file.create(b"another")


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
        assert f"process {first.pid} on " in line
        assert "Traceback" not in second.stderr
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert (tmp_path / LEASE_FILE).exists()
    third = subprocess.run(
        train_command(dataset_dir, tmp_path, total_steps=2, optimizer__warmup_steps=1, checkpoint__every_steps=60),
        env=helpers.child_environment(), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert f"process {first.pid} on " in third.stderr
    assert not (tmp_path / LEASE_FILE).exists()


def test_a_lease_in_a_store(store: Emulator):
    folder = epath.Path("gs://bucket/run")
    lease = Lease(folder, renew=0.05, stale=0.4)
    with pytest.raises(InputError, match=f"gs://bucket/run\\b.*process {os.getpid()} on "):
        Lease(folder, renew=0.05, stale=0.4)
    lease.check()
    lease.close()
    assert store.names() == []
