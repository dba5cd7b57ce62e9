"""Where a dataset's files can be opened: in its folder, or in a cache on this machine's disk where that is remote.

ArrayRecord's reader opens local files alone, and a shard is read in blocks from all over. So a remote file is fetched
whole when it is first needed, and stays, for later runs and for other processes of this machine:

    $BERT_JAX_CACHE (or ~/.cache/bert_jax)/datasets/HASH OF THE DATASET/NAME

It may be deleted at any time. What is in it is never taken for another dataset's, whatever is written where it is from.
A file with a known digest is verified before it is first used, wherever it is; see `digests.py`.
"""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etils import epath

from bert_jax.data.file_digests import Expected, VerifiedFiles
from bert_jax.errors import InputError
from bert_jax.files import atomic, remote

log = logging.getLogger(__name__)

CACHE_VARIABLE = "BERT_JAX_CACHE"

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
        self._verified = VerifiedFiles(cache_folder() / "verified" / dataset_hash)

    def size(self, name: str) -> int | None:
        """Bytes of a file in the folder, None where it is not there."""
        if self._sizes is not None:
            return self._sizes.get(name)
        path = self._folder / name
        return path.stat().length if path.exists() else None

    def open_path(self, name: str, expected: Expected | None = None) -> Path:
        """Returns a file on this machine; fetched if need be.

        Args:
          name: in the folder.
          expected: the digest that it must have; None where it is not known.

        Raises:
          InputError: the file is missing, may not be read, or has another digest.
          BertJaxError: it could not be fetched.
          OSError: the disk is full.
        """
        if self._sizes is None:
            local = Path(os.fspath(self._folder / name))
            if not local.exists():
                raise self._missing(name)
            if expected and (mismatch := self._verified.mismatch(local, expected)):
                raise InputError(
                    f"{local}: damaged, or another dataset's: {mismatch}; copy or prepare the dataset again"
                )
            return local
        size = self._sizes.get(name)
        if size is None:
            raise self._missing(name)
        cached = self._cache / (f"{expected.digest}-{name}" if expected else name)
        if self._is_whole(cached, size, expected):
            return cached
        self._cache.mkdir(parents=True, exist_ok=True)
        with _alone(cached):
            if not self._is_whole(cached, size, expected):  # another process was faster
                _sweep(cached)

                def check(path: Path) -> None:
                    if expected and (mismatch := expected.mismatch(path)):
                        raise remote.IncompleteError(f"it arrived damaged: {mismatch}")

                atomic.download(self._folder / name, cached, size=size, check=check)
                if expected:
                    self._verified.remember(cached, expected)
        return cached

    def _missing(self, name: str) -> InputError:
        return InputError(f"{self._folder / name}: the file is missing; copy or prepare the dataset again")

    def _is_whole(self, path: Path, size: int, expected: Expected | None) -> bool:
        if not path.exists() or path.stat().st_size != size:
            return False
        if expected and (mismatch := self._verified.mismatch(path, expected)):
            log.warning("%s: damaged on this disk (%s); fetching it again", path, mismatch)
            return False
        return True


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
