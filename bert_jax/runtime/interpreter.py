"""The Python process of a command: its allocator, errors of its threads, stop signals and the watchdog."""

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

log = logging.getLogger(__name__)

_DEVICES = ("nvidia0", "nvidiactl", "accel0", "accel", "vfio", "kfd")  # GPUs and TPUs in /dev
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # parameters of mallopt in glibc


def tune_malloc() -> None:
    """Tunes glibc malloc to keep freed memory on CPU runs; does nothing elsewhere.

    XLA:CPU allocates the temporaries of each step anew. By default glibc returns them to the kernel in between, which
    zeroes the pages again: some 60,000 page faults and a sixth of the time of a step of BERT-Mini. Never returning them
    matters for large models: a threshold, of at most 2 GiB here, cost BERT-BASE 190,000 faults in most steps. Call it
    before threads start, because each would get its own arena.
    """
    if os.environ.get("JAX_PLATFORMS", "") != "cpu" and any((Path("/dev") / name).exists() for name in _DEVICES):
        return
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL("libc.so.6")
        for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 256 << 20), (_ARENA_MAX, 1)):
            libc.mallopt(parameter, value)


def show_background_errors() -> None:
    """Logs an error that ends a thread, with its traceback, except for errors of Orbax and TensorStore.

    Those are re-raised in the caller that waits for the result: a hundred lines of traceback from the thread would bury
    the one line with the fix.
    """
    for name in ("absl", "asyncio"):  # asyncio logs errors of tasks other than the one that raised
        logging.getLogger(name).setLevel(logging.CRITICAL)
    threading.excepthook = _log_error
    sys.unraisablehook = lambda args: log.debug("%s", args.exc_value)


def _log_error(args: threading.ExceptHookArgs) -> None:
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(args.exc_traceback)]
    if args.exc_type is SystemExit or any(name.startswith(("orbax.", "tensorstore")) for name in modules):
        return
    log.error("Thread %s has ended: %r", args.thread and args.thread.name, args.exc_value, exc_info=args.exc_value)


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class StopSignal:
    """Records the first of `SIGNALS` while active; a second SIGTERM or SIGINT has its usual effect.

    The others are ignored from then on, as systemd sends SIGHUP right after SIGTERM. A signal that is ignored before
    stays ignored, such as SIGHUP under nohup. Python delivers signals to the main thread only: in any other thread
    nothing is recorded.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        for other, handler in self._previous.items():
            signal.signal(other, handler if other in (signal.SIGTERM, signal.SIGINT) else signal.SIG_IGN)  # type: ignore[arg-type]


class StallWatch:
    """Writes the stacks of all threads to stderr after each `minutes` without a step; 0 is never.

    If `ends`, it ends the process with status 1 the first time. Every process has its own watch, because a process that
    stalls stops the steps of all others. A process has one such timer: a second watch takes it over.
    """

    def __init__(self, minutes: float, *, ends: bool):
        self._seconds, self._ends = minutes * 60, ends
        self.beat()

    def beat(self) -> None:
        """Records progress: a step is done, or work beside it continues."""
        if self._seconds:
            file = sys.__stderr__ or sys.stderr
            faulthandler.dump_traceback_later(self._seconds, repeat=not self._ends, exit=self._ends, file=file)

    def close(self) -> None:
        """Stops watching."""
        faulthandler.cancel_dump_traceback_later()
