"""Watchdog: dumps the stacks of all threads if no step completes in time."""

import faulthandler
import sys


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
