"""Open readers of shards: a bounded number of them, whatever the number of shards, datasets and threads."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path

from array_record.python.array_record_module import ArrayRecordReader

MAX_OPEN = 256
"""A reader holds a file open, and a process may open 1,024 by default."""


class ShardReaders:
    """Readers by key, of which the least recently used are closed. Threads may share it."""

    def __init__(self, max_open: int = MAX_OPEN):
        self._max_open = max_open
        self._readers: OrderedDict[Hashable, ArrayRecordReader] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, key: Hashable, path: Path) -> ArrayRecordReader:
        """Returns the reader of a shard; one that is dropped here closes its file when its last user lets go of it.

        Raises RuntimeError or ValueError where the file cannot be opened.
        """
        with self._lock:
            reader = self._readers.pop(key, None)
            if reader is None:
                while len(self._readers) >= self._max_open:
                    self._readers.popitem(last=False)
                reader = ArrayRecordReader(str(path), "readahead_buffer_size:0")
            self._readers[key] = reader
            return reader


READERS = ShardReaders()
"""Those of this process: the limit is the process's."""
