"""Logs errors of background threads: our own, not those that are raised again where a result is wanted."""

import logging
import sys
import threading
import traceback
from typing import Any

log = logging.getLogger(__name__)

_RAISED_AGAIN = {"orbax", "tensorstore"}
"""Libraries whose threads fail with an error that is raised again where their result is wanted."""


def show_background_errors() -> None:
    """Logs what ends a thread, with its traceback, but for an error of Orbax or TensorStore.

    Printed from the thread as well, some hundred lines of traceback would bury the one line that says what to do.
    """
    for name in ("absl", "asyncio"):  # asyncio's: of tasks beside the one whose error was raised
        logging.getLogger(name).setLevel(logging.CRITICAL)
    threading.excepthook = _thread_ended
    sys.unraisablehook = lambda args: log.debug("%s", args.exc_value)

    def from_a_thread(kind: Any, error: Any, trace: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = from_a_thread


def _thread_ended(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit or args.exc_value is None:
        return
    modules = {frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(args.exc_traceback)}
    is_raised_again = any(module.partition(".")[0] in _RAISED_AGAIN for module in modules)
    name = args.thread.name if args.thread else "unknown"
    log.log(
        logging.DEBUG if is_raised_again else logging.ERROR, "thread %s has ended: %s: %s",
        name, args.exc_type.__name__, args.exc_value, exc_info=args.exc_value,
    )  # fmt: skip
