"""Faults below the file layer: what a command says, with which status, and what it leaves for the next run."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import child_processes, helpers, runs, several, sources

from bert_jax.files import atomic
from bert_jax.training.checkpoints import open_checkpoint

LIMIT = 240
"""Seconds after which a command hangs."""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library for LD_PRELOAD that makes reads and writes fail."""
    if sys.platform != "linux" or shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    target = tmp_path_factory.mktemp("library") / "faulty_disk.so"
    source = Path(helpers.__file__).with_name("faulty_disk.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", target, source, "-ldl"], check=True)
    return target


@pytest.fixture
def run(library: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs a command whose `call` ("read", "write") fails for paths that contain `part`."""

    def run(
        words: list[object], call: str = "", part: object = "", number: int = 0, seconds: int = 0
    ) -> subprocess.CompletedProcess:
        faults = {"LD_PRELOAD": str(library), "FAULT_CALL": call, "FAULT_PATH": str(part)} if call else {}
        faults |= {"FAULT_ERRNO": str(number)} if number else {}
        faults |= {"FAULT_SECONDS": str(seconds)} if seconds else {}
        return child_processes.run(helpers.command(*words), env=helpers.child_environment(**faults), timeout=LIMIT)

    return run


TRAINING = {**runs.SETTINGS, "total_steps": 8, "checkpoint.every_steps": 4, "optimizer.warmup_steps": 2}


def last_line(done: subprocess.CompletedProcess, status: int) -> str:
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().split("\n")[-1]


def vocab(corpus: Path, output: Path) -> list[object]:
    return ["vocab", "--input", corpus, "--output", output, "--size", 120]


# --- Writes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", [errno.EDQUOT, errno.EIO, errno.ENOSPC, errno.EFBIG, errno.ESTALE, errno.ETIMEDOUT],
    ids=errno.errorcode.get,
)  # fmt: skip
def test_a_write_that_fails_is_one_line_with_the_file(number: int, run, corpus_file: Path, tmp_path: Path):
    output = tmp_path / "tokenizer.json"
    line = last_line(run(vocab(corpus_file, output), "write", tmp_path.name, number), 1)
    assert os.strerror(number) in line
    assert str(output) in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("runner", ["processes", "DirectRunner"])
def test_a_write_that_fails_in_a_worker_is_one_line(
    runner: str, run, corpus_file: Path, vocabulary_file: Path, tmp_path: Path
):
    options: list[object] = ["--workers", 2]
    if runner == "DirectRunner":
        pytest.importorskip("apache_beam", reason="needs the beam extra: apache_beam")
        options = ["--runner", runner]
    output = tmp_path / "data"
    words = ["prepare", "--input", corpus_file, "--vocab", vocabulary_file, "--output", output, "--sentences", "lines",
             *options]  # fmt: skip
    done = run(words, "write", f"{tmp_path}/.data.partial", errno.ENOSPC)
    line = last_line(done, 1)
    assert os.strerror(errno.ENOSPC) in line
    assert ".py" not in line


# --- Reads -------------------------------------------------------------------------------------------------------


def test_a_read_that_fails_is_one_line_with_the_file(run, corpus_file: Path, tmp_path: Path):
    line = last_line(run(vocab(corpus_file, tmp_path / "tokenizer.json"), "read", corpus_file, errno.EIO), 2)
    assert "failed to read" in line or "Input/output error" in line
    assert str(corpus_file) in line
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.parametrize("part", ["train-lengths", "train-00000"], ids=["at the start", "in a step"])
def test_a_read_that_hangs_for_good_ends_the_run(part: str, run, dataset_dir: Path, tmp_path: Path):
    """The server of the files is gone: with `stall_exit` the run ends, says where it was, and resumes later."""
    words = ["pretrain", "--config=bert_tiny", *helpers.flags({**TRAINING, "data.path": dataset_dir})]
    watched = ["--config.stall_minutes=0.3", "--config.stall_exit=true", f"--workdir={tmp_path / 'run'}"]
    done = run([*words, *watched], "read", dataset_dir / part, seconds=100_000)
    assert done.returncode == 1, done.stderr
    assert "Timeout (" in done.stderr
    assert "data/dataset.py" in done.stderr, "the stack of the thread that reads"
    for name in ("run", "plain"):
        last_line(run([*words, f"--workdir={tmp_path / name}"]), 0)
    runs.assert_same_run(tmp_path / "run", tmp_path / "plain")


# --- Several processes -------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_a_save_that_fails_in_one_process_of_two_ends_both(
    number: int, library: Path, dataset_dir: Path, tmp_path: Path
):
    """Its disk is full when a checkpoint's arrays are written in the background; the other waits for it meanwhile."""
    workdir = tmp_path / "run"
    faults = {
        "LD_PRELOAD": library,
        "FAULT_CALL": "write",
        "FAULT_PATH": f"ocdbt.process_{number}",
        "FAULT_ERRNO": errno.ENOSPC,
    }
    command = helpers.command("pretrain", "--config=bert_tiny", f"--workdir={workdir}",
                              *helpers.flags({**several.SETTINGS, "data.path": dataset_dir}))  # fmt: skip
    began = time.monotonic()
    variables = {key: str(value) for key, value in faults.items()}
    processes = several.start_commands([command] * 2, **variables)
    written = [process.communicate(timeout=280)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    assert time.monotonic() - began < 100
    assert os.strerror(errno.ENOSPC) in written[number]
    assert f"Process {number}" in written[1 - number]
    assert not any("Traceback" in text for text in written)
    several.finish(several.start(2, dataset_dir, workdir))
    several.finish(several.start(2, dataset_dir, tmp_path / "plain"))
    ends = [open_checkpoint(str(path)).load_parameters() for path in (workdir, tmp_path / "plain")]
    sources.assert_same_parameters(*ends)
    assert runs.rows_without_times(workdir) == runs.rows_without_times(tmp_path / "plain")


@pytest.mark.long
def test_a_checkpoint_that_cannot_be_read_is_kept_and_an_earlier_one_is_used(run, dataset_dir: Path, tmp_path: Path):
    """EIO on the arrays of the newest step, as of a bad sector."""
    settings = helpers.flags({**TRAINING, "total_steps": 12, "checkpoint.keep": 3, "data.path": dataset_dir})
    words = ["pretrain", "--config=bert_tiny", *settings]
    for name in ("faulty", "plain"):
        last_line(run([*words, f"--workdir={tmp_path / name}"]), 0)
    checkpoints = tmp_path / "faulty" / "checkpoints"
    shutil.rmtree(checkpoints / "12")  # as if it was killed before its last save
    done = run([*words, f"--workdir={tmp_path / 'faulty'}"], "read", checkpoints / "8" / "parameters", errno.EIO)
    assert done.returncode == 0, done.stderr
    assert "8.damaged" in done.stderr
    assert (checkpoints / "8.damaged").is_dir()
    shutil.rmtree(checkpoints / "8.damaged")
    runs.assert_same_run(tmp_path / "faulty", tmp_path / "plain")


WRITER = """
import sys, time
from pathlib import Path
from bert_jax.files.atomic import whole_file
with whole_file(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    Path(sys.argv[2]).touch()
    time.sleep(600)
"""


def test_the_next_write_deletes_what_a_killed_process_left_and_not_what_another_writes(tmp_path: Path):
    folder, target = tmp_path / "out", tmp_path / "out" / "[a].jsonl"
    folder.mkdir()
    killed, living = (
        child_processes.start([sys.executable, "-c", WRITER, target, tmp_path / name]) for name in ("killed", "living")
    )
    child_processes.wait_until(lambda: all((tmp_path / name).exists() for name in ("killed", "living")), killed, living)
    killed.kill()
    killed.wait()
    assert len([*folder.iterdir()]) == 2
    atomic.write_whole(target, b"whole")
    left, found = sorted(folder.iterdir())
    assert (left.read_bytes(), found.read_bytes()) == (b"half", b"whole")
    living.kill()
    living.wait()
    atomic.write_whole(target, b"again")
    assert [*folder.iterdir()] == [target]


def test_a_file_that_another_writer_deletes_before_it_is_locked_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    target, lock = tmp_path / "a.jsonl", fcntl.flock

    def lock_after_another_writer(file: int, operation: int) -> None:
        monkeypatch.undo()
        atomic.write_whole(target, b"before")
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock_after_another_writer)
    with atomic.whole_file(target) as file:
        atomic.write_whole(target, b"meanwhile")
        assert len([*tmp_path.iterdir()]) == 2
        file.write(b"whole")
    assert target.read_bytes() == b"whole"
    assert [*tmp_path.iterdir()] == [target]


KILLED = """
import os, signal, sys
from etils import epath
from bert_jax.files.atomic import make_folder
folder, left = sys.argv[1], int(sys.argv[2])
def count(event, words):
    global left
    left -= any(str(word).startswith(folder) for word in words)
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
make_folder(epath.Path(folder))
"""
"""Kills itself at the access, by number, of anything in a folder."""


def test_the_check_of_a_folder_leaves_no_file_whenever_it_is_killed(tmp_path: Path):
    folder, killed = tmp_path / "output", 0
    while subprocess.run(
        [sys.executable, "-c", KILLED, folder, str(killed)], env=helpers.child_environment()
    ).returncode:
        killed += 1
        assert killed < 20
        assert not folder.exists() or not any(folder.iterdir())
    assert killed
