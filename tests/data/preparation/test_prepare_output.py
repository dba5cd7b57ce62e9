"""The output of preparation is complete or absent: after a kill, a full disk, a broken file or another process."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from etils import epath
from support import child_processes, helpers
from support.preparing import SMALL, files, run

from bert_jax.data import dataset as dataset_module
from bert_jax.data.corpora import corpus
from bert_jax.data.dataset import INFO_FILE, PreparedDataset
from bert_jax.data.preparation import pipeline, shards, sorted_runs
from bert_jax.data.preparation.pipeline import PrepareOptions, prepare
from bert_jax.errors import InputError

AS_WHOLE = {"bucket_tokens": 4096, "dupe_factor": 2}


@pytest.mark.parametrize("workers", [1, 2])
def test_an_invalid_file_leaves_nothing(corpus_file, tokenizer, tmp_path, workers, monkeypatch):
    monkeypatch.setattr(corpus, "SLICE_BYTES", 1)  # each file is a task
    (tmp_path / "good.txt").write_bytes(corpus_file.read_bytes())
    (tmp_path / "wrong.txt").write_bytes(b"the ship \xff\xfe")
    with pytest.raises(InputError, match=r"wrong\.txt"):
        run([tmp_path / "good.txt", tmp_path / "wrong.txt"], tokenizer, tmp_path / "new" / "data", workers=workers)
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize(
    ("where", "after"),
    [
        ((sorted_runs, "write_run"), 0),
        ((shards, "write_shard"), 3),
        ((dataset_module, "array_bytes"), 0),
        ((pipeline.provenance, "append"), 0),
    ],
)
def test_a_write_error_leaves_nothing(whole, corpus_file, tokenizer, tmp_path, monkeypatch, where, after):
    real, calls = getattr(*where), []

    def fail(*arguments):
        calls.append(1)
        if len(calls) > after:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*where, fail)
        with pytest.raises(OSError, match="No space"):
            run(corpus_file, tokenizer, tmp_path / "data", **AS_WHOLE)
    assert not list(tmp_path.iterdir())
    run(corpus_file, tokenizer, tmp_path / "data", **AS_WHOLE)
    assert files(tmp_path / "data") == files(whole)


@pytest.mark.parametrize("name", ["vocab.txt", "provenance.json", ".hidden", "train-00000-of-00001.array_record"])
def test_a_folder_with_a_file_is_refused(name, tokenizer, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text("mine")
    with pytest.raises(InputError, match="output="):
        run(tmp_path / "not read", tokenizer, tmp_path / "data")
    assert {path.name: path.read_text() for path in (tmp_path / "data").iterdir()} == {name: "mine"}


def test_a_file_and_no_name_are_refused(tokenizer, tmp_path):
    (tmp_path / "data").write_text("mine")
    for output, problem in ((tmp_path / "data", "output="), ("", "empty")):
        with pytest.raises(InputError, match=problem):
            run("not read", tokenizer, output)
    assert (tmp_path / "data").read_text() == "mine"


def test_an_empty_folder_is_filled(whole, corpus_file, tokenizer, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to("disk")
    run(corpus_file, tokenizer, tmp_path / "data", **AS_WHOLE)
    assert (tmp_path / "data").is_symlink()
    assert files(tmp_path / "disk") == files(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "disk"]


def test_a_dataset_written_meanwhile_is_kept(whole, corpus_file, tokenizer, tmp_path, monkeypatch):
    """Another process finishes the dataset while this one works."""
    build = shards.build

    def slow(*arguments):
        if not (tmp_path / "data").exists():
            shutil.copytree(whole, tmp_path / "data")
        return build(*arguments)

    monkeypatch.setattr(shards, "build", slow)
    with pytest.raises(InputError, match=f"output={tmp_path / 'data'}: "):
        run(corpus_file, tokenizer, tmp_path / "data", seq_len=32)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert files(tmp_path / "data") == files(whole)


def test_a_script_that_workers_cannot_import_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from bert_jax.data.preparation.worker_pool import map_tasks\nlist(map_tasks(len, 'ab', 2))\n")
    done = child_processes.run([sys.executable, script], timeout=120)
    # multiprocessing's resource tracker, another process, may print a warning after it.
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("bert_jax.errors.BertJaxError: ")]
    assert 'if __name__ == "__main__":' in error


# --- A killed process -------------------------------------------------------------------------------------------


def test_a_killed_prepare_starts_over(vocabulary_file, tokenizer, tmp_path):
    """Its workers end with it, and the next call deletes what it left."""
    (tmp_path / "big.txt").write_text(helpers.make_corpus(documents=6000))
    folder = tmp_path / "to" / "data"
    process = child_processes.start(
        helpers.command(
            "prepare", "--input", tmp_path / "big.txt", "--vocab", vocabulary_file, "--output", folder,
            "--sentences", "lines", "--bucket_tokens", 1024, "--workers", 2,
        ),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("to/*/*.array_record")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    tasks = Path(f"/proc/{process.pid}/task")
    if not tasks.exists():
        pytest.skip("needs /proc")
    children = [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    assert len(children) >= 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    while any(is_running(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(child) for child in children)
    (left,) = folder.parent.iterdir()
    assert left.name.startswith(".data.partial-")
    with pytest.raises(InputError, match=INFO_FILE):
        PreparedDataset(str(folder))
    run(tmp_path / "big.txt", tokenizer, folder, eval_fraction=0.01, bucket_tokens=1 << 20)
    assert list(folder.parent.iterdir()) == [folder]


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- Stores -----------------------------------------------------------------------------------------------------


def test_a_dataset_in_a_store(whole, corpus_file, tokenizer, store, tmp_path, monkeypatch):
    """Its record is uploaded last, so that an unfinished one is no dataset."""
    folder = epath.Path("gs://bucket/data")
    options = PrepareOptions(**SMALL, **AS_WHOLE)
    store.fail("torn/train-00003", status=403)
    with pytest.raises(InputError, match=r"gs://bucket/torn.*Forbidden"):
        prepare([str(corpus_file)], tokenizer, "gs://bucket/torn", options)
    store.faults.clear()
    assert "torn/tokenizer.json" in store.names()
    assert f"torn/{INFO_FILE}" not in store.names()
    with pytest.raises(InputError, match="output="):
        prepare([str(corpus_file)], tokenizer, "gs://bucket/torn", options)
    prepare([str(corpus_file)], tokenizer, str(folder), options)
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "provenance.json"}
    assert found == files(whole)
    assert f"data/{INFO_FILE}" in [request for request in store.requests if request.startswith("POST")][-1]


# --- The command line on a full disk ----------------------------------------------------------------------------


@pytest.mark.parametrize(("kilobytes", "workers"), [(40, 1), (200, 1), (200, 2)])
def test_prepare_on_a_full_disk(tmp_path, corpus_file, vocabulary_file, kilobytes, workers):
    """Fails in the first or the second pass: runs need 80 kB, the dataset more than 200 kB."""
    done = helpers.on_small_disk(
        tmp_path, kilobytes, "prepare", "--input", corpus_file, "--vocab", vocabulary_file, "--output",
        tmp_path / "disk" / "data", "--sentences", "lines", "--bucket_tokens", 4096, "--dupe_factor", 3, "--workers",
        workers,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "disk" in done.stderr.strip().split("\n")[-1]
    assert not done.stdout.strip()


# --- Memory -----------------------------------------------------------------------------------------------------

MEASURE = """
import resource, sys
from bert_jax.data.preparation.pipeline import PrepareOptions, prepare
from bert_jax.text.tokenizer import read_tokenizer
import bert_jax.data.preparation.sorted_runs as module
module.TOKENS_PER_RUN = 1 << 15
text, vocabulary, output = sys.argv[1:]
prepare([text], read_tokenizer(vocabulary), output,
        PrepareOptions(seq_len=64, sentences="lines", bucket_tokens=1 << 15))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_corpus(tmp_path, vocabulary_file):
    peaks: list[float] = []
    for number, documents in enumerate((500, 6_000)):
        text = tmp_path / f"{number}.txt"
        text.write_text(helpers.make_corpus(documents=documents))
        output = helpers.run_python(MEASURE, text, vocabulary_file, tmp_path / f"data{number}")
        peaks.append(int(output.split()[-1]) / 1024)
    # 2.5 MB of text take 20 MB as lists of arrays, one for each sentence.
    assert peaks[1] - peaks[0] < 7.5, peaks
    assert json.loads((tmp_path / "data1" / INFO_FILE).read_text())["splits"]["train"]["documents"] > 5_500
