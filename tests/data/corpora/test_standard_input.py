"""The input `-`: stdin."""

import hashlib
import io
import json
import os
import shlex
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from support import helpers
from support.preparing import files, run

from bert_jax import cli
from bert_jax.errors import InputError
from bert_jax.files import provenance

DOCUMENTS = helpers.make_corpus(documents=60).strip().split("\n\n")
TEXT = "\n\n".join(DOCUMENTS).encode()
LINES = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS).encode()


@pytest.fixture
def pipe(monkeypatch):
    def set_stdin(content, is_terminal=False):
        found = SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: is_terminal)
        monkeypatch.setattr(sys, "stdin", found)

    return set_stdin


@pytest.mark.parametrize("content", [TEXT, LINES], ids=["text", "json"])
def test_stdin_gives_the_bytes_of_a_file(content, pipe, tokenizer, tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXT)
    run(tmp_path / "a.txt", tokenizer, tmp_path / "file")
    pipe(content)
    run("-", tokenizer, tmp_path / "data")
    assert files(tmp_path / "data") == files(tmp_path / "file")
    record = json.loads((tmp_path / "data" / provenance.FILE).read_text())
    assert record["runs"][0]["inputs"]["corpus"] == {
        "count": 1, "bytes": len(content),
        "files": [{"path": "-", "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}],
    }  # fmt: skip


def test_stdin_beside_files(pipe, tokenizer, tmp_path):
    (tmp_path / "a.txt").write_bytes("\n\n".join(DOCUMENTS[:30]).encode())
    (tmp_path / "all.txt").write_bytes(TEXT)
    run(tmp_path / "all.txt", tokenizer, tmp_path / "file")
    pipe("\n\n".join(DOCUMENTS[30:]).encode())
    run([tmp_path / "a.txt", "-", "-"], tokenizer, tmp_path / "data")
    assert files(tmp_path / "data") == files(tmp_path / "file")


def test_errors_name_stdin(pipe, tokenizer, tmp_path):
    pipe(b"the ship .\n\nthe caf\xe9 .\n")
    with pytest.raises(InputError, match=r"^stdin:3: "):
        run("-", tokenizer, tmp_path / "data")


def test_warnings_name_stdin(pipe, vocabulary_file, tmp_path, capsys):
    pipe(TEXT + b"\nthe caf\xe9 .\n")
    options = ["--vocab", vocabulary_file, "--output", tmp_path / "data", "--errors", "replace", "--workers", 1]
    assert cli.main([str(word) for word in ["prepare", "--input", "-", *options]]) == 0
    [line] = [line for line in capsys.readouterr().err.splitlines() if "U+FFFD" in line]
    assert "-stdin: " in line


@pytest.mark.parametrize(("content", "is_terminal", "word"), [(b"", False, "no bytes"), (b"text", True, "terminal")])
def test_stdin_without_text_is_refused(content, is_terminal, word, pipe, tokenizer, tmp_path):
    pipe(content, is_terminal)
    with pytest.raises(InputError, match=f"^input=-: .*{word}"):
        run("-", tokenizer, tmp_path / "data")


def test_vocab_reads_stdin(pipe, tmp_path):
    pieces = {}
    for name, content in {"a": LINES, "b": TEXT}.items():
        pipe(content)
        output = tmp_path / f"{name}.json"
        assert cli.main(["vocab", "--input", "-", "--output", str(output), "--size", "300", "--quiet"]) == 0
        pieces[name] = output.read_text()
    assert pieces["a"] == pieces["b"]
    assert "ship" in pieces["a"]


@pytest.mark.parametrize("form", ["fifo", "-", "/dev/stdin", "/dev/stdin of a file", "/dev/fd"])
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
        command = helpers.command("prepare", "--input", form.split()[0], *arguments)
        options = {"input": LINES} if "file" not in form else {"stdin": open(tmp_path / "a.jsonl", "rb")}  # noqa: SIM115
    result = subprocess.run(
        command, env=helpers.child_environment(), capture_output=True, timeout=120, check=False, **options
    )
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "data" / "dataset.json").read_text())["splits"]["train"]["documents"] > 50
    [file] = json.loads((tmp_path / "data" / provenance.FILE).read_text())["runs"][0]["inputs"]["corpus"]["files"]
    assert file["bytes"] == len(LINES)
    assert file["sha256"] == hashlib.sha256(LINES).hexdigest()


def test_a_cluster_cannot_read_stdin(vocabulary_file, tmp_path, capsys):
    pytest.importorskip("apache_beam")
    arguments = ["prepare", "--input", "-", "--vocab", vocabulary_file, "--output", tmp_path / "data"]
    assert cli.main([str(argument) for argument in [*arguments, "--runner", "FlinkRunner"]]) == 2
    assert "--runner=FlinkRunner" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
