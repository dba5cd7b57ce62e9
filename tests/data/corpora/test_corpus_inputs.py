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

TABLES = ["wiki/ab/train-0.parquet", "wiki/en/train-0.parquet"]
NO_TEXT = [
    "README.md", "LICENSE", "CITATION.cff", "dataset_infos.json", "ab/readme_ab.md", "en/_SUCCESS", "data/dataset.json",
    "data/train-lengths.npy", "data/train-00000-of-00001.array_record", "data/tokenizer.json", "run/metrics.jsonl",
    "model/vocab.txt", "model/config.json", "model/model.safetensors", "model/spiece.model",
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
    write(*TABLES, *(f"wiki/{name}" for name in (*NO_TEXT, ".gitattributes", ".cache/x.parquet")))
    assert expand([pattern, "wiki/README.md"]) == [*TABLES, "wiki/README.md"]
    (message,) = caplog.messages
    assert f"--input={pattern}: skipped" in message
    assert "wiki/README.md" in message or "wiki/LICENSE" in message
    assert f"{len(NO_TEXT) - 5} more" in message


def test_a_folder_of_such_files_alone_is_read(write, caplog):
    write("d/README.md", "d/more/LICENSE.txt")
    assert expand(["d"]) == ["d/README.md", "d/more/LICENSE.txt"]
    assert not caplog.records


def test_the_vocabulary_of_the_command_is_no_input(write):
    write("a.txt", "words.txt")
    assert [piece.path for piece in plan(["*.txt"], CorpusOptions(), vocabulary="words.txt")] == ["a.txt"]
    with pytest.raises(InputError, match=r"input=words\.txt"):
        plan(["words.txt"], CorpusOptions(), vocabulary="words.txt")


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
    for name in ("wiki/en/a.parquet", "wiki/README.md", "wiki/.gitattributes", "text/README.md"):
        store.put(name, b"text")
    assert expand(["gs://bucket/wiki"]) == ["gs://bucket/wiki/en/a.parquet"]
    assert "gs://bucket/wiki/README.md" in caplog.text
    assert expand(["gs://bucket/text"]) == ["gs://bucket/text/README.md"]


@pytest.mark.parametrize("name", [b"caf\xe9.txt", b"caf\xe9/a.txt"])
def test_a_name_that_is_not_utf8_is_refused_in_one_line(name, tmp_path, vocabulary_file, capsys):
    path = os.fsdecode(os.fsencode(tmp_path / "d") + b"/" + name)
    os.makedirs(os.path.dirname(path))
    Path(path).write_text("the ship .\n\nthe storm .\n")
    (tmp_path / "a.txt").write_text("the ship .\n\nthe storm .\n")
    output = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    good = {"--input": tmp_path / "a.txt", "--output": tmp_path / "data", "--scratch": tmp_path / "s"}
    for changed in ({"--input": path}, {"--input": tmp_path / "d"}, {"--output": output}, {"--scratch": output}):
        options = [str(word) for option in {**good, **changed}.items() for word in option]
        assert cli.main(["prepare", "--vocab", str(vocabulary_file), *options]) == 2
        error = capsys.readouterr().err
        assert r"caf\xe9" in error
        assert error.count("\n") == 1


# --- Streams ----------------------------------------------------------------------------------------------------

DOCUMENTS = helpers.make_corpus(documents=60).strip().split("\n\n")
TEXT = "\n\n".join(DOCUMENTS).encode()
LINES = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS).encode()


@pytest.fixture
def pipe(monkeypatch):
    def set_stdin(content, is_terminal=False):
        found = SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: is_terminal)
        monkeypatch.setattr(sys, "stdin", found)

    return set_stdin


@pytest.mark.parametrize(
    ("content", "before"), [(TEXT, []), (LINES, []), ("\n\n".join(DOCUMENTS[30:]).encode(), ["a.txt"])]
)
def test_stdin_gives_the_bytes_of_a_file(content, before, pipe, tokenizer, tmp_path):
    (tmp_path / "all.txt").write_bytes(TEXT)
    (tmp_path / "a.txt").write_bytes("\n\n".join(DOCUMENTS[:30]).encode())
    run(tmp_path / "all.txt", tokenizer, tmp_path / "file")
    pipe(content)
    run([*(tmp_path / name for name in before), "-", "-"], tokenizer, tmp_path / "data")
    assert files(tmp_path / "data") == files(tmp_path / "file")
    record = json.loads((tmp_path / "data" / provenance.FILE).read_text())["runs"][0]["inputs"]["corpus"]
    assert record["files"][len(before) :] == [{"path": "-", "bytes": len(content)}]


def test_errors_name_stdin(pipe, tokenizer, tmp_path):
    pipe(b"the ship .\n\nthe caf\xe9 .\n")
    with pytest.raises(InputError, match=r"/stdin:3: "):
        run("-", tokenizer, tmp_path / "data")


@pytest.mark.parametrize(("content", "is_terminal", "word"), [(b"", False, "no bytes"), (b"text", True, "terminal")])
def test_stdin_without_text_is_refused(content, is_terminal, word, pipe, tokenizer, tmp_path):
    pipe(content, is_terminal)
    with pytest.raises(InputError, match=f"^input=-: .*{word}"):
        run("-", tokenizer, tmp_path / "data")


def test_vocab_reads_stdin(pipe, tmp_path):
    pipe(LINES)
    output = tmp_path / "a.json"
    assert cli.main(["vocab", "--input", "-", "--output", str(output), "--size", "300", "--quiet"]) == 0
    assert "ship" in output.read_text()


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
