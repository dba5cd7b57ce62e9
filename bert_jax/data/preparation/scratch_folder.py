"""Scratch folder of `prepare`: files of unfinished work, and the lock that gives one process access to an output."""

import errno
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from etils import epath

from bert_jax.data.hashing import key_from
from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import remote
from bert_jax.files.atomic import write_whole

TEMPORARY = ".prepare"
_LOCK = ".prepare.lock"


def scratch_path(folder: epath.Path, scratch: str | None) -> Path:
    """Returns the path of the local folder that holds unfinished work until the dataset in `folder` is complete.

    It is in the output, in `scratch` or in the system's temporary folder. In the latter two its name is predictable, so
    that work can be resumed.
    """
    is_local = not remote.is_remote(folder)
    if scratch is None and is_local:
        return Path(os.fspath(folder)) / TEMPORARY
    name = os.path.realpath(os.fspath(folder)) if is_local else os.fspath(folder)
    parent = Path(os.fspath(remote.parse_path(scratch or tempfile.gettempdir())))
    return parent / f"bert-jax-prepare-{key_from(name):016x}"


def scratch_folder(folder: epath.Path, scratch: str | None) -> Path:
    """Creates the folder of `scratch_path`, unless an interrupted call left it.

    Raises InputError for a folder with a predictable name that is not owned by this user, or writable by others.
    """
    work = scratch_path(folder, scratch)
    work.parent.mkdir(parents=True, exist_ok=True)
    if work.name == TEMPORARY:
        work.mkdir(exist_ok=True)
        return work
    try:
        work.mkdir(mode=0o700)
    except FileExistsError:
        _check_private(work)
    return work


def _check_private(work: Path) -> None:
    status = work.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise InputError(f"{work}: got a link or a file, expected a folder; delete it or pass another --scratch")
    if status.st_uid != os.geteuid():
        raise InputError(
            f"{work}: owned by user {status.st_uid}, expected user {os.geteuid()}, so its content is not trusted; pass "
            "another --scratch, such as $HOME/scratch"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InputError(
            f"{work}: got mode {stat.S_IMODE(status.st_mode):04o}, expected 0700: writable by others; delete it or "
            "pass another --scratch"
        )


@contextmanager
def locked(folder: epath.Path, work: Path) -> Iterator[None]:
    """Context manager that holds the lock of the output; for a remote output, the lock is valid on this machine only.

    Raises InputError if another process holds it.
    """
    path = work / "lock" if remote.is_remote(folder) else Path(os.fspath(folder)) / _LOCK
    try:  # O_NOFOLLOW and no O_TRUNC: the path may be another user's link or file
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InputError(f"{path}: got a link, expected a file; delete it") from error
        raise
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{path}: locked by another process that prepares this dataset; wait for it") from error
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # the next process to lock it checks for a finished dataset
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Flushes a local file or folder to the disk with fsync(2), so that it survives a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_finished(marker: Path, content: dict[str, Any], files: Sequence[Path]) -> None:
    """Commits `files`, all in the folder of `marker`: syncs them, then writes `content` and their sizes to `marker`.

    Without the sync, a power loss might keep the marker and lose the content of the files.
    """
    for path in files:
        sync(path)
    sync(marker.parent)
    sizes = {path.name: path.stat().st_size for path in files}
    write_whole(marker, json.dumps({**content, "files": sizes}).encode())


def read_finished(marker: Path) -> dict[str, Any] | None:
    """Reads a marker of `write_finished`; None if it is missing or invalid, or a file is missing or of another size."""
    if not marker.exists():
        return None
    try:
        content = json.loads(marker.read_text())
        sizes = {name: (marker.parent / name).stat().st_size for name in content["files"]}
    except (ValueError, TypeError, KeyError, FileNotFoundError):
        return None
    return content if sizes == content["files"] else None


def save_array(file: BinaryIO, array: np.ndarray) -> None:
    """Writes a .npy file as `np.save` does, but keeps the errno of a full disk, which `ndarray.tofile` drops."""
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(np.ascontiguousarray(array).data)


def load_array(path: Path) -> np.ndarray:
    """Reads a .npy file of unfinished work. Raises BertJaxError for a damaged file."""
    try:
        result: np.ndarray = np.load(path)
        return result
    except OSError:
        raise
    except Exception as error:  # a damaged header raises any class, such as tokenize.TokenError
        raise damaged(path, error) from error


def damaged(path: Path, problem: object) -> BertJaxError:
    """Returns the error of a damaged scratch file, with its remedy."""
    return BertJaxError(f"{path}: damaged scratch file ({problem}); delete the folder {path.parent} and run again")
