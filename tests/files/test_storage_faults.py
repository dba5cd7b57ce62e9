"""Faults below the file layer: what a command says, with which status, and what it leaves for the next run."""

import errno
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import child_processes, helpers, runs

from bert_jax.cli import main

LIMIT = 240
TRAINING = {**runs.SETTINGS, "total_steps": 8, "checkpoint.every_steps": 4, "optimizer.warmup_steps": 2}
NOT_COMPARED = ("provenance.json", "README.md", "lease.json")


def last_line(done: subprocess.CompletedProcess, status: int) -> str:
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().split("\n")[-1]


def content(path: Path) -> dict[str, bytes]:
    """Returns the files below a path by name, without those that hold times."""
    paths = path.rglob("*") if path.is_dir() else [path]
    return {
        str(one.relative_to(path)): one.read_bytes() for one in paths if one.is_file() and one.name not in NOT_COMPARED
    }


def vocab(corpus: Path, output: Path) -> list[object]:
    return ["vocab", "--input", corpus, "--output", output, "--size", 120]


# --- Writes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EDQUOT, "quota"), (errno.EIO, "failed to read or write"), (errno.ENOSPC, "full"), (errno.EFBIG, "limit")],
    ids=["quota", "EIO", "full", "size limit"],
)
def test_a_write_that_fails_is_one_line_with_the_file(number: int, words: str, run, corpus_file: Path, tmp_path: Path):
    output = tmp_path / "vocab.txt"
    line = last_line(run(vocab(corpus_file, output), "write", tmp_path.name, number), 2)
    assert words in line
    assert str(output) in line
    assert not list(tmp_path.iterdir())


def test_writes_cut_short_are_continued(run, corpus_file: Path, tmp_path: Path):
    """write(2) may write less than it was given; each of these writes half."""
    for folder, call in (("short", "write"), ("whole", "")):
        (tmp_path / folder).mkdir()
        last_line(run(vocab(corpus_file, tmp_path / folder / "vocab.txt"), call, tmp_path / folder), 0)
    assert content(tmp_path / "short") == content(tmp_path / "whole")


# --- Reads -------------------------------------------------------------------------------------------------------


def test_a_read_that_fails_is_one_line_with_the_file(run, corpus_file: Path, tmp_path: Path):
    line = last_line(run(vocab(corpus_file, tmp_path / "vocab.txt"), "read", corpus_file, errno.EIO), 2)
    assert "failed to read" in line or "Input/output error" in line
    assert str(corpus_file) in line
    assert not list(tmp_path.iterdir())


def test_a_slow_read_is_waited_for(run, corpus_file: Path, tmp_path: Path):
    last_line(run(vocab(corpus_file, tmp_path / "slow.txt"), "read", corpus_file, seconds=1), 0)
    last_line(run(vocab(corpus_file, tmp_path / "plain.txt")), 0)
    assert (tmp_path / "slow.txt").read_bytes() == (tmp_path / "plain.txt").read_bytes()


# --- Every command that writes -----------------------------------------------------------------------------------


def command(name: str, made: Path, dataset: Path, corpus: Path, vocabulary: Path, output: Path) -> list[object]:
    training = helpers.flags({**TRAINING, "data.path": dataset})
    return {
        "vocab": vocab(corpus, output / "vocab.txt"),
        "prepare": ["prepare", "--input", corpus, "--vocab", vocabulary, "--output", output, "--sentences", "lines"],
        "pretrain": ["pretrain", "--config=bert_tiny", f"--workdir={output}", *training],
        "export": ["export", "--checkpoint", made / "run", "--output", output],
        "import": ["import", "--source", made / "hf", "--output", output],
        "features": ["features", "--layers", "-1", "--checkpoint", made / "run", "--input", made / "lines.txt",
                     "--output", output / "features.jsonl"],
        "predict": ["predict", "--checkpoint", made / "classifier", "--input", made / "task.csv", "--output",
                    output / "predictions.jsonl"],
    }[name]  # fmt: skip


COMMANDS = ("vocab", "prepare", "pretrain", "export", "import", "features", "predict")


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EIO], ids=["quota", "EIO"])
def test_every_command_survives_a_write_that_fails(
    name: str, number: int, run, made: Path, dataset_dir: Path, corpus_file: Path, vocabulary_file: Path, tmp_path: Path
):
    """It ends with one line; run again, it leaves what an undisturbed one does."""
    outputs = [tmp_path / "faulty", tmp_path / "plain"]
    for output in outputs:
        if name in ("vocab", "features", "predict"):
            output.mkdir()
    words = [command(name, made, dataset_dir, corpus_file, vocabulary_file, output) for output in outputs]
    line = last_line(run(words[0], "write", outputs[0], number), 2)
    assert str(outputs[0]) in line
    last_line(run(words[0]), 0)
    last_line(run(words[1]), 0)
    if name == "pretrain":
        runs.assert_same_run(*outputs)
    elif name == "import":
        assert main(["export", "--checkpoint", str(outputs[0]), "--output", str(tmp_path / "a")]) == 0
        assert main(["export", "--checkpoint", str(outputs[1]), "--output", str(tmp_path / "b")]) == 0
        assert content(tmp_path / "a") == content(tmp_path / "b")
    else:
        assert content(outputs[0]) == content(outputs[1])


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_a_read_only_disk(
    name: str, made: Path, dataset_dir: Path, corpus_file: Path, vocabulary_file: Path, tmp_path: Path
):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o ro none {shlex.quote(str(disk))}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("a disk cannot be mounted here")
    place = disk if name in ("vocab", "features", "predict") else disk / "output"
    words = shlex.join(helpers.command(*command(name, made, dataset_dir, corpus_file, vocabulary_file, place)))
    done = child_processes.run(
        ["unshare", "-rm", "sh", "-c", f"{mount} && exec {words}"], env=helpers.child_environment(), timeout=LIMIT
    )
    line = last_line(done, 2)
    assert str(disk) in line
    assert os.strerror(errno.EROFS) in line


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
