"""Prefetching: computes batches in background threads, by Grain."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import grain

T = TypeVar("T")

_CORES_A_THREAD = 4  # NumPy releases the interpreter's lock for most of the time, but not for all of it
_MOST_THREADS = 4
_AHEAD = 3  # finished items that wait, beside those that the threads compute


class Prefetch(Generic[T]):
    """Iterator over `make(step)` for step in [start, stop), computed in background threads, in order.

    An exception in a thread is raised by `next` in place of the item. Call `close` when stopping early. `waited` is the
    time in seconds that the consumer has waited for items.
    """

    def __init__(self, make: Callable[[int], T], start: int, stop: int):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = min(max(cores // _CORES_A_THREAD, 1), _MOST_THREADS)
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads + _AHEAD)
        steps = grain.MapDataset.range(start, max(start, stop))
        self._items: Any = iter(steps.map(make).to_iter_dataset(options))
        self.waited = 0.0

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        began = time.perf_counter()
        item: T = next(self._items)
        self.waited += time.perf_counter() - began
        return item

    def close(self) -> None:
        """Stops the threads, each after the item that it computes."""
        self._items.close()
