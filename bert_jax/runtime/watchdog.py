"""A run that makes no step says so, with what every thread of it is doing."""

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
    """The Python stack of every thread of this process, the main one first."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
    parts = []
    for thread in threads:
        if thread.ident in frames and thread is not threading.current_thread():
            lines = "".join(traceback.format_stack(frames[thread.ident]))
            parts.append(f"thread {thread.name}:\n{lines}")
    return "\n".join(parts)


class StallWatch:
    """Reports once each time that no step is made for `minutes`, and ends the process after `exit_minutes`; 0 is never.

    The report goes to the log and to a file of this process in the workdir's `stalls`. Every process of a run has a
    watch of its own, and a step that one does not make no other makes.
    """

    def __init__(
        self, workdir: epath.Path, number: int, *, minutes: float, exit_minutes: float,
        leave: Callable[[int], Any] = os._exit,
    ):  # fmt: skip
        """This is process `number` of the run."""
        self._folder, self._number, self._leave = workdir / FOLDER, number, leave
        self._seconds, self._exit_seconds = minutes * 60, exit_minutes * 60
        self._step = 0
        self._since = time.monotonic()
        self._is_reported = False
        limits = [seconds for seconds in (self._seconds, self._exit_seconds) if seconds]
        self._ticker = Ticker(self._look, min(*limits, 40.0) / 4, "stalls") if limits else None

    def beat(self, step: int) -> None:
        """The run is at `step` and moves: it has made it, or works on what follows it."""
        self._step, self._since, self._is_reported = step, time.monotonic(), False

    def close(self) -> None:
        """Watches no longer."""
        if self._ticker:
            self._ticker.close()

    def _look(self) -> None:
        still = time.monotonic() - self._since
        if self._seconds and still > self._seconds and not self._is_reported:
            self._is_reported = True
            self._report(still)
        if self._exit_seconds and still > self._exit_seconds:
            log.error("nothing has moved for %.1f minutes after step %d: the run ends", still / 60, self._step)
            self._leave(BertJaxError.exit_status)

    def _report(self, still: float) -> None:
        text = stacks()
        log.warning(
            "process %d: nothing has moved for %.1f minutes after step %d; what it is doing:\n%s",
            self._number, still / 60, self._step, text,
        )  # fmt: skip
        try:
            atomic.make_folder(self._folder)
            atomic.write_whole(self._folder / f"step-{self._step}-process-{self._number}.txt", text.encode())
        except (OSError, BertJaxError) as error:
            log.warning("the stacks could not be written to %s: %s", self._folder, error)
