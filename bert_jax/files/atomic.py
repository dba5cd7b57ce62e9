"""Atomic writes and copies of files and folders, on a local disk or in an object store; see `remote.py`.

An output is written beside its target, as .NAME.partial, and renamed when it is complete. What a killed process left is
overwritten by the next write of the same output. Each output has one writer. A store creates an object with the last
byte of its upload.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from etils import epath

from bert_jax.errors import BertJaxError, InputError
from bert_jax.files.remote import is_remote, is_taken, parse_path, store_errors, store_of


def make_folder(folder: epath.Path) -> None:
    """Creates a local folder with its parents, and checks that it can be written to; for a remote one, with a probe.

    Object stores have no folders, and some clients would create a bucket whose name is a typo.
    """
    if not is_remote(folder):
        with store_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        return
    probe = folder / f".write-check-{os.urandom(4).hex()}"
    write_whole(probe, b"")
    with store_errors(probe):
        probe.unlink()


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Context manager for an atomic write: yields a file that becomes `path` when the block exits without an error.

    After an error, `path` is unchanged. A remote file is written to the local disk and uploaded. Pipes and devices,
    such as /dev/stdout, are appended to directly. Raises as `store_errors` does.
    """
    if is_remote(path):
        with tempfile.TemporaryFile(prefix="bert-jax-") as file:
            yield file
            file.seek(0)
            store, name = store_of(path)
            with store_errors(path), store.open(name, "wb") as uploaded:
                shutil.copyfileobj(file, uploaded, 1 << 20)
        return
    if os.fspath(path).startswith("/dev/") or (os.path.exists(path) and not os.path.isfile(path)):
        with store_errors(path), open(path, "ab") as device:
            yield device
        return
    with store_errors(path), _partial(path) as partial, open(partial, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _partial(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields the path of what becomes `path` when the block exits without an error, and is deleted after one."""
    final = Path(os.path.realpath(path))  # a symbolic link is kept
    partial = final.with_name(f".{final.name}.partial")
    try:
        yield partial
        os.replace(partial, final)  # replaces an empty folder, which epath does not
    except BaseException:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)
        raise


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file atomically. Raises as `store_errors` does."""
    with whole_file(path) as file:
        file.write(content)


def read_whole(path: epath.Path) -> bytes:
    """Reads a small file. Raises as `store_errors` does."""
    store, name = store_of(path)
    with store_errors(path):
        content: bytes = store.cat_file(name) if is_remote(path) else path.read_bytes()
    return content


def place(source: str | os.PathLike[str], target: epath.Path) -> None:
    """Copies a local file to `target` atomically."""
    with open(source, "rb") as file, whole_file(target) as copy:
        shutil.copyfileobj(file, copy, 1 << 20)


def download(source: epath.Path, target: Path, *, size: int, check: Callable[[Path], None] = lambda path: None) -> None:
    """Downloads a remote file of `size` bytes to `target` atomically. `check` validates it before it is renamed.

    Raises as `store_errors` does, BertJaxError for another size, the errors of `check`, and OSError for a full disk.
    """
    store, name = store_of(source)
    partial = target.with_name(f".{target.name}.partial")
    with store_errors(source):
        store.get_file(name, os.fspath(partial))
    if (found := partial.stat().st_size) != size:
        raise BertJaxError(f"{source}: incomplete download: got {found:,} bytes, expected {size:,} bytes; run it again")
    check(partial)
    os.replace(partial, target)


def new_folder(output: str) -> epath.Path:
    """Returns the path of an output folder. Raises InputError unless it does not exist or is empty."""
    folder = parse_path(output)
    if not output or is_taken(folder):
        raise InputError(f"--output={output!r}: already exists and is not empty; expected a new or empty folder")
    return folder


@contextmanager
def whole_folder(folder: epath.Path, last: str) -> Iterator[epath.Path]:
    """Context manager that yields a new local folder and publishes it as `folder`; deletes it after an error.

    For a local `folder`, which must not exist or must be empty, it lies beside it and is renamed. For a remote one,
    its files are uploaded one by one, `last` at the end: if `last` exists, the folder is complete.
    """
    if is_remote(folder):
        with tempfile.TemporaryDirectory(prefix="bert-jax-") as local:
            make_folder(folder)
            yield epath.Path(local)
            for path in sorted(Path(local).iterdir(), key=lambda path: (path.name == last, path.name)):
                place(path, folder / path.name)
        return
    with _partial(folder) as partial:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield epath.Path(partial)
