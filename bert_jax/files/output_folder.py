"""Where a conversion writes to."""

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
    """The path of a folder that does not exist or is empty; InputError where something is there."""
    folder = remote.named(output)
    if not output or remote.is_taken(folder):
        raise InputError(f"--output: {output!r} is taken: choose a new folder")
    return folder


@contextmanager
def whole_folder(folder: epath.Path, last: str) -> Iterator[epath.Path]:
    """A folder on this machine, which becomes `folder` at the end, or is deleted where anything fails.

    A local one lies beside it and is renamed; what a killed process has left of an earlier one is deleted first. The
    files of a remote one are put one by one, `last` at the end: where that is, all are. `folder` does not exist or is
    empty, see `new_folder`.
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
        os.replace(partial, final)  # which does not mind an empty folder, as epath does
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _locked_partial(final: Path) -> tuple[Path, int | None]:
    """A new folder beside `final`, and the lock that tells others that it is being written to."""
    while True:
        partial = final.parent / f"{final.name}.{uuid.uuid4().hex[:8]}.partial"
        partial.mkdir()
        lock = _lock(partial, fcntl.LOCK_EX)
        if partial.exists():  # Otherwise it was taken for abandoned in the instant before it was locked.
            return partial, lock


def _lock(folder: Path, operation: int) -> int | None:
    """The handle that holds a folder's lock until it is closed or this process ends, killed or not.

    None where another process holds it, the folder is gone, or its file system has no such locks.
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
    """Deletes the partial folders of `final` that no process holds."""
    name = re.compile(rf"{re.escape(final.name)}\.[0-9a-f]{{8}}\.partial")
    try:
        found = [path for path in final.parent.iterdir() if name.fullmatch(path.name)]
    except OSError:  # A folder that may be written to and not listed.
        return
    for path in found:
        lock = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock is None:
            continue
        try:
            shutil.rmtree(path, ignore_errors=True)
            log.info("%s: deleted; it was left by an export that did not finish", path)
        finally:
            os.close(lock)
