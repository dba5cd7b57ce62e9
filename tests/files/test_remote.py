"""Files in a store, against an emulator whose answers fail."""

import asyncio
import gzip
import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import fsspec.config
import gcsfs.retry
import google.auth.exceptions
import pytest
import requests
from etils import epath
from gcsfs import GCSFileSystem
from support.gcs import Emulator

from bert_jax.cli import main
from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import atomic, remote
from bert_jax.files.line_reader import lines_from

FOLDER = epath.Path("gs://bucket/folder")


@pytest.fixture
def slept(monkeypatch) -> list[float]:
    """Replaces sleeping between retries; returns the requested waits in seconds."""
    waits: list[float] = []
    monkeypatch.setattr(remote, "time", SimpleNamespace(sleep=waits.append, monotonic=time.monotonic))
    return waits


# --- Paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"one\r", b"one\r\n", b"one\n", b"--one\n--two\r"])
def test_uploads_keep_every_byte(content: bytes, store: Emulator, tmp_path: Path):
    atomic.write_whole("gs://bucket/written", content)
    (tmp_path / "file").write_bytes(content)
    atomic.place(tmp_path / "file", epath.Path("gs://bucket/placed"))
    assert [store.read(name) for name in ("written", "placed")] == [content, content]


def test_a_remote_path_is_not_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(remote.absolute("gs://bucket/a")) == "gs://bucket/a"
    assert str(remote.absolute("a")) == str(tmp_path / "a")
    assert str(remote.parse_path("a")) == "a"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("ftp://host/a", "ftp://host/a: .*gs://"),
        ("gs://", "^gs://: "),
        ("s3://bucket/a", "s3://bucket/a: .*pip install s3fs"),
        ("gs://bucket/a", "gs://bucket/a: .*pip install 'gcsfs>="),
    ],
)
def test_paths_that_cannot_be_opened_are_refused(path, message, monkeypatch):
    if "pip install" in message:
        monkeypatch.setattr(remote.importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(InputError, match=message):
        remote.parse_path(path)


def test_a_bucket_with_a_typo_is_refused_and_not_made(store):
    with pytest.raises(InputError, match=r"^gs://buckte/data/.*FileNotFoundError"):
        atomic.make_folder(epath.Path("gs://buckte/data"))
    assert not store.count("POST /storage/v1/b?")
    assert not store.count("POST /storage/v1/b", "project")
    atomic.make_folder(FOLDER)
    assert store.names() == []


def test_files_of_folders_and_patterns(store):
    for name in ("a.txt", "b.txt", "sub/c.txt", ".hidden/d.txt", "sub/.e.txt", "x[1].txt"):
        atomic.write_whole(FOLDER / name, b"text")
    below = [f"{FOLDER}/{name}" for name in ("a.txt", "b.txt", "sub/c.txt", "x[1].txt")]
    assert remote.files(str(FOLDER)) == below
    assert remote.files(f"{FOLDER}/*.txt") == [below[0], below[1], below[3]]
    assert remote.files(f"{FOLDER}/s*") == [below[2]]
    assert remote.files(f"{FOLDER}/x[1].txt") == [below[3]]
    assert remote.files(f"{FOLDER}/none") == []


def test_writes_of_other_processes_are_visible(store):
    atomic.write_whole(FOLDER / "a", b"1")
    assert remote.sizes(FOLDER) == {"a": 1}
    before = remote.version(f"{FOLDER}/a")
    store.put("folder/a", b"2")
    store.put("folder/b", b"22")
    assert remote.sizes(FOLDER) == {"a": 1, "b": 2}
    assert [child.name for child in FOLDER.iterdir()] == ["a", "b"]
    assert remote.version(f"{FOLDER}/a") != before


# --- Whole files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["local", "remote"])
def test_writes_are_atomic(where, store, tmp_path):
    folder = FOLDER if where == "remote" else epath.Path(tmp_path)

    def names() -> list[str]:
        return store.names("folder/") if where == "remote" else [path.name for path in tmp_path.iterdir()]

    def fail():
        with atomic.whole_file(folder / "file") as file:
            file.write(b"half of it")
            file.flush()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert names() == []
    with atomic.whole_file(folder / "file") as file:
        file.write(b"all of it")
        assert not (folder / "file").exists()
    assert (folder / "file").read_bytes() == b"all of it"
    atomic.write_whole(folder / "file", b"another")
    with pytest.raises(KeyboardInterrupt):
        fail()
    assert (folder / "file").read_bytes() == b"another"
    assert len(names()) == 1


def test_pipes_and_symbolic_links_are_written_through(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    found = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    atomic.write_whole(tmp_path / "pipe", b"through it")
    reader.join(timeout=10)
    assert found == [b"through it"]
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to("file")
    atomic.write_whole(tmp_path / "link", b"behind it")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"behind it"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "pipe"]


def test_output_that_the_process_has_open_is_added_to(tmp_path):
    program = "import sys; from bert_jax.files import atomic; atomic.write_whole(sys.argv[1], b'row\\n')"
    output = tmp_path / "all.txt"
    output.write_text("old\n")
    with output.open("ab") as stdout:
        for name in ("/dev/stdout", "/dev/fd/1", "/dev/stdout"):
            stdout.write(b"new\n")
            stdout.flush()
            subprocess.run([sys.executable, "-c", program, name], stdout=stdout, check=True)
    assert output.read_text() == "old\n" + "new\nrow\n" * 3
    assert [path.name for path in tmp_path.iterdir()] == ["all.txt"]


def test_folder_uploads_are_atomic(store, tmp_path):
    for name in ("a", "b", "config.json"):
        (tmp_path / name).write_text(name)
    store.fail("POST", "config.json", status=403)
    with pytest.raises(InputError, match=r"^gs://bucket/folder/config\.json: .*Forbidden"):
        atomic.upload_folder(tmp_path, FOLDER, last="config.json")
    assert store.names() == []
    store.faults.clear()
    atomic.upload_folder(tmp_path, FOLDER, last="a")
    puts = [request for request in store.requests if request.startswith("POST")]
    assert "folder/a" in puts[-1]


# --- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503])
def test_retries_of_gcsfs_are_logged(status, store, caplog):
    store.put("folder/a", b"text")
    store.fail("GET", "folder/a", status=status, times=1)
    library = logging.getLogger("gcsfs")
    before = library.handlers, library.level, library.propagate
    try:
        remote.RetryWarnings.attach()
        assert remote.size(FOLDER / "a") == 4
    finally:
        library.handlers, library.propagate = before[0], before[2]
        library.setLevel(before[1])
    warnings = [record.getMessage() for record in caplog.records if record.name == "bert_jax.files.remote"]
    assert len(warnings) == 1
    assert str(status) in warnings[0]


@pytest.mark.parametrize(("status", "message"), [(403, "Forbidden"), (404, "FileNotFoundError")])
def test_permanent_store_errors_are_raised_without_a_retry(status, message, store, slept):
    store.put("folder/a", b"text")
    store.requests.clear()
    store.fail("folder/a", status=status)
    with pytest.raises(InputError, match=rf"^gs://bucket/folder/a: .*{message}"):
        atomic.read_whole(FOLDER / "a")
    assert slept == []
    assert store.count("folder/a") <= 2
    with pytest.raises(InputError, match=message):
        atomic.write_whole(FOLDER / "a", b"new") if status == 403 else remote.size(FOLDER / "none")


def of_library(module: str, *names: str) -> Exception:
    """Returns an error of a library that need not be installed; `names` are its class and base classes."""
    kind: type = Exception
    for name in reversed(names):
        kind = type(name, (kind,), {"__module__": module})
    return kind("message")


def unknown_host(number: int) -> aiohttp.ClientConnectorDNSError:
    key = SimpleNamespace(host="s3.mars-1.amazonaws.com", port=443, ssl=True, is_ssl=True)
    return aiohttp.ClientConnectorDNSError(key, socket.gaierror(number, "not known"))


PERMANENT = [
    of_library("botocore.exceptions", "NoCredentialsError", "BotoCoreError"),
    of_library("botocore.exceptions", "ParamValidationError", "BotoCoreError"),
    of_library("botocore.exceptions", "InvalidRegionError", "ValidationError", "BotoCoreError"),
    of_library("botocore.exceptions", "NoRegionError", "BaseEndpointResolverError", "BotoCoreError"),
    of_library("azure.core.exceptions", "ClientAuthenticationError", "HttpResponseError"),
    google.auth.exceptions.DefaultCredentialsError("no credentials"),
    google.auth.exceptions.RefreshError("invalid_grant: Bad Request"),
    aiohttp.InvalidURL("gs:// bucket"),
    requests.exceptions.MissingSchema("no scheme"),
    gcsfs.retry.HttpError({"code": 400, "message": "Invalid bucket name: 'A_b'"}),
    ValueError("Bad Request: b/A_b/o\ninvalid bucket"),
    unknown_host(socket.EAI_NONAME),
]
TRANSIENT = [
    of_library("botocore.exceptions", "EndpointConnectionError", "ConnectionError", "BotoCoreError"),
    of_library("botocore.exceptions", "ReadTimeoutError", "HTTPClientError", "BotoCoreError"),
    of_library("azure.core.exceptions", "ServiceRequestError", "AzureError"),
    aiohttp.ServerDisconnectedError(),
    requests.exceptions.ReadTimeout("slow"),
    google.auth.exceptions.TransportError("metadata server"),
    google.auth.exceptions.RefreshError("metadata server"),
    gcsfs.retry.ChecksumError("md5"),
    unknown_host(socket.EAI_AGAIN),
]


@pytest.mark.parametrize("error", PERMANENT, ids=lambda error: type(error).__name__)
def test_a_permanent_error_is_not_retried(error: Exception, slept, monkeypatch):
    monkeypatch.setattr(remote, "_answered", set())

    def fail() -> None:
        raise error

    with pytest.raises(InputError, match=rf"^gs://bucket/folder: .*{type(error).__name__}"):
        remote.retry_transient(FOLDER, fail)
    assert slept == []


@pytest.mark.parametrize("error", TRANSIENT, ids=lambda error: type(error).__name__)
def test_a_transient_error_is_retried(error: Exception, slept, monkeypatch):
    monkeypatch.setattr(remote, "_answered", set())
    failures = [error, error]

    def sometimes() -> str:
        if failures:
            raise failures.pop()
        return "done"

    assert remote.retry_transient(FOLDER, sometimes) == "done"
    assert len(slept) == 2


def test_host_that_answered_before_is_retried(slept, monkeypatch):
    monkeypatch.setattr(remote, "_answered", set())
    assert remote.retry_transient(FOLDER, lambda: "done") == "done"
    failures = [unknown_host(socket.EAI_NONAME)]
    found = remote.retry_transient(FOLDER / "a", lambda: (_ for _ in ()).throw(failures.pop()) if failures else "done")
    assert found == "done"
    assert len(slept) == 1


def test_transient_errors_are_retried_for_minutes(monkeypatch, caplog):
    now = [0.0]
    pass_by = lambda seconds: now.__setitem__(0, now[0] + seconds)  # noqa: E731
    monkeypatch.setattr(remote, "time", SimpleNamespace(sleep=pass_by, monotonic=lambda: now[0]))
    failures = [ConnectionResetError("by peer"), TimeoutError(), remote.IncompleteError("half arrived")]

    def sometimes() -> str:
        if failures:
            raise failures.pop()
        return "done"

    assert remote.retry_transient(FOLDER, sometimes) == "done"
    assert len(caplog.records) == 3
    assert now[0] < 10

    def never() -> None:
        raise ConnectionResetError("by peer")

    with pytest.raises(
        BertJaxError, match=r"^gs://bucket/folder: .*\d+.* \d{3} s \(ConnectionResetError: by peer\)"
    ) as failed:
        remote.retry_transient(FOLDER, never)
    assert failed.value.exit_status == 1
    assert remote.PATIENCE_SECONDS - remote.LONGEST_WAIT_SECONDS < now[0] < remote.PATIENCE_SECONDS + 10


def test_programming_errors_are_not_retried(slept):
    with pytest.raises(ZeroDivisionError):
        remote.retry_transient(FOLDER, lambda: 1 // 0)
    assert slept == []


def test_silent_connection_times_out(store, monkeypatch):
    monkeypatch.setattr(fsspec.config, "conf", {})
    monkeypatch.setattr(remote, "SILENCE_SECONDS", 0.3)
    store.put("folder/a", b"text")
    store.stall("GET", "folder/a", seconds=1.0, times=1)
    assert atomic.read_whole(remote.parse_path(f"{FOLDER}/a")) == b"text"
    assert store.count("GET", "folder/a") == 2


def test_large_files_are_uploaded_in_chunks(store, tmp_path):
    content = random.Random(0).randbytes(11 << 20)
    (tmp_path / "large").write_bytes(content)
    store.fail("uploadType=resumable", "upload_id", status=503, times=1)
    atomic.place(tmp_path / "large", FOLDER / "large")
    assert store.read("folder/large") == content
    atomic.copy(FOLDER / "large", FOLDER / "copy")
    atomic.download(FOLDER / "copy", tmp_path / "copy", size=len(content))
    assert (tmp_path / "copy").read_bytes() == content


@pytest.mark.parametrize("honest", [True, False])
def test_truncated_download_is_retried(honest, store, tmp_path, slept):
    store.put("folder/a", b"0123456789")
    store.cut("GET", "alt=media", name="folder/a", times=1, honest=honest)
    atomic.download(FOLDER / "a", tmp_path / "a", size=10)
    assert (tmp_path / "a").read_bytes() == b"0123456789"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert len(slept) == honest  # gcsfs retries the other


def test_a_download_that_always_ends_early_fails(store, tmp_path, slept):
    store.put("folder/a", b"0123456789")
    store.cut("GET", "alt=media", name="folder/a", times=100, honest=True)
    with pytest.raises(BertJaxError, match=r"\b5\b.*\b10 bytes"):
        atomic.download(FOLDER / "a", tmp_path / "a", size=10)
    assert list(tmp_path.iterdir()) == []
    assert len(slept) == remote.DAMAGED_TRIES - 1


def test_reading_a_corpus_resumes_after_lost_connections(store, slept, monkeypatch):
    """Connections fail more often than gcsfs retries."""
    pause = asyncio.sleep
    monkeypatch.setattr(gcsfs.retry, "asyncio", SimpleNamespace(sleep=lambda _: pause(0)))
    lines = [f"line {number}".encode() for number in range(200_000)]
    store.put("folder/a.txt.gz", gzip.compress(b"\n".join(lines), 1))
    store.put("folder/a.txt", b"\n".join(lines))
    store.fail("GET", "alt=media", status=503, times=GCSFileSystem.retries + 1)
    assert [line for _, line in lines_from(f"{FOLDER}/a.txt.gz", 0, None)] == lines
    assert len(slept) == 1
    offset = len(b"\n".join(lines[:100_000])) + 1
    assert [line for _, line in lines_from(f"{FOLDER}/a.txt", offset, None)] == lines[100_000:]


@pytest.mark.parametrize(
    ("status", "expected", "message"),
    [(403, 2, "Forbidden"), (404, 2, "FileNotFoundError"), (503, 1, "503")],
)
def test_store_errors_inside_a_library_are_one_line(status, expected, message, monkeypatch, capsys):
    """Libraries such as Orbax access the store themselves."""

    def save(*_: object) -> None:
        try:
            gcsfs.retry.validate_response(status, b"", "b/bucket/o/a")
        except Exception as error:
            raise ValueError("the save failed") from error

    monkeypatch.setattr("bert_jax.tracking.report.curve_images.plot_curves", save)
    assert main(["report", "run", "--output", "curves.png"]) == expected
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_commands_report_store_errors_in_one_line(store, capsys, tmp_path, vocabulary_file, corpus_file):
    store.put("folder/vocab.txt", b"x")
    denied = f"{FOLDER}/denied"
    store.fail("denied", status=403)
    given = ["--input", str(corpus_file), "--vocab", str(vocabulary_file)]
    for command, message in [
        (["inspect", "gs://nothing/data"], "gs://nothing/data"),
        (["inspect", denied], "Forbidden"),
        (["prepare", *given, "--output", "gs://nothing/data"], "gs://nothing/data"),
        (["prepare", *given, "--output", denied], "Forbidden"),
        (
            ["prepare", "--input", f"{FOLDER}/*.md", *given[2:], "--output", str(tmp_path / "a")],
            f"{FOLDER}/*.md",
        ),
        (
            ["prepare", *given[:2], "--vocab", f"{FOLDER}/none.txt", "--output", str(tmp_path / "a")],
            f"{FOLDER}/none.txt",
        ),
        (["evaluate", "--checkpoint", f"{FOLDER}/none", "--data", denied], f"{FOLDER}/none"),
        (["export", "--checkpoint", denied, "--output", str(tmp_path / "b")], "Forbidden"),
        (["import", "--source", f"{FOLDER}/none", "--output", str(tmp_path / "b")], f"{FOLDER}/none"),
        (["report", f"{FOLDER}/none", "--output", str(tmp_path / "c.png")], f"{FOLDER}/none"),
        (
            ["vocab", "--input", str(corpus_file), "--output", "gs://nothing/vocab.txt", "--size", "200"],
            "gs://nothing/",
        ),
    ]:
        began = time.monotonic()
        assert main(command) == 2, command
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bert-jax ")]
        assert len(lines) == 1, lines
        assert message in lines[0], lines
        assert time.monotonic() - began < 10
