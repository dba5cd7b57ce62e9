"""Prefetching: computes batches in background threads, and reads ahead of them."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_CORES_A_THREAD = 4  # NumPy releases the interpreter's lock for most of the time, but not for all of it
_MOST_THREADS = 4


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """Returns the number of threads that make batches: one for every four cores, 1 to 4."""
    return min(max(usable_cores() // _CORES_A_THREAD, 1), _MOST_THREADS)


class Prefetch(Generic[T]):
    """Iterator over `make(step)` for step in [start, stop), computed in background threads, in order.

    At most `depth` items are ready; each of the `threads` threads computes one more. An exception in a thread is raised
    by `next` in place of the item. Call `close` when stopping early.
    """

    def __init__(self, make: Callable[[int], T], start: int, stop: int, depth: int = 3, threads: int | None = None):
        self.waited = 0.0  # seconds that the consumer has waited for items
        self._make, self._stop = make, stop
        self._next, self._begun = start, start  # the next item to return, and to compute
        self._depth = depth
        self._made: dict[int, tuple[T | None, BaseException | None]] = {}
        self._changed = threading.Condition()
        count = min(threads or default_threads(), max(0, stop - start))
        self._threads = [threading.Thread(target=self._run, name="prefetch", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._may_begin)
                step = self._begun
                if step >= self._stop:
                    return
                self._begun += 1
            try:
                item: tuple[T | None, BaseException | None] = (self._make(step), None)
            except BaseException as error:
                item = (None, error)
            with self._changed:
                if item[1] is not None:
                    self._stop = min(self._stop, step + 1)
                self._made[step] = item
                self._changed.notify_all()

    def _may_begin(self) -> bool:
        return self._begun >= self._stop or self._begun < self._next + self._depth + len(self._threads)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        began = time.perf_counter()
        with self._changed:
            if self._next >= self._stop:
                raise StopIteration
            self._changed.wait_for(lambda: self._next in self._made or self._next >= self._stop)
            if self._next >= self._stop:
                raise StopIteration
            item, error = self._made.pop(self._next)
            self._next += 1
            self._changed.notify_all()
        self.waited += time.perf_counter() - began
        if error is not None:
            raise error
        return item  # type: ignore[return-value]

    def close(self) -> None:
        """Stops the threads and waits for them. A consumer that keeps iterating then stops."""
        with self._changed:
            self._stop = self._next = min(self._stop, self._next)
            self._made.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()


class ReadAhead:
    """Runs a function in a thread, one call at a time: a call that comes while it is busy is skipped.

    Errors are ignored: whoever needs the result reads it again, and gets them.
    """

    def __init__(self, function: Callable[..., None]):
        self._function = function
        self._busy = threading.Lock()

    def start(self, *arguments: Any) -> None:
        """Calls the function with `arguments` in a thread, unless an earlier call has not returned."""
        if self._busy.acquire(blocking=False):
            # Not a daemon: a thread inside of ArrayRecord's reader when the interpreter ends would block its end.
            threading.Thread(target=self._run, args=arguments, name="read-ahead").start()

    def _run(self, *arguments: Any) -> None:
        try:
            with suppress(Exception):
                self._function(*arguments)
        finally:
            self._busy.release()
