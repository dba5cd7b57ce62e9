"""Atomic writes and copies of files and folders, on a local disk or in an object store; see `remote.py`.

A file is written beside its target, as .NAME.partial, and renamed when it is complete; a folder as .NAME.partial-XXXX.
What a killed process left is deleted by the next write of the same output. A file has one writer. A store creates an
object with the last byte of its upload.
"""

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from etils import epath

from bert_jax.errors import BertJaxError, InputError
from bert_jax.files.remote import is_remote, is_taken, parse_path, store_errors, store_of

_UPLOADS = 16  # at a time


def make_folder(folder: epath.Path) -> None:
    """Creates a local folder with its parents; for a remote one, checks write access with a probe object.

    Object stores have no folders, and some clients would create a bucket whose name is a typo.
    """
    if is_remote(folder):
        _probe(folder)
    else:
        folder.mkdir(parents=True, exist_ok=True)


def _probe(folder: epath.Path) -> None:
    probe = folder / f".write-check-{os.urandom(4).hex()}"
    write_whole(probe, b"")
    with store_errors(probe):
        probe.unlink()


def check_file_output(output: str) -> None:
    """Creates the folder of an output file and checks that it is writable. Raises InputError or OSError if not."""
    path = parse_path(output)
    if not path.name or output.endswith("/") or path.is_dir():
        raise InputError(f"output={output}: got a folder, expected a file; give it a name")
    if not output.startswith("/dev/"):
        if not is_remote(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _probe(path.parent)
        except OSError as error:
            error.filename = output  # in place of the probe's
            raise


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
        os.replace(partial, final)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def whole_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a local path whose file becomes `path`, as `whole_file`; several processes may write `path`."""
    if is_remote(path):
        with tempfile.TemporaryDirectory(prefix="bert-jax-") as folder:
            yield Path(folder) / "file"
            place(Path(folder) / "file", parse_path(path))
        return
    partial = Path(f"{os.fspath(path)}.partial-{os.urandom(4).hex()}")
    try:
        yield partial
        _sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Flushes a file or folder to the disk with fsync(2), so that it survives a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    """Returns the path of an output folder. Raises InputError unless it does not exist or is empty.

    The working folder is refused, because another folder replaces the output when it is complete.
    """
    folder = parse_path(output)
    if output and not is_remote(folder) and folder.exists() and os.path.samefile(folder, os.curdir):
        raise InputError(f"output={output}: the working folder cannot be replaced; expected another, such as data")
    if not output or is_taken(folder):
        raise InputError(f"output={output!r}: already exists and is not empty; expected a new or empty folder")
    return folder


@contextmanager
def whole_folder(folder: epath.Path, last: str, scratch: str | None = None) -> Iterator[epath.Path]:
    """Context manager that yields a new local folder and publishes it as `folder`; deletes it after an error.

    For a local `folder`, which must not exist or must be empty, it lies beside it and is renamed; it has the mode and,
    if permitted, the group of the empty folder. Folders that killed processes left there are deleted. For a remote one,
    it lies in the local folder `scratch`, by default that of the system, and its files are uploaded, `last` at the end:
    if `last` exists, the folder is complete.

    Raises InputError for a mount point, and for a folder that another process filled meanwhile.
    """
    if is_remote(folder):
        with tempfile.TemporaryDirectory(prefix="bert-jax-", dir=scratch) as local:
            make_folder(folder)
            yield epath.Path(local)
            paths = [path for path in sorted(Path(local).iterdir()) if path.name != last]
            with ThreadPoolExecutor(_UPLOADS) as threads:
                list(threads.map(lambda path: place(path, folder / path.name), paths))
            place(Path(local) / last, folder / last)
        return
    final = Path(os.path.realpath(folder))  # a symbolic link is kept
    if final.is_mount():
        raise InputError(f"output={folder}: a mount point cannot be replaced; expected a folder in it: {folder}/NAME")
    for parent in (Path(folder).parent, final.parent):  # with a/b/../c, also a/b
        parent.mkdir(parents=True, exist_ok=True)
    token = os.urandom(4).hex()
    unlocked, partial = (final.with_name(f".{final.name}.{kind}-{token}") for kind in ("new", "partial"))
    for left in final.parent.glob(f".{glob.escape(final.name)}.partial-*"):
        _delete_abandoned(left)
    unlocked.mkdir()  # renamed once it has its lock, or another process might delete it
    descriptor = os.open(unlocked, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        unlocked.rename(partial)
        if final.is_dir():
            with contextlib.suppress(OSError):  # not of the group
                os.chown(partial, -1, final.stat().st_gid)
            shutil.copymode(final, partial)
        yield epath.Path(partial)
        _sync(partial)
        try:
            os.rename(partial, final)  # replaces an empty folder, which epath does not
        except OSError as error:
            if not is_taken(folder):
                raise
            raise InputError(f"output={folder}: another process wrote it meanwhile; choose another folder") from error
    finally:
        os.close(descriptor)
        shutil.rmtree(partial, ignore_errors=True)


def _delete_abandoned(folder: Path) -> None:
    """Deletes a folder that no living process has locked."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)
