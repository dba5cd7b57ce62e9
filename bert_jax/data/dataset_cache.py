"""Local disk cache of remote datasets.

ArrayRecord's reader opens only local files, and the blocks of a shard are read in random order. A remote file is
therefore downloaded on first use and cached for later runs and for other processes of this machine:

    $BERT_JAX_CACHE (or ~/.cache/bert_jax)/datasets/HASH OF THE DATASET/NAME

The shards have at most `$BERT_JAX_CACHE_GB` gigabytes, 50 by default, and the size of the files that are being
downloaded: before a download, the least recently used shards of any dataset are deleted, except those that a process is
about to open. A shard that is needed again is downloaded again.

The cache may be deleted at any time. It is keyed by the hash of the dataset, so that a dataset that replaces another at
the same path does not use its files. A file with a known digest is verified before its first use, cached or not; see
`file_digests.py`.
"""

import fcntl
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from etils import epath

from bert_jax.data.file_digests import Expected, VerifiedFiles
from bert_jax.data.shard_readers import READERS
from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import atomic, remote
from bert_jax.files.remote import cache_folder

log = logging.getLogger(__name__)

_SIZE = "BERT_JAX_CACHE_GB"
SHARD_SUFFIX = ".array_record"
"""Of the files that are deleted to make room; the others are small, and kept."""


class LocalFiles:
    """Local access to the files of one dataset."""

    def __init__(self, folder: epath.Path, dataset_hash: str):
        """Lists a remote `folder` once. `dataset_hash` is the key of the cache."""
        self._folder = folder
        self._sizes = remote.sizes(folder) if remote.is_remote(folder) else None
        self._cache = cache_folder() / "datasets" / dataset_hash
        self._verified = VerifiedFiles(cache_folder() / "verified" / dataset_hash)

    def size(self, name: str) -> int | None:
        """Returns the bytes of a file in the folder, or None for a missing file."""
        if self._sizes is not None:
            return self._sizes.get(name)
        path = self._folder / name
        return path.stat().length if path.exists() else None

    def open_path(self, name: str, expected: Expected | None = None) -> Path:
        """Returns the local path of a file, downloading a remote one that is not cached.

        Args:
          name: the file's name in the folder.
          expected: the expected digest; None if unknown.

        Raises:
          InputError: the file is missing or not readable, or has another digest.
          BertJaxError: the download failed.
          OSError: the disk is full.
        """
        if self._sizes is None:
            local = Path(os.fspath(self._folder / name))
            if not local.exists():
                raise self._missing(name)
            if expected and (mismatch := self._verified.mismatch(local, expected)):
                raise InputError(
                    f"{local}: damaged or of another dataset: {mismatch}; copy or prepare the dataset again"
                )
            return local
        size = self._sizes.get(name)
        if size is None:
            raise self._missing(name)
        cached = self._cached(name, expected)
        if self._is_intact(cached, size, expected):
            return cached
        self._cache.mkdir(parents=True, exist_ok=True)
        with _locked(cached):
            if not self._is_intact(cached, size, expected):  # another process has not downloaded it meanwhile
                if name.endswith(SHARD_SUFFIX):
                    _make_room(size)

                def check(path: Path) -> None:
                    if expected and (mismatch := expected.mismatch(path)):
                        raise BertJaxError(f"{self._folder / name}: corrupt download: {mismatch}; run it again")

                atomic.download(self._folder / name, cached, size=size, check=check)
                if expected:
                    self._verified.remember(cached, expected)
        return cached

    @contextmanager
    def held(self, name: str, expected: Expected | None = None) -> Iterator[Path]:
        """Holds a shard, which no process of this machine deletes meanwhile; yields the path of `open_path`.

        Once the file is open, it may be deleted: the space on disk is freed when it is closed. Raises as `open_path`.
        """
        while True:
            path = self.open_path(name, expected)
            if self._sizes is None:
                yield path
                return
            with _locked(path, fcntl.LOCK_SH):
                if path.exists():  # another process has not deleted it since
                    yield path
                    return

    def mark_used(self, name: str, expected: Expected | None = None) -> None:
        """Makes a remote file the most recently used one."""
        if self._sizes is not None:
            with suppress(OSError):
                os.utime(_lock_of(self._cached(name, expected)))

    def _cached(self, name: str, expected: Expected | None) -> Path:
        return self._cache / (f"{expected.digest}-{name}" if expected else name)

    def _missing(self, name: str) -> InputError:
        return InputError(f"{self._folder / name}: not found; copy or prepare the dataset again")

    def _is_intact(self, path: Path, size: int, expected: Expected | None) -> bool:
        if not path.exists() or path.stat().st_size != size:
            return False
        if expected and (mismatch := self._verified.mismatch(path, expected)):
            log.warning("Cached file %s is damaged (%s); downloading it again", path, mismatch)
            return False
        return True


def _cache_bytes() -> float:
    """Returns the size that the shards of all datasets may have. Raises InputError for an invalid one."""
    size = os.environ.get(_SIZE) or "50"
    with suppress(ValueError):
        if 0 < float(size) < math.inf:
            return float(size) * 1e9
    raise InputError(f"{_SIZE}={size}: expected a number of gigabytes above 0, such as 50")


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


@contextmanager
def _locked(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Holds the lock of a cached file: to download or delete it (exclusive), or to open it (shared).

    A killed process releases it. The time of the lock is that of the last use: the state of a verified file must stay.
    Raises BlockingIOError with LOCK_NB if another process or thread holds the lock.
    """
    with open(_lock_of(path), "w") as lock:
        fcntl.flock(lock, kind)
        os.utime(lock.fileno())
        yield


def _make_room(needed: int) -> None:
    """Deletes the least recently used shards of all datasets, until `needed` more bytes fit in the cache."""
    used: dict[Path, tuple[float, int]] = {}
    for path in (cache_folder() / "datasets").glob(f"*/*{SHARD_SUFFIX}"):
        with suppress(FileNotFoundError):  # deleted by another process meanwhile
            used[path] = _lock_of(path).stat().st_mtime, path.stat().st_size
    excess = sum(size for _, size in used.values()) + needed - _cache_bytes()
    for path in sorted(used, key=lambda path: used[path]):
        if excess <= 0:
            return
        with suppress(BlockingIOError), _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
            path.unlink(missing_ok=True)
            READERS.discard(path)
            excess -= used[path][1]
