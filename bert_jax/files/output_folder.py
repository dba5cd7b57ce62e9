"""Atomic output folders of conversions, local or remote."""

import fcntl
import logging
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote

log = logging.getLogger(__name__)


def new_folder(output: str) -> epath.Path:
    """Returns the path of an output folder. Raises InputError unless it does not exist or is empty."""
    folder = remote.parse_path(output)
    if not output or remote.is_taken(folder):
        raise InputError(f"--output={output!r}: already exists and is not empty; expected a new or empty folder")
    return folder


@contextmanager
def whole_folder(folder: epath.Path, last: str) -> Iterator[epath.Path]:
    """Context manager that yields a temporary local folder and publishes it as `folder`; deletes it after an error.

    For a local `folder`, the temporary folder lies beside it and is renamed; leftovers of killed processes are deleted
    first. For a remote one, its files are uploaded one by one, `last` at the end: if `last` exists, the folder is
    complete. `folder` must not exist or must be empty, see `new_folder`.
    """
    if remote.is_remote(folder):
        with tempfile.TemporaryDirectory(prefix="bert-jax-") as local:
            atomic.make_folder(folder)
            yield epath.Path(local)
            atomic.upload_folder(Path(local), folder, last=last)
        return
    final = Path(os.path.realpath(folder))
    final.parent.mkdir(parents=True, exist_ok=True)
    _delete_abandoned(final)
    partial, lock = _locked_partial(final)
    try:
        yield epath.Path(partial)
        os.replace(partial, final)  # replaces an empty folder, which epath does not
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _locked_partial(final: Path) -> tuple[Path, int | None]:
    """Creates a temporary folder beside `final`; returns it with the lock that marks it as in use."""
    while True:
        partial = final.parent / f"{final.name}.{uuid.uuid4().hex[:8]}.partial"
        partial.mkdir()
        lock = _lock(partial, fcntl.LOCK_EX)
        if partial.exists():  # Else another process deleted it as abandoned before it was locked.
            return partial, lock


def _lock(folder: Path, operation: int) -> int | None:
    """Locks a folder; returns the file descriptor that holds the lock until it is closed or this process ends.

    Returns None if another process holds the lock, the folder does not exist, or its file system has no flock(2).
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(handle, operation)
    except OSError:
        os.close(handle)
        return None
    return handle


def _delete_abandoned(final: Path) -> None:
    """Deletes the temporary folders of `final` that no process has locked."""
    name = re.compile(rf"{re.escape(final.name)}\.[0-9a-f]{{8}}\.partial")
    try:
        found = [path for path in final.parent.iterdir() if name.fullmatch(path.name)]
    except OSError:  # Writable, but not listable.
        return
    for path in found:
        lock = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock is None:
            continue
        try:
            shutil.rmtree(path, ignore_errors=True)
            log.info("Deleted %s, left by an interrupted export", path)
        finally:
            os.close(lock)
