"""Files in a store, against an emulator whose answers fail."""

import asyncio
import errno
import os
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import gcsfs.retry
import pytest
from etils import epath
from gcsfs import GCSFileSystem
from support.gcs import Emulator

from bert_jax.cli import main
from bert_jax.data.corpora.corpus_inputs import expand
from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import atomic, remote
from bert_jax.files.remote import cache_folder
from bert_jax.files.text_files import lines_from

FOLDER = epath.Path("gs://bucket/folder")


# --- Paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"one\r", b"one\r\n", b"one\n", b"--one\n--two\r"])
def test_uploads_keep_every_byte(content: bytes, store: Emulator):
    atomic.write_whole("gs://bucket/written", content)
    assert store.read("written") == content


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("ftp://host/a", "ftp://host/a: .*gs://"),
        ("gs://", "^gs://: "),
        ("s3://bucket/a", "s3://bucket/a: .*pip install s3fs"),
        ("gs://bucket/a", "gs://bucket/a: .*pip install gcsfs"),
    ],
)
def test_paths_that_cannot_be_opened_are_refused(path, message, monkeypatch):
    if "pip install" in message:
        monkeypatch.setattr(remote.importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(InputError, match=message):
        remote.parse_path(path)


def test_an_error_is_not_taken_for_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without its checkpoints, a run would begin anew."""

    def stale(path: object, **_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), os.fspath(path))

    folder = epath.Path(tmp_path)
    assert (remote.children(folder / "none"), remote.exists(folder / "none")) == ([], False)
    assert remote.exists(folder)
    for function in ("stat", "listdir"):
        monkeypatch.setattr(os, function, stale)
    for read in (remote.exists, remote.children, remote.is_taken):
        with pytest.raises(OSError, match=str(tmp_path)):
            read(folder)


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
    assert expand([str(FOLDER)]) == below
    assert expand([f"{FOLDER}/*.txt"]) == [below[0], below[1], below[3]]
    assert expand([f"{FOLDER}/s*"]) == [below[2]]
    assert expand([f"{FOLDER}/x[1].txt"]) == [below[3]]
    with pytest.raises(InputError, match=f"{FOLDER}/none"):
        expand([f"{FOLDER}/none"])


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


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no folder in memory")
def test_a_file_on_a_disk_in_memory_is_replaced():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        atomic.check_file_output(f"{folder}/new/file")
        for content in (b"first", b"second"):
            atomic.write_whole(f"{folder}/new/file", content)
        assert Path(folder, "new", "file").read_bytes() == b"second"


def test_what_is_printed_follows_the_rows_of_a_redirected_stdout(capfd):
    atomic.write_whole("/dev/stdout", b"rows\n")
    os.write(1, b"{}\n")
    assert capfd.readouterr().out == "rows\n{}\n"


@pytest.mark.parametrize("where", ["local", "remote"])
def test_folders_are_published_whole(where: str, store, tmp_path: Path):
    folder = FOLDER if where == "remote" else epath.Path(tmp_path / "output")
    (tmp_path / ".output.partial-0").mkdir()  # left by a killed process
    (tmp_path / ".output.partial-0" / "old").touch()

    def make() -> None:
        with atomic.whole_folder(folder, last="a") as made:
            for name in ("a", "b", "c"):
                (made / name).write_text(name)
            assert not remote.exists(folder / "a")
            if fails:
                raise KeyboardInterrupt

    fails = True
    with pytest.raises(KeyboardInterrupt):
        make()
    assert not remote.is_taken(folder)
    fails = False
    make()
    assert [child.name for child in remote.children(folder)] == ["a", "b", "c"]
    if where == "remote":
        assert "folder/a" in [request for request in store.requests if request.startswith("POST")][-1]
    with pytest.raises(InputError, match="not empty"):
        atomic.new_folder(str(folder))


@pytest.mark.parametrize("taken", [True, False])
def test_two_writers_of_a_folder_never_mix(taken: bool, tmp_path: Path):
    folder = epath.Path(tmp_path / "output")
    with ExitStack() as stack:
        second = stack.enter_context(pytest.raises(InputError, match=f"output={folder}")) if taken else None
        first = stack.enter_context(atomic.whole_folder(folder, last="a"))
        (first / "a").write_text("first")
        if second:
            with atomic.whole_folder(folder, last="a") as other:
                assert other != first
                (other / "b").write_text("second")
    assert [path.name for path in tmp_path.iterdir()] == ["output"]
    assert [path.name for path in folder.iterdir()] == ["b" if taken else "a"]


@pytest.mark.parametrize("name", [".", "../here", "{}"])
def test_the_working_folder_is_no_output(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match="working folder"):
        atomic.new_folder(name.format(tmp_path / "here"))


@pytest.mark.parametrize("name", ["", "folder/", "old", "a.jsonl.gz", "a.XZ"])
def test_output_that_is_no_file_is_refused(name: str, tmp_path: Path):
    (tmp_path / "old").mkdir()
    with pytest.raises(InputError, match=r"^output=.*expected a file"):
        atomic.check_file_output(f"{tmp_path}/{name}")
    with pytest.raises(InputError, match=r"^output=-: .*/dev/stdout"):
        atomic.check_file_output("-")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_output_that_cannot_be_written_is_refused(tmp_path: Path):
    atomic.check_file_output(str(tmp_path / "new" / "file"))
    assert list((tmp_path / "new").iterdir()) == []
    for stream in ("/dev/stdout", "/dev/null"):
        atomic.check_file_output(stream, is_new=True)
    with pytest.raises(OSError, match="/proc/"):
        atomic.check_file_output("/proc/file")


# --- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "message"), [(403, "Forbidden"), (404, "FileNotFoundError")])
def test_errors_that_stay_are_raised_without_a_retry(status, message, store):
    store.put("folder/a", b"text")
    store.requests.clear()
    store.fail("folder/a", status=status)
    with pytest.raises(InputError, match=rf"^gs://bucket/folder/a: .*{message}"):
        atomic.read_whole(FOLDER / "a")
    assert store.count("folder/a") <= 2
    with pytest.raises(InputError, match=message):
        atomic.write_whole(FOLDER / "a", b"new") if status == 403 else atomic.read_whole(FOLDER / "none")


def test_errors_that_pass_are_retried_by_the_library_and_then_end_the_command(store, monkeypatch):
    pause = asyncio.sleep
    monkeypatch.setattr(gcsfs.retry, "asyncio", SimpleNamespace(sleep=lambda _: pause(0)))
    store.put("folder/a.txt", b"one\ntwo")
    store.fail("GET", "alt=media", status=503, times=GCSFileSystem.retries - 1)
    assert [line for _, line in lines_from(f"{FOLDER}/a.txt", 4, None)] == [b"two"]
    store.fail("GET", "alt=media", status=503, times=GCSFileSystem.retries)
    with pytest.raises(BertJaxError, match=r"^gs://bucket/folder/a\.txt: .*503") as failed:
        atomic.read_whole(FOLDER / "a.txt")
    assert failed.value.exit_status == 1


def test_commands_report_store_errors_in_one_line(store, capsys, tmp_path, vocabulary_file, corpus_file):
    store.put("folder/tokenizer.json", b"x")
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
        (["report", f"{FOLDER}/none", "--output", str(tmp_path / "c.html")], f"{FOLDER}/none"),
        (
            ["vocab", "--input", str(corpus_file), "--output", "gs://nothing/tokenizer.json", "--size", "200"],
            "gs://nothing/",
        ),
    ]:
        began = time.monotonic()
        assert main(command) == 2, command
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bert-jax ")]
        assert len(lines) == 1, lines
        assert message in lines[0], lines
        assert time.monotonic() - began < 10


# --- The cache folder --------------------------------------------------------------------------------------------


def test_folder_is_the_given_one_or_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "given"))
    assert cache_folder() == tmp_path / "given"
    monkeypatch.delenv("BERT_JAX_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "bert_jax"
