"""Something done every few seconds beside the work."""

import threading
from collections.abc import Callable


class Ticker:
    """Calls `action` every `seconds` in a thread of its own, until it is closed; the first time after `seconds`.

    `action` has to deal with its own errors: one that it raises ends the thread.
    """

    def __init__(self, action: Callable[[], None], seconds: float, name: str):
        self._action = action
        self._seconds = seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(self._seconds):
            self._action()

    def close(self) -> None:
        """Ends the thread and waits for it."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
