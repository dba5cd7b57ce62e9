"""Checksums of a checkpoint's files, by which a load detects changed bits.

    STEP/checksums.json   {"format_version": 1, "files": {"parameters/d/1b9f...": [BYTES, CRC32], ...}}

Process 0 writes it after all processes have written their arrays and before Orbax commits the step, so that every
committed step has one. A CRC32 finds every change of up to 32 adjacent bits, and any other with probability 1 - 2**-32.
"""

import hashlib
import json
import re
import zlib
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
from etils import epath

from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import atomic, remote
from bert_jax.files.format_versions import check_version

FILE = "checksums.json"
FORMAT_VERSION = 1
"""Version of all items of a checkpoint."""

_OF_ORBAX = ("_CHECKPOINT_METADATA", "commit_success.txt")  # written at the commit, and not read
_CHUNK = 16 << 20
_THREADS = 8


class DamagedError(InputError):
    """An existing checkpoint that cannot be read, or differs from what was saved."""


def write_checksums(path: epath.Path) -> None:
    """Writes the checksums of all files of a checkpoint that Orbax has written and is about to commit as `path`.

    On a disk its folder has another name until then.
    """
    folder = next(
        (one for one in remote.children(path.parent) if one.name.startswith(f"{path.name}.orbax-checkpoint-tmp")), path
    )
    names = sorted(_names(folder))
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda name: _checksum(folder / name), names)
        content = {"format_version": FORMAT_VERSION, "files": dict(zip(names, found, strict=True))}
    (folder / FILE).write_text(json.dumps(content) + "\n")


def verify(folder: epath.Path, items: Collection[str], *, share: tuple[int, int] = (0, 1)) -> None:
    """Raises DamagedError if files of some items of a checkpoint have changed since the save, are missing or new.

    With a `share` of (i, n) it reads every n-th file alone, from the i-th: that of one of n processes.
    """
    with convert_read_errors(folder):
        files = {name: tuple(found) for name, found in _read(folder).items() if name.partition("/")[0] in items}
        names = {f"{item}/{name}" for item in items for name in _names(folder / item)}
        changed = sorted(names ^ files.keys())
        mine = sorted(names & files.keys())[share[0] :: share[1]]
        with ThreadPoolExecutor(_THREADS) as threads:
            changed += [
                name
                for name, found in zip(mine, threads.map(lambda name: _checksum(folder / name), mine), strict=True)
                if found != files[name]
            ]
    if changed:
        listed = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        raise DamagedError(
            f"{folder} is damaged ({listed} changed since the save); use an earlier step, or recreate it"
        )


def fingerprint(folder: epath.Path) -> str:
    """Returns a SHA-256 that is the same for copies of a checkpoint, and for no other."""
    with convert_read_errors(folder):
        return hashlib.sha256(json.dumps(_read(folder), sort_keys=True).encode()).hexdigest()


def _read(folder: epath.Path) -> dict[str, Any]:
    """Returns size and checksum of each file."""
    content = json.loads(atomic.read_whole(folder / FILE))
    check_version(folder / FILE, content, FORMAT_VERSION)
    return dict(content["files"])


def _names(folder: epath.Path, prefix: str = "") -> Iterator[str]:
    """Yields the paths of all files below a folder, relative to it."""
    for child in remote.children(folder):
        if child.name not in (*_OF_ORBAX, FILE):
            yield from _names(child, f"{prefix}{child.name}/") if child.is_dir() else [prefix + child.name]


def _checksum(path: epath.Path) -> tuple[int, int]:
    """Returns the bytes of a file and their CRC32."""
    size = crc = 0
    with remote.store_errors(path), path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


# Codes in TensorStore's untyped errors for which the files may be intact.
_DENIED = re.compile("PERMISSION_DENIED|UNAUTHENTICATED")
_TRANSIENT = re.compile("UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED")


@contextmanager
def convert_read_errors(folder: epath.Path) -> Iterator[None]:
    """Re-raises errors on reading a checkpoint as one-line errors that name the folder.

    Missing permissions raise InputError, transient errors BertJaxError, all others DamagedError.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):  # JaxRuntimeError: out of device memory
        raise
    except Exception as error:  # TensorStore raises untyped errors
        if isinstance(error, BertJaxError) and not isinstance(error.__cause__, FileNotFoundError):
            raise
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if isinstance(error, PermissionError) or _DENIED.search(str(error)):
            raise InputError(f"{folder} may not be read ({reason}); check your permissions") from error
        if _TRANSIENT.search(str(error)) or isinstance(error, (ConnectionError, TimeoutError)):
            raise BertJaxError(
                f"{folder} could not be read because of a transient error ({reason}); rerun the command"
            ) from error
        raise DamagedError(
            f"{folder} is damaged or of another model ({reason}); use an earlier step, or recreate it"
        ) from error
