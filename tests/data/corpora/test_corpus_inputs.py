"""Files of folders and patterns: those that are no text are skipped. Streams are copied."""

import errno
import io
import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import helpers
from support.preparing import files, run

from bert_jax import cli
from bert_jax.data.corpora.corpus import CorpusOptions, plan
from bert_jax.data.corpora.corpus_inputs import expand
from bert_jax.errors import InputError
from bert_jax.files import provenance

TEXT = ["wiki/a.TXT", "wiki/ab/c.json.gz", "wiki/ab/train-0.parquet", "wiki/en/train-0.csv.zst", "wiki/en/wiki_00"]
NO_TEXT = [
    "README.md", "LICENSE", "CITATION.cff", "dataset_infos.json", "ab/readme_ab.txt", "en/_SUCCESS",
    "data/dataset.json", "data/train-00000-of-00001.array_record", "run/metrics.jsonl", "model/vocab.txt",
    "model/spiece.model", "clean.py", "run.yaml",
]  # fmt: skip


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write_files(*names):
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("text")

    return write_files


@pytest.mark.parametrize("pattern", ["wiki", "wiki/**", "w*"])
def test_files_that_are_no_text_are_skipped_and_logged(write, pattern, caplog):
    write(*TEXT, *(f"wiki/{name}" for name in (*NO_TEXT, ".gitattributes", ".cache/x.parquet")))
    assert expand([pattern, "wiki/README.md", "wiki/*.yaml"]) == [*TEXT, "wiki/README.md", "wiki/run.yaml"]
    (message,) = caplog.messages
    assert f"--input={pattern}: skipped {len(NO_TEXT)} file(s)" in message
    assert "wiki/CITATION.cff" in message


def test_a_pattern_with_another_extension_reads_its_files_compressed_too(write):
    write("w/a.md", "w/b.md.gz", "w/c.warc.wet.gz", "w/d.cff.gz")
    assert expand(["w/*.md"]) == ["w/a.md"]
    assert expand(["w/*.md.gz", "w/*.wet.gz"]) == ["w/b.md.gz", "w/c.warc.wet.gz"]


def test_a_pipe_in_a_folder_is_no_input(write):
    write("c/a.txt")
    os.mkfifo("c/pipe")
    assert expand(["c"]) == ["c/a.txt"]


@pytest.mark.timeout(20)
def test_links_that_lead_back_up_are_followed_once(write, tmp_path):
    write("c/a.txt", "c/d/b.txt", "elsewhere/e.txt")
    for link, target in {
        "c/again": ".", "c/back": ".", "c/d/up": "..", "c/d/far": "../../elsewhere", "c/d/here": "../d",
        "c/z.txt": "a.txt",
    }.items():  # fmt: skip
        (tmp_path / link).symlink_to(target)
    assert expand(["c"]) == ["c/a.txt", "c/d/b.txt", "c/d/far/e.txt"]


@pytest.mark.parametrize("pattern", ["d", "d/**", "d/**/*.txt", "d/*/*.txt"])
def test_a_folder_that_cannot_be_read_is_refused(write, pattern, monkeypatch):
    write("d/a.txt", "d/open/b.txt", "d/open/e/b.txt", "d/closed/c.txt")
    real = os.scandir

    def scandir(path):
        if str(path).rstrip("/") == "d/closed":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError, match="d/closed"):
        expand([pattern])


def test_a_link_to_nothing_is_refused(write):
    write("d/a.txt")
    os.symlink("missing", "d/gone.txt")
    with pytest.raises(InputError, match=r"d/gone\.txt"):
        plan(["d"], CorpusOptions())


def test_files_of_a_store(store, caplog):
    for name in ("wiki/en/a.parquet", "wiki/README.md", "wiki/.gitattributes"):
        store.put(name, b"text")
    assert expand(["gs://bucket/wiki"]) == ["gs://bucket/wiki/en/a.parquet"]
    assert "gs://bucket/wiki/README.md" in caplog.text
    assert expand(["gs://bucket/wiki/README.md"]) == ["gs://bucket/wiki/README.md"]


@pytest.mark.parametrize("name", [b"caf\xe9.txt", b"caf\xe9/a.txt"])
def test_a_name_that_is_not_utf8_is_refused_in_one_line(name, tmp_path, vocabulary_file, capsys):
    path = os.fsdecode(os.fsencode(tmp_path / "d") + b"/" + name)
    os.makedirs(os.path.dirname(path))
    Path(path).write_text("the ship .\n\nthe storm .\n")
    (tmp_path / "a.txt").write_text("the ship .\n\nthe storm .\n")
    output = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    good = {"--input": tmp_path / "a.txt", "--output": tmp_path / "data"}
    for changed in ({"--input": path}, {"--input": tmp_path / "d"}, {"--output": output}):
        options = [str(word) for option in {**good, **changed}.items() for word in option]
        assert cli.main(["prepare", "--vocab", str(vocabulary_file), *options]) == 2
        error = capsys.readouterr().err
        assert r"caf\xe9" in error
        assert error.count("\n") == 1


# --- Streams ----------------------------------------------------------------------------------------------------

DOCUMENTS = helpers.make_corpus(documents=60).strip().split("\n\n")
WHOLE = "\n\n".join(DOCUMENTS).encode()
LINES = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS).encode()


@pytest.fixture
def pipe(monkeypatch):
    return lambda content: monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))


@pytest.mark.parametrize(
    ("content", "before"), [(WHOLE, []), (LINES, []), ("\n\n".join(DOCUMENTS[30:]).encode(), ["a.txt"])]
)
def test_stdin_gives_the_bytes_of_a_file(content, before, pipe, tokenizer, tmp_path):
    (tmp_path / "all.txt").write_bytes(WHOLE)
    (tmp_path / "a.txt").write_bytes("\n\n".join(DOCUMENTS[:30]).encode())
    run(tmp_path / "all.txt", tokenizer, tmp_path / "file")
    pipe(content)
    run([*(tmp_path / name for name in before), "-", "-"], tokenizer, tmp_path / "data")
    assert files(tmp_path / "data") == files(tmp_path / "file")
    record = json.loads((tmp_path / "data" / provenance.FILE).read_text())["runs"][0]["inputs"]["corpus"]
    assert record["files"][len(before) :] == [{"path": "-", "bytes": len(content)}]


def test_vocab_reads_stdin(pipe, tmp_path):
    pipe(LINES)
    output = tmp_path / "a.json"
    assert cli.main(["vocab", "--input", "-", "--output", str(output), "--size", "300", "--quiet"]) == 0
    assert "ship" in output.read_text()


@pytest.mark.parametrize("command", ["vocab", "prepare"])
def test_errors_of_stdin_name_it(command, pipe, vocabulary_file, tmp_path, capsys):
    pipe(b"the ship .\n\xff\n")
    more = {"vocab": ["--output", "a.json"], "prepare": ["--vocab", vocabulary_file, "--output", "data"]}[command]
    words = [command, "--input", "-", *more[:-1], tmp_path / more[-1]]
    assert cli.main([str(word) for word in words]) == 2
    (line,) = helpers.error_lines(capsys.readouterr().err)
    assert " -:2: not UTF-8" in line


@pytest.mark.parametrize("form", ["fifo", "/dev/stdin", "/dev/fd"])
def test_pipes_are_read_as_stdin_is(form, vocabulary_file, tmp_path):
    """Two workers, each of which would read the pipe anew."""
    arguments = ["--vocab", vocabulary_file, "--output", tmp_path / "data", "--workers", 2]
    (tmp_path / "a.jsonl").write_bytes(LINES)
    command, options = [], {}
    if form == "fifo":
        os.mkfifo(tmp_path / "pipe")
        threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(LINES,), daemon=True).start()
        command = helpers.command("prepare", "--input", tmp_path / "pipe", *arguments)
    elif form == "/dev/fd":
        words = shlex.join(map(str, helpers.command("prepare", *arguments, "--input")))
        command = ["bash", "-c", f"{words} <(cat {tmp_path}/a.jsonl)"]
    else:
        command, options = helpers.command("prepare", "--input", form, *arguments), {"input": LINES}
    result = subprocess.run(
        command, env=helpers.child_environment(), capture_output=True, timeout=120, check=False, **options
    )
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "data" / "dataset.json").read_text())["splits"]["train"]["documents"] > 50
