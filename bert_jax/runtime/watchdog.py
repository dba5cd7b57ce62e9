"""Watchdog: dumps the stacks of all threads if no step completes in time."""

import faulthandler
import sys
from typing import TextIO


class StallWatch:
    """Writes the stacks of all threads to `file` after each `minutes` without a step; 0 is never.

    If `ends`, it ends the process with status 1 the first time. Every process has its own watch, because a process that
    stalls stops the steps of all others. A process has one such timer: a second watch takes it over.
    """

    def __init__(self, minutes: float, *, ends: bool, file: TextIO | None = None):
        self._seconds, self._ends, self._file = minutes * 60, ends, file or sys.__stderr__
        self.beat()

    def beat(self) -> None:
        """Records progress: a step is done, or work beside it continues."""
        if self._seconds:
            faulthandler.dump_traceback_later(
                self._seconds, repeat=not self._ends, exit=self._ends, file=self._file or sys.stderr
            )

    def close(self) -> None:
        """Stops watching."""
        faulthandler.cancel_dump_traceback_later()
