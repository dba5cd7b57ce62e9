"""Cache of open shard readers, bounded for any number of shards, datasets and threads."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path

from array_record.python.array_record_module import ArrayRecordReader

MAX_OPEN = 256
"""Maximum number of open readers. Each holds a file open; the default limit of a process is 1,024."""


class ShardReaders:
    """Thread-safe LRU cache of readers by key; the least recently used ones are closed."""

    def __init__(self, max_open: int = MAX_OPEN):
        self._max_open = max_open
        self._readers: OrderedDict[Hashable, tuple[Path, ArrayRecordReader]] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, key: Hashable, path: Path) -> ArrayRecordReader:
        """Returns the reader of a shard. An evicted reader closes its file when its last user releases it.

        Raises RuntimeError or ValueError if the file cannot be opened.
        """
        with self._lock:
            if key not in self._readers:
                while len(self._readers) >= self._max_open:
                    self._readers.popitem(last=False)
                self._readers[key] = path, ArrayRecordReader(str(path), "readahead_buffer_size:0")
            self._readers.move_to_end(key)
            return self._readers[key][1]

    def find(self, key: Hashable) -> ArrayRecordReader | None:
        """Returns the reader of a shard if it is open."""
        with self._lock:
            if key not in self._readers:
                return None
            self._readers.move_to_end(key)
            return self._readers[key][1]

    def discard(self, path: Path) -> None:
        """Closes the readers of a file, which frees the disk space of a deleted one."""
        with self._lock:
            for key in [key for key, (opened, _) in self._readers.items() if opened == path]:
                del self._readers[key]


READERS = ShardReaders()
"""Readers of this process: the limit of open files is per process."""
