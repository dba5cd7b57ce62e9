"""Prefetching: computes batches in a background thread."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Iterator over `make(step)` for step in [start, stop), computed in a background thread up to `depth` steps ahead.

    An exception in the thread is raised by `next` in place of the item. Call `close` when stopping early.
    """

    def __init__(self, make: Callable[[int], T], start: int, stop: int, depth: int = 3):
        self._items: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self.waited = 0.0  # seconds that the consumer has waited for items
        self._closed = threading.Event()
        self._remaining = max(0, stop - start)
        self._thread = threading.Thread(target=self._run, args=(make, start, stop), name="prefetch", daemon=True)
        self._thread.start()

    def _run(self, make: Callable[[int], T], start: int, stop: int) -> None:
        for step in range(start, stop):
            try:
                item: tuple[T | None, BaseException | None] = (make(step), None)
            except BaseException as error:
                item = (None, error)
            while not self._closed.is_set():
                try:
                    self._items.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if self._closed.is_set() or item[1] is not None:
                return

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self._remaining:
            raise StopIteration
        began = time.perf_counter()
        item, error = self._items.get()
        self.waited += time.perf_counter() - began
        if error is not None:
            self._remaining = 0
            raise error
        self._remaining -= 1
        return item  # type: ignore[return-value]

    def close(self) -> None:
        """Stops the thread and waits for it."""
        self._remaining = 0  # a consumer that keeps iterating then stops, instead of waiting forever
        self._closed.set()
        self._thread.join()
