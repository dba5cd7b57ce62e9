"""Temporary files and folders beside an output that is renamed when it is complete.

While a process writes one it holds a lock (flock(2)), which ends with the process. What a killed process left has none,
and is deleted by the next write of the same output. File systems without such locks keep it.
"""

import fcntl
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

log = logging.getLogger(__name__)
_NAME = re.compile(r"(?s)(?P<final>.+)\.[0-9a-f]{8}\.partial")


def create_file(final: Path) -> tuple[Path, int | None]:
    """Creates an empty temporary file beside `final`; returns it with the file descriptor of its lock, or None."""
    return _create(final, lambda path: os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)))


def create_folder(final: Path) -> tuple[Path, int | None]:
    """Creates a temporary folder beside `final`; returns it with the file descriptor of its lock, or None."""
    return _create(final, Path.mkdir)


def delete_abandoned_files(final: Path) -> None:
    """Deletes the temporary files that killed processes left of `final`.

    A process lists each folder once: a folder may have thousands of files, and a file may be written every second.
    """
    _delete(path for path in _left_in(str(final.parent)).get(final.name, ()) if path.is_file())


def delete_abandoned_folders(final: Path) -> None:
    """Deletes the temporary folders that killed processes left of `final`."""
    _left_in.cache_clear()
    _delete(path for path in _left_in(str(final.parent)).get(final.name, ()) if path.is_dir())


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        lock = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock is None:
            continue
        try:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            log.info("Deleted %s, left by an interrupted write", path)
        except OSError:  # not ours to delete
            continue
        finally:
            os.close(lock)


@lru_cache(maxsize=64)
def _left_in(folder: str) -> dict[str, list[Path]]:
    """Returns the temporary files and folders in a folder, by the name of their output."""
    found: dict[str, list[Path]] = {}
    try:
        for entry in os.scandir(folder):
            if match := _NAME.fullmatch(entry.name):
                found.setdefault(match["final"], []).append(Path(entry.path))
    except OSError:  # writable, but not listable
        return {}
    return found


def _create(final: Path, make: Callable[[Path], None]) -> tuple[Path, int | None]:
    while True:
        partial = final.parent / f"{final.name}.{uuid.uuid4().hex[:8]}.partial"
        make(partial)
        lock = _lock(partial, fcntl.LOCK_EX)
        if partial.exists():  # else another process deleted it as abandoned before it was locked
            return partial, lock
        if lock is not None:
            os.close(lock)


def _lock(path: Path, operation: int) -> int | None:
    """Locks a file or folder; returns the file descriptor that holds the lock until it is closed or this process ends.

    Returns None if another process holds the lock, `path` does not exist, or its file system has no flock(2).
    """
    try:
        handle = os.open(path, (os.O_RDONLY if path.is_dir() else os.O_RDWR) | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(handle, operation)
    except OSError:
        os.close(handle)
        return None
    return handle
