"""Where a dataset's files can be opened: in its folder, or in a cache on this machine's disk where that is remote.

ArrayRecord's reader opens local files alone, and a shard is read in blocks from all over. So a remote file is fetched
whole when it is first needed, and stays, for later runs and for other processes of this machine:

    $BERT_JAX_CACHE (or ~/.cache/bert_jax)/datasets/HASH OF THE DATASET/NAME

It may be deleted at any time. What is in it is never taken for another dataset's, whatever is written where it is from.
"""

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from array_record.python.array_record_module import ArrayRecordReader
from etils import epath

from bert_jax import remote, whole_files
from bert_jax.errors import InputError

CACHE_VARIABLE = "BERT_JAX_CACHE"

_RECORDS_A_READ = 64
_ABANDONED_SECONDS = 3600  # since anything was written to it: a download that was killed


def cache_folder() -> Path:
    """Where fetched files are kept."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "bert_jax").absolute()


class LocalFiles:
    """The files of one dataset."""

    def __init__(self, folder: epath.Path, dataset_hash: str):
        """`dataset_hash` is that of all that `folder` holds."""
        self._folder = folder
        self._sizes = remote.sizes(folder) if remote.is_remote(folder) else None
        self._cache = cache_folder() / "datasets" / dataset_hash

    def size(self, name: str) -> int | None:
        """Bytes of a file in the folder, None where it is not there."""
        if self._sizes is not None:
            return self._sizes.get(name)
        path = self._folder / name
        return path.stat().length if path.exists() else None

    def open_path(self, name: str, digest: str = "") -> Path:
        """A file on this machine; fetched if need be.

        Args:
          name: in the folder.
          digest: of the records of a shard; what is fetched is held against it.

        Raises:
          InputError: a remote file is not there, or may not be read.
          BertJaxError: it could not be fetched.
          OSError: the disk is full.
        """
        if self._sizes is None:
            return Path(os.fspath(self._folder / name))
        size = self._sizes.get(name)
        if size is None:
            raise InputError(f"{self._folder / name}: the file is missing; copy or prepare the dataset again")
        cached = self._cache / (f"{digest}-{name}" if digest else name)
        if _has(cached, size):
            return cached
        self._cache.mkdir(parents=True, exist_ok=True)
        with _alone(cached):
            if not _has(cached, size):  # another process was faster
                _sweep(cached)
                check: Callable[[Path], None] | None = partial(_check_records, digest=digest) if digest else None
                whole_files.download(self._folder / name, cached, size=size, check=check)
        return cached


def _has(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lets one process of this machine at a time fetch a file; who is killed lets go of it."""
    with open(path.with_name(f"{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sweep(path: Path) -> None:
    """Deletes what downloads that were killed have left."""
    for left in path.parent.glob(f"{path.name}.*.partial"):
        if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
            left.unlink(missing_ok=True)


def _check_records(path: Path, digest: str) -> None:
    found = hashlib.blake2b(digest_size=16)
    try:
        reader = ArrayRecordReader(str(path), "readahead_buffer_size:0")
        count = reader.num_records()
        for first in range(0, count, _RECORDS_A_READ):
            for record in reader.read(list(range(first, min(count, first + _RECORDS_A_READ)))):
                found.update(record)
        reader.close()
    except (RuntimeError, ValueError) as error:
        raise remote.IncompleteError(f"it arrived damaged ({error})") from error
    if found.hexdigest() != digest:
        raise remote.IncompleteError("it arrived damaged: its records are not those that were written")
