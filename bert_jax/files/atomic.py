"""Files and folders that are there whole or not at all, on a disk or in a store; see `remote.py`."""

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from etils import epath

from bert_jax.files.remote import IncompleteError, is_remote, patiently, store_of


def make_folder(folder: epath.Path) -> None:
    """Makes a local folder with its parents; of a remote one it makes sure that it can be written to.

    A store has no folders, and some clients make a bucket of a name that has a typo in it.
    """
    if not is_remote(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return
    probe = folder / f".write-check-{uuid.uuid4().hex[:8]}"
    write_whole(probe, b"")
    patiently(probe, lambda: probe.unlink(missing_ok=True))


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to, which is at `path` when the block is left, and not there, or as it was, where anything fails.

    A local one is written beside it under another name, and renamed; a remote one on this machine's disk, and put. What
    is no file but can be written to, as a pipe or /dev/stdout, is written to.
    """
    target = epath.Path(path)
    with _whole_path(target) as local, open(local, "wb") as file:
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
    final = final.resolve()  # a link goes on being one
    partial = final.parent / f"{final.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        yield partial
        os.replace(partial, final)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file that is there whole or not at all. Raises as `patiently` does, and OSError for a local one."""
    if not is_remote(path):
        with whole_file(path) as file:
            file.write(content)
        return
    store, name = store_of(path)
    patiently(path, lambda: store.pipe_file(name, content))


def place(source: str | os.PathLike[str], target: epath.Path) -> None:
    """Copies a file of this machine to `target`, which is there whole or not at all."""
    if is_remote(target):
        upload(Path(source), target)
        return
    with _whole_path(target) as partial:
        shutil.copyfile(source, partial)
        sync(partial)


def sync(path: Path) -> None:
    """Flushes a local file or folder to the disk, so that a power loss leaves it as it is; fsync(2) of its path."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copies a remote file within its store. Raises as `patiently` does."""
    store, name = store_of(source)
    patiently(target, lambda: store.copy(name, os.fspath(target)))


def upload(source: Path, target: epath.Path) -> None:
    """Puts a file of this machine as one object, of the same size. Raises as `patiently` does."""
    store, name = store_of(target)

    def put() -> None:
        store.put_file(os.fspath(source), name)
        wanted, found = source.stat().st_size, store.info(name)["size"]
        if found != wanted:
            raise IncompleteError(f"{found:,} of {wanted:,} bytes arrived")

    patiently(target, put)


def download(source: epath.Path, target: Path, *, size: int, check: Callable[[Path], None] | None = None) -> None:
    """Copies a remote file to `target`, which is there whole or not at all, whoever else does so at the same time.

    Args:
      source: the remote file.
      target: a file in a folder that exists.
      size: of the file, in bytes: what arrives with another is fetched again.
      check: looks at what has arrived, and raises IncompleteError where that is not what it should be.

    Raises:
      InputError: it is not there, or may not be read.
      BertJaxError: it went on failing, or arriving damaged.
      OSError: the disk is full.
    """
    store, name = store_of(source)

    def get() -> None:
        with _whole_path(epath.Path(target)) as partial:
            store.get_file(name, os.fspath(partial))
            if (found := partial.stat().st_size) != size:
                raise IncompleteError(f"{found:,} of {size:,} bytes arrived")
            if check is not None:
                check(partial)

    patiently(source, get)


def read_whole(path: epath.Path) -> bytes:
    """A small file. Raises as `patiently` does, and OSError for a local one."""
    if not is_remote(path):
        return path.read_bytes()
    store, name = store_of(path)
    return patiently(path, lambda: store.cat_file(name))


def upload_folder(source: Path, target: epath.Path, last: str) -> None:
    """Puts the files of a folder without folders in it; where the one named `last` is, all are.

    Where one cannot be put, those that are there are deleted. Raises as `patiently` does.
    """
    names = sorted((path.name for path in source.iterdir()), key=lambda name: (name == last, name))
    done: list[epath.Path] = []
    try:
        for name in names:
            done.append(target / name)
            upload(source / name, target / name)
    except BaseException:
        for path in done:
            with suppress(Exception):  # the first error is the one to tell of
                path.unlink(missing_ok=True)
        raise
