"""Interrupted preparation resumes without loss: after a kill, a full disk, a broken file or another process."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import child_processes, helpers
from support.preparing import SMALL, files, run, unhidden

from bert_jax import cli
from bert_jax.data.corpora import corpus
from bert_jax.data.dataset import INFO_FILE, PreparedDataset
from bert_jax.data.preparation import pipeline as prepare_module
from bert_jax.data.preparation import scratch_folder, shards, sorted_runs
from bert_jax.data.preparation.pipeline import PrepareOptions, prepare
from bert_jax.errors import BertJaxError, InputError


@pytest.mark.parametrize("workers", [1, 2])
def test_resume_after_an_invalid_file(corpus_file, tokenizer, tmp_path, workers, caplog, monkeypatch):
    monkeypatch.setattr(corpus, "SLICE_BYTES", 1)  # each file is a task
    documents = corpus_file.read_text().split("\n\n")
    inputs = [tmp_path / f"{number}.txt" for number in range(6)]
    for number, path in enumerate(inputs):
        path.write_text("\n\n".join(documents[number::6]))
    good = inputs[4].read_bytes()
    inputs[4].write_bytes(good[:100] + b"\xff\xfe" + good[100:])
    with pytest.raises(InputError, match=r"4\.txt"):
        run(inputs, tokenizer, tmp_path / "data", workers=workers)
    assert not unhidden(tmp_path / "data")
    inputs[4].write_bytes(good)
    seen = read_again(inputs, tokenizer, tmp_path / "data", caplog)
    assert str(inputs[4]) in seen
    assert not seen & {str(path) for path in inputs[:3]}  # with two workers, the last ones may be unfinished
    run(corpus_file, tokenizer, tmp_path / "whole")
    assert files(tmp_path / "data") == files(tmp_path / "whole")


def read_again(inputs, tokenizer, output, caplog, **options):
    """Runs `prepare` again and returns the paths of the files that it reads."""
    read, seen = corpus.read, set()

    def spy(piece, reading):
        seen.add(piece.path)
        return read(piece, reading)

    with pytest.MonkeyPatch.context() as patch, caplog.at_level("INFO", logger="bert_jax"):
        patch.setattr(corpus, "read", spy)
        run(inputs, tokenizer, output, **options)
    return seen


@pytest.mark.parametrize(
    ("where", "after"),
    [
        ((shards, "_write_shard"), 0),
        ((shards, "_write_shard"), 3),
        ((shards, "save_array"), 4),
        ((sorted_runs, "save_array"), 3),
        ((scratch_folder, "write_whole"), 0),
        ((prepare_module, "array_bytes"), 0),
        ((prepare_module, "_move"), 2),
    ],
)
def test_resume_after_a_write_error(whole, corpus_file, tokenizer, tmp_path, monkeypatch, where, after, caplog):
    """A failure keeps other files in the output folder, such as the corpus and the vocabulary."""
    folder = tmp_path / "data"
    folder.mkdir()
    mine = {"train-1.txt": b"text", "eval-notes.md": b"notes"}
    for name, content in mine.items():
        (folder / name).write_bytes(content)
    real, calls = getattr(*where), []

    def fail(*arguments):
        calls.append(1)
        if len(calls) > after:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    options = {"bucket_tokens": 4096, "dupe_factor": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*where, fail)
        with pytest.raises(OSError, match="No space"):
            run(corpus_file, tokenizer, folder, **options)
    assert unhidden(folder).items() >= mine.items()
    assert INFO_FILE not in unhidden(folder)
    seen = read_again(corpus_file, tokenizer, folder, caplog, **options)
    assert bool(seen) == (where[0] in (sorted_runs, scratch_folder))  # what was tokenized is not tokenized again
    if after == 3 and where[0] is shards:
        assert re.search(r"\b3 of [0-9]+ shards\b", caplog.text)
    assert files(folder) == {**files(whole), **mine}


def interrupted(monkeypatch, inputs, tokenizer, folder, where, **options):
    """Interrupts a run when `where`, a module and a name in it, is called; returns its scratch folder."""

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*where, fail)
        with pytest.raises(OSError, match="No space"):
            run(inputs, tokenizer, folder, **options)
    return folder / ".prepare"


@pytest.mark.parametrize(
    ("step", "pattern", "is_there"),
    [
        *(("build", f"*-0000.{name}.npy", True) for name in ("hashes", "sentence_at", "token_at", "lengths", "tokens")),
        ("build", "*-0000.tokens.npy", False),
        ("build", "*.runs.json", True),
        ("_publish", "*.array_record", True),
        ("_publish", "*.array_record", False),
        ("_publish", "????????????????.lengths.npy", True),
        ("_publish", "*.token_counts.npy", True),
        ("_publish", "*.shard.json", True),
    ],
)
def test_files_truncated_by_a_power_loss_are_rebuilt(
    whole, corpus_file, tokenizer, tmp_path, monkeypatch, step, pattern, is_there
):
    options = {"bucket_tokens": 4096, "dupe_factor": 2}
    folder = tmp_path / "data"
    work = interrupted(monkeypatch, corpus_file, tokenizer, folder, (prepare_module, step), **options)
    path = sorted(work.glob(pattern))[0]
    if is_there:
        os.truncate(path, path.stat().st_size * 2 // 3)
    else:
        path.unlink()
    run(corpus_file, tokenizer, folder, **options)
    assert files(folder) == files(whole)


def test_files_are_synced_before_their_marker_is_written(corpus_file, tokenizer, tmp_path, monkeypatch):
    """Files listed in a marker, and their folder, are synced before it is written."""
    synced, fsync, replace = set(), os.fsync, os.replace
    markers = []

    def sync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def commit(source, target):
        replace(source, target)
        target = Path(target)
        if target.name.endswith((".runs.json", ".shard.json")) or target.name == INFO_FILE:
            declared = ".npy" if target.name != INFO_FILE else (".npy", ".array_record", ".txt")
            listed = [path for path in target.parent.iterdir() if path.name.endswith(declared)]
            assert listed
            for path in (*listed, target.parent):
                assert path.stat().st_ino in synced, path
            markers.append(target.name)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", commit)
    run(corpus_file, tokenizer, tmp_path / "data", bucket_tokens=8192)
    assert {name.split(".", 1)[1] for name in markers} == {"runs.json", "shard.json", "json"}


def test_truncated_run_is_named_in_the_error(corpus_file, tokenizer, tmp_path, monkeypatch):
    work = interrupted(monkeypatch, corpus_file, tokenizer, tmp_path / "data", (prepare_module, "build"))
    (marker,) = work.glob("*.runs.json")
    (stored,) = [
        sorted_runs.RunOnDisk(str(work / name), *counts) for name, *counts in json.loads(marker.read_text())["runs"]
    ]
    path = Path(f"{stored.path}.tokens.npy")
    os.truncate(path, path.stat().st_size - 400)
    with pytest.raises(BertJaxError, match=rf"{path}: .*[0-9]+\D+[0-9,]+"):
        sorted_runs.hash_range_of(stored, 0, 2**64, False)
    path.write_bytes(path.read_bytes()[:50])
    for read in (lambda: stored.array("tokens"), lambda: stored.part("tokens", 0, 1)):
        with pytest.raises(BertJaxError, match=str(path)):
            read()


def test_failure_at_the_very_end(whole, corpus_file, tokenizer, tmp_path, monkeypatch):
    def fail(self):
        (tmp_path / "data" / f"{INFO_FILE}.0.partial").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module.DatasetInfo, "to_json", fail)
        with pytest.raises(OSError, match="No space"):
            run(corpus_file, tokenizer, tmp_path / "data", bucket_tokens=8192)
    run(corpus_file, tokenizer, tmp_path / "data", bucket_tokens=4096, dupe_factor=2)
    assert files(tmp_path / "data") == files(whole)


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def delete_half(folder: Path) -> None:
    """Deletes a folder as shutil.rmtree does, and is killed before the last file."""
    for path in sorted(folder.iterdir())[:-1]:
        path.unlink()
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("place", "name", "killed"),
    [(prepare_module, "warn_of_share", stop), (shutil, "rmtree", delete_half)],
    ids=["before its clean-up", "within its clean-up"],
)
def test_a_call_that_was_killed_after_its_last_write_ends_well_when_repeated(
    place, name, killed, whole, corpus_file, tokenizer, tmp_path, monkeypatch
):
    same = {"bucket_tokens": 4096, "dupe_factor": 2}
    with monkeypatch.context() as patch:
        patch.setattr(place, name, killed)
        with pytest.raises(KeyboardInterrupt):
            run(corpus_file, tokenizer, tmp_path / "data", **same)
    assert (tmp_path / "data" / INFO_FILE).exists()
    assert (tmp_path / "data" / ".prepare").is_dir()
    with pytest.raises(InputError, match=INFO_FILE):
        run(corpus_file, tokenizer, tmp_path / "data", **same, seed=1)
    run(corpus_file, tokenizer, tmp_path / "data", **same)
    assert files(tmp_path / "data") == files(whole)
    assert not (tmp_path / "data" / ".prepare").exists()
    with pytest.raises(InputError, match=INFO_FILE):
        run(corpus_file, tokenizer, tmp_path / "data", **same)


def test_output_locked_by_another_process_is_refused(corpus_file, tokenizer, tmp_path):
    (tmp_path / "data").mkdir()
    with (tmp_path / "data" / ".prepare.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for scratch in (None, str(tmp_path / "scratch")):
            with pytest.raises(InputError, match=r"\.prepare\.lock"):
                prepare([str(corpus_file)], tokenizer, str(tmp_path / "data"), PrepareOptions(**SMALL), scratch=scratch)
    run(corpus_file, tokenizer, tmp_path / "data")
    assert not list((tmp_path / "data").glob(".*"))


def test_dataset_written_meanwhile_by_another_process_is_kept(whole, corpus_file, tokenizer, tmp_path, monkeypatch):
    """Another process finishes the dataset while this one plans."""
    plan = corpus.plan

    def slow(*arguments):
        found = plan(*arguments)
        shutil.copytree(whole, tmp_path / "data")
        return found

    monkeypatch.setattr(corpus, "plan", slow)
    with pytest.raises(InputError, match=rf"--output={tmp_path / 'data'}: .*{INFO_FILE}"):
        run(corpus_file, tokenizer, tmp_path / "data", seq_len=32)
    assert files(tmp_path / "data") == files(whole)


def test_existing_shards_are_not_overwritten(corpus_file, tokenizer, tmp_path):
    (tmp_path / "data").mkdir()
    mine = tmp_path / "data" / "train-00000-of-00001.array_record"
    mine.write_text("mine")
    with pytest.raises(InputError, match=str(mine)):
        run(corpus_file, tokenizer, tmp_path / "data")
    assert mine.read_text() == "mine"


def test_input_changed_while_read_is_refused(corpus_file, tokenizer, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_bytes(corpus_file.read_bytes())
    read = corpus.read

    def touch(piece, reading):
        yield from read(piece, reading)
        text.write_bytes(corpus_file.read_bytes().replace(b"owl", b"cow"))

    monkeypatch.setattr(corpus, "read", touch)
    with pytest.raises(InputError, match=rf"^{text}: "):
        run(text, tokenizer, tmp_path / "data")


def test_workers_end_with_their_parent(vocabulary_file, tmp_path):
    """A parent killed with -9 does not notify its workers; they would keep writing during the next run."""
    (tmp_path / "big.txt").write_text(helpers.make_corpus(documents=6000))
    process = child_processes.start(
        helpers.command(
            "prepare", "--input", tmp_path / "big.txt", "--vocab", vocabulary_file, "--output", tmp_path / "data",
            "--sentences", "lines", "--bucket_tokens", 1024, "--workers", 2,
        ),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list((tmp_path / "data").glob(".prepare/*.shard.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    tasks = Path(f"/proc/{process.pid}/task")
    if not tasks.exists():
        pytest.skip("needs /proc")
    children = [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    assert len(children) >= 2
    process.kill()
    process.wait()
    while any(is_running(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(child) for child in children)


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_scratch_elsewhere(whole, corpus_file, tokenizer, tmp_path):
    prepare(
        [str(corpus_file)], tokenizer, str(tmp_path / "data"),
        PrepareOptions(**SMALL, bucket_tokens=4096, dupe_factor=2), scratch=str(tmp_path / "scratch"),
    )  # fmt: skip
    assert files(tmp_path / "data") == files(whole)
    assert not list((tmp_path / "scratch").iterdir())


def test_resume_after_kill_writes_identical_files(vocabulary_file, tmp_path):
    """Resumes a run killed with SIGKILL; its files equal those of an uninterrupted run."""
    (tmp_path / "big.txt").write_text(helpers.make_corpus(documents=2000))
    folder = tmp_path / "data"
    words = (
        "prepare", "--input", tmp_path / "big.txt", "--vocab", vocabulary_file, "--sentences", "lines",
        "--bucket_tokens", 1024,
    )  # fmt: skip
    arguments = helpers.command(*words, "--output", folder, "--workers", 1)
    process = child_processes.start(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while (
        len(list(folder.glob(".prepare/*.shard.json"))) < 12 and time.monotonic() < deadline and process.poll() is None
    ):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    left = set(files(folder))
    assert INFO_FILE not in left
    assert any(name.startswith(".prepare") for name in left)
    assert len(left) > 12
    with pytest.raises(InputError, match=INFO_FILE):
        PreparedDataset(str(folder))
    again = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert re.search(r"[0-9]+ of [0-9]+ corpus slices\b", again.stderr)
    done = re.search(r"([0-9]+) of [0-9]+ shards\b", again.stderr)
    assert done
    assert int(done[1]) >= 12
    assert cli.main([str(word) for word in (*words, "--output", tmp_path / "whole", "--workers", 1)]) == 0
    assert files(folder) == files(tmp_path / "whole")
