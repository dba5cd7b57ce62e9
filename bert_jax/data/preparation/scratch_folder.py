"""The folder of unfinished work of one `prepare`, and the lock that lets one process at a time work on an output."""

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etils import epath

from bert_jax.data.hashing import key_from
from bert_jax.errors import InputError
from bert_jax.files import remote

TEMPORARY = ".prepare"
_LOCK = ".prepare.lock"


def scratch_folder(folder: epath.Path, scratch: str | None) -> Path:
    """Makes the folder, on this machine, that holds the work until the dataset in `folder` is whole.

    It is in the output, or in `scratch` or the system's folder of temporary files. In those, its name can be foreseen,
    so that work is resumed: it must be this user's, and nobody else's to write.

    Raises InputError where it is not.
    """
    is_local = not remote.is_remote(folder)
    if scratch is None and is_local:
        work = Path(os.fspath(folder)) / TEMPORARY
        work.mkdir(parents=True, exist_ok=True)
        return work
    name = os.path.realpath(os.fspath(folder)) if is_local else os.fspath(folder)
    work = Path(scratch or tempfile.gettempdir()) / f"bert-jax-prepare-{key_from(name):016x}"
    work.parent.mkdir(parents=True, exist_ok=True)
    try:
        work.mkdir(mode=0o700)
    except FileExistsError:
        _check_private(work)
    return work


def _check_private(work: Path) -> None:
    status = work.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise InputError(f"{work}: got a link or a file, expected a folder; delete it or give another --scratch")
    if status.st_uid != os.geteuid():
        raise InputError(
            f"{work}: its owner is user {status.st_uid}, expected {os.geteuid()}: what is in it may be anybody's; give "
            "another --scratch, $HOME/scratch for one"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InputError(
            f"{work}: got mode {stat.S_IMODE(status.st_mode):04o}, expected 0700: others may write to it; delete it or "
            "give another --scratch"
        )


@contextmanager
def locked(folder: epath.Path, work: Path) -> Iterator[None]:
    """Holds the output, wherever the work is; a remote one on this machine alone.

    Raises InputError where another process holds it.
    """
    path = work / "lock" if remote.is_remote(folder) else Path(os.fspath(folder)) / _LOCK
    try:  # without following a link, and without emptying what may be another's
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InputError(f"{path}: got a link, expected a file; delete it") from error
        raise
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"another process prepares this dataset (it holds {path}): wait for it") from error
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # whoever holds it next finds out that the dataset is there
    finally:
        os.close(descriptor)
