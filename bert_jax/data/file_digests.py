"""Digests of a dataset's files, and a cache of the local files already verified against them.

Verification reads the whole file, at some 0.5 GB/s on one core. A file is therefore verified when it is first opened,
and the result is cached by path, size, inode, mtime and ctime:

    $BERT_JAX_CACHE (or ~/.cache/bert_jax)/verified/HASH OF THE DATASET/KEY OF THE FILE'S STATE

The folder may be deleted at any time: files are then verified again. If it is not writable, every process verifies
them.
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
    """Returns the hash object of all digests: blake2b with 16 bytes."""
    return hashlib.blake2b(digest_size=16)


def file_digest(path: Path) -> str:
    """Returns the digest, in hex, of a file's bytes."""
    found = new_digest()
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            found.update(block)
    return found.hexdigest()


def records_digest(path: Path) -> str:
    """Returns the digest, in hex, of an ArrayRecord file's concatenated records; "none (PROBLEM)" if unreadable."""
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
    """Returns the digest, in hex, of the .npy file that `scratch_folder.save_array` writes for an array."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    found = new_digest()
    found.update(header.getvalue())
    found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


@dataclass(frozen=True)
class Expected:
    """Expected digest of a file: of its bytes, or of its records for a shard of format version 2."""

    digest: str
    of: Callable[[Path], str] = file_digest

    def mismatch(self, path: Path) -> str | None:
        """Returns None if the digest matches, else a message with both digests. Reads the whole file."""
        got = self.of(path)
        return None if got == self.digest else f"got digest {got}, expected {self.digest}"


class VerifiedFiles:
    """Cache, in `folder`, of files already verified against their digests."""

    def __init__(self, folder: Path):
        self._folder = folder

    def mismatch(self, path: Path, expected: Expected) -> str | None:
        """Returns the result of `Expected.mismatch`, but reads each file only once.

        Raises OSError if the file cannot be read.
        """
        state = _state(path, expected)  # computed before the file is read
        with suppress(OSError):
            if (self._folder / state).exists():
                return None
        if mismatch := expected.mismatch(path):
            return mismatch
        self._remember(state)
        return None

    def remember(self, path: Path, expected: Expected) -> None:
        """Marks a file as verified."""
        self._remember(_state(path, expected))

    def _remember(self, state: str) -> None:
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / state).touch()


def _state(path: Path, expected: Expected) -> str:
    """Returns a key of the current state of a file; ctime detects copies with preserved mtime."""
    now = path.stat()
    state = (now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino, expected.digest, expected.of.__name__)
    return f"{key_from(os.path.abspath(path), *state):016x}"
