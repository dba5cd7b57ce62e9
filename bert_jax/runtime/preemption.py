"""Stop signals (preemption, time limit, closed terminal): they set a flag that the loop reads between steps."""

import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class StopSignal:
    """Records the first of `SIGNALS` while active; a second one has its usual effect.

    A signal that is ignored stays ignored, such as SIGHUP under nohup. Python delivers signals to the main thread only:
    in any other thread nothing is recorded.
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
        self.__exit__()
