"""Stop signal (preemption): SIGTERM and SIGINT set a flag that the loop reads between steps."""

import signal
import threading
from types import FrameType


class StopSignal:
    """Records the first SIGTERM or SIGINT while active; a second one has its usual effect.

    Python delivers signals to the main thread only: in any other thread nothing is recorded.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self.__exit__()
