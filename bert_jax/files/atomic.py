"""Atomic writes and copies of files and folders, on a local disk or in an object store; see `remote.py`."""

import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from etils import epath

from bert_jax.files import partial_files
from bert_jax.files.remote import IncompleteError, is_remote, retry_transient, store_of

_DESCRIPTOR = re.compile(r"/dev/(?:(stdout|stderr)|fd/(\d+))")


def make_folder(folder: epath.Path) -> None:
    """Creates a local folder with its parents; for a remote one, checks write access with a probe object.

    Object stores have no folders, and some clients would create a bucket whose name is a typo.
    """
    if not is_remote(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return
    probe = folder / f".write-check-{uuid.uuid4().hex[:8]}"
    write_whole(probe, b"")
    retry_transient(probe, lambda: probe.unlink(missing_ok=True))


@contextmanager
def named_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds the name of a file to an OSError without one, as write(2) of a full disk raises it."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = os.fspath(path)
        raise


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Context manager for an atomic write: yields a file that becomes `path` when the block exits without an error.

    After an error, `path` is unchanged. A local file is written beside `path` under a temporary name and renamed; see
    `partial_files.py`. A remote file is written to the local disk and uploaded. Pipes and devices are written directly,
    and so is what this process has open, such as /dev/stdout.
    """
    target = epath.Path(path)
    if descriptor := _DESCRIPTOR.fullmatch(os.fspath(path)):
        number = {"stdout": 1, "stderr": 2}.get(descriptor[1]) or int(descriptor[2])
        with named_errors(target), open(os.dup(number), "wb") as file:  # opened by its name, it would be truncated
            yield file
        return
    with named_errors(target), _whole_path(target) as local, open(local, "wb") as file:
        yield file
        file.flush()
        if local.is_file():
            os.fsync(file.fileno())


@contextmanager
def _whole_path(target: epath.Path) -> Iterator[Path]:
    if is_remote(target):
        with tempfile.TemporaryDirectory(prefix="bert-jax-") as folder:
            local = Path(folder) / target.name
            yield local
            upload(local, target)
        return
    final = Path(os.fspath(target))
    if final.exists() and not final.is_file():
        yield final
        return
    final = final.resolve()  # a symbolic link is kept
    partial_files.delete_abandoned_files(final)
    partial, lock = partial_files.create_file(final)
    try:
        yield partial
        os.replace(partial, final)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file atomically. Raises as `retry_transient` does, and OSError for a local file."""
    if not is_remote(path):
        with whole_file(path) as file:
            file.write(content)
        return
    store, name = store_of(path)
    retry_transient(path, lambda: store.pipe_file(name, content))


def place(source: str | os.PathLike[str], target: epath.Path) -> None:
    """Copies a local file to `target` atomically."""
    if is_remote(target):
        upload(Path(source), target)
        return
    with _whole_path(target) as partial:
        shutil.copyfile(source, partial)
        sync(partial)


def sync(path: Path) -> None:
    """Flushes a local file or folder to the disk with fsync(2), so that it survives a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copies a remote file within its store. Raises as `retry_transient` does."""
    store, name = store_of(source)
    retry_transient(target, lambda: store.copy(name, os.fspath(target)))


def upload(source: Path, target: epath.Path) -> None:
    """Uploads a local file as one object and checks the size of the object. Raises as `retry_transient` does."""
    store, name = store_of(target)

    def put() -> None:
        store.put_file(os.fspath(source), name)
        expected, found = source.stat().st_size, store.info(name)["size"]
        if found != expected:
            raise IncompleteError(f"incomplete upload: got {found:,} bytes, expected {expected:,} bytes")

    retry_transient(target, put)


def download(source: epath.Path, target: Path, *, size: int, check: Callable[[Path], None] | None = None) -> None:
    """Downloads a remote file to `target` atomically; concurrent downloads are safe.

    Args:
      source: the remote file.
      target: a file in a folder that exists.
      size: bytes of the file; a download of another size is retried.
      check: validates the downloaded file; raises IncompleteError for content that is not as expected.

    Raises:
      InputError: the file was not found or access was denied.
      BertJaxError: the download kept failing or the content stayed corrupt.
      OSError: the disk is full.
    """
    store, name = store_of(source)

    def get() -> None:
        with _whole_path(epath.Path(target)) as partial:
            store.get_file(name, os.fspath(partial))
            if (found := partial.stat().st_size) != size:
                raise IncompleteError(f"incomplete download: got {found:,} bytes, expected {size:,} bytes")
            if check is not None:
                check(partial)

    retry_transient(source, get)


def read_whole(path: epath.Path) -> bytes:
    """Reads a small file. Raises as `retry_transient` does, and OSError for a local file."""
    if not is_remote(path):
        return path.read_bytes()
    store, name = store_of(path)
    return retry_transient(path, lambda: store.cat_file(name))


def upload_folder(source: Path, target: epath.Path, last: str) -> None:
    """Uploads the files of a flat folder, `last` at the end: if `last` exists, the upload is complete.

    If an upload fails, the files uploaded so far are deleted. Raises as `retry_transient` does.
    """
    names = sorted((path.name for path in source.iterdir()), key=lambda name: (name == last, name))
    done: list[epath.Path] = []
    try:
        for name in names:
            done.append(target / name)
            upload(source / name, target / name)
    except BaseException:
        for path in done:
            with suppress(Exception):  # raise the first error, not this one
                path.unlink(missing_ok=True)
        raise
