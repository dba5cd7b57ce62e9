"""Watchdog: dumps the stacks of all threads if no step completes in time."""

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from etils import epath

from bert_jax.errors import BertJaxError
from bert_jax.files import atomic
from bert_jax.runtime.ticker import Ticker

log = logging.getLogger(__name__)

FOLDER = "stalls"


def stacks() -> str:
    """Formats the Python stack of every thread of this process, the main thread first."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
    parts = []
    for thread in threads:
        if thread.ident in frames and thread is not threading.current_thread():
            lines = "".join(traceback.format_stack(frames[thread.ident]))
            parts.append(f"thread {thread.name}:\n{lines}")
    return "\n".join(parts)


class StallWatch:
    """Reports each stall of `minutes` without a step once, and ends the process after `exit_minutes`; 0 is never.

    The report goes to the log and to a file of this process in the workdir's `stalls`. Every process has its own
    watch, because a process that stalls stops the steps of all others.
    """

    def __init__(
        self, workdir: epath.Path, number: int, *, minutes: float, exit_minutes: float,
        leave: Callable[[int], Any] = os._exit,
    ):  # fmt: skip
        """Starts the watch of process `number` of the run."""
        self._folder, self._number, self._leave = workdir / FOLDER, number, leave
        self._seconds, self._exit_seconds = minutes * 60, exit_minutes * 60
        self._step = 0
        self._since = time.monotonic()
        self._is_reported = False
        limits = [seconds for seconds in (self._seconds, self._exit_seconds) if seconds]
        self._ticker = Ticker(self._look, min(*limits, 40.0) / 4, "stalls") if limits else None

    def beat(self, step: int) -> None:
        """Records progress: `step` is done, or work after it continues."""
        self._step, self._since, self._is_reported = step, time.monotonic(), False

    def close(self) -> None:
        """Stops watching."""
        if self._ticker:
            self._ticker.close()

    def _look(self) -> None:
        stalled = time.monotonic() - self._since
        if self._seconds and stalled > self._seconds and not self._is_reported:
            self._is_reported = True
            self._report(stalled)
        if self._exit_seconds and stalled > self._exit_seconds:
            log.error("No step completed for %.1f min (last step %d); ending the run", stalled / 60, self._step)
            self._leave(BertJaxError.exit_status)

    def _report(self, stalled: float) -> None:
        text = stacks()
        log.warning(
            "Process %d: no step completed for %.1f min (last step %d). Thread stacks:\n%s",
            self._number, stalled / 60, self._step, text,
        )  # fmt: skip
        try:
            atomic.make_folder(self._folder)
            atomic.write_whole(self._folder / f"step-{self._step}-process-{self._number}.txt", text.encode())
        except (OSError, BertJaxError) as error:
            log.warning("Thread stacks could not be written to %s: %s", self._folder, error)
