"""Digests of a dataset's files, and a memory of the files on this machine that were held against theirs.

Reading a shard whole takes as long as a disk and one core need, some 0.5 GB/s. So a file is verified when it is first
opened and then remembered, by path, size, inode and times of change:

    $BERT_JAX_CACHE (or ~/.cache/bert_jax)/verified/HASH OF THE DATASET/KEY OF THE FILE'S STATE

The folder may be deleted at any time: files are then verified once more. Where it cannot be written, they are verified
by every process.
"""

import hashlib
import io
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from bert_jax.data.hashing import key_from

_RECORDS_A_READ = 64
_READ_BYTES = 1 << 20


def new_digest() -> "hashlib.blake2b":
    """The hash of all digests: blake2b of 16 bytes."""
    return hashlib.blake2b(digest_size=16)


def file_digest(path: Path) -> str:
    """The digest, in hex, of a file's bytes."""
    found = new_digest()
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            found.update(block)
    return found.hexdigest()


def records_digest(path: Path) -> str:
    """The digest, in hex, of an ArrayRecord file's records, one after the other; what is wrong where it has none."""
    found = new_digest()
    try:
        reader = ArrayRecordReader(str(path), "readahead_buffer_size:0")
        count = reader.num_records()
        for first in range(0, count, _RECORDS_A_READ):
            for record in reader.read(list(range(first, min(count, first + _RECORDS_A_READ)))):
                found.update(record)
        reader.close()
    except (RuntimeError, ValueError) as error:
        return f"none ({error})"
    return found.hexdigest()


def array_digest(array: np.ndarray) -> str:
    """The digest, in hex, of the .npy file that `runs.save_array` writes of an array."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    found = new_digest()
    found.update(header.getvalue())
    found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


@dataclass(frozen=True)
class Expected:
    """The digest that a file must have: of its bytes, or of its records where it is a shard of format version 2."""

    digest: str
    of: Callable[[Path], str] = file_digest

    def mismatch(self, path: Path) -> str | None:
        """Returns None for a file that has the digest, else a phrase that has both. Reads the file whole."""
        got = self.of(path)
        return None if got == self.digest else f"its digest is {got}, expected {self.digest}"


class VerifiedFiles:
    """The files that were held against their digests, remembered in `folder`."""

    def __init__(self, folder: Path):
        self._folder = folder

    def mismatch(self, path: Path, expected: Expected) -> str | None:
        """Returns as `Expected.mismatch`, but reads a file once.

        Raises OSError where it cannot be read.
        """
        state = _state(path, expected)  # of before it is read
        with suppress(OSError):
            if (self._folder / state).exists():
                return None
        if mismatch := expected.mismatch(path):
            return mismatch
        self._remember(state)
        return None

    def remember(self, path: Path, expected: Expected) -> None:
        """Takes a file for verified."""
        self._remember(_state(path, expected))

    def _remember(self, state: str) -> None:
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / state).touch()


def _state(path: Path, expected: Expected) -> str:
    """A name for a file as it is now; ctime tells apart what a copy with preserved times does not."""
    now = path.stat()
    state = (now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino, expected.digest, expected.of.__name__)
    return f"{key_from(os.path.abspath(path), *state):016x}"
