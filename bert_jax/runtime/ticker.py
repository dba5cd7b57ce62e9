"""Periodic action in a background thread."""

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Ticker:
    """Calls `action` every `seconds` in a thread of its own until closed, first after `seconds`.

    An error of `action` is logged, with a traceback the first time unless it is of a file (OSError), and `action` is
    called again after `seconds`. If an error has to end the run, `action` must do that.
    """

    def __init__(self, action: Callable[[], None], seconds: float, name: str):
        self._action = action
        self._seconds = seconds
        self._name = name
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        failures = 0
        while not self._closed.wait(self._seconds):
            try:
                self._action()
            except Exception as error:
                failures += 1
                log.error(
                    "Thread %s failed with %s: %s; retrying in %.0f s",
                    self._name, type(error).__name__, error, self._seconds,
                    exc_info=failures == 1 and not isinstance(error, OSError),
                )  # fmt: skip

    def close(self) -> None:
        """Ends the thread and waits for it."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
