"""Logs errors of background threads, except those that a library re-raises in the caller."""

import logging
import sys
import threading
import traceback
from typing import Any

log = logging.getLogger(__name__)

_RERAISING = {"orbax", "tensorstore"}
"""Libraries that re-raise the errors of their threads in the caller that waits for the result."""


def show_background_errors() -> None:
    """Logs an error that ends a thread, with its traceback, except for errors of Orbax and TensorStore.

    Those are re-raised: a hundred lines of traceback from the thread would bury the one line with the fix.
    """
    for name in ("absl", "asyncio"):  # asyncio logs errors of tasks other than the one that raised
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
    is_reraised = any(module.partition(".")[0] in _RERAISING for module in modules)
    name = args.thread.name if args.thread else "unknown"
    log.log(
        logging.DEBUG if is_reraised else logging.ERROR, "Thread %s has ended with %s: %s",
        name, args.exc_type.__name__, args.exc_value, exc_info=args.exc_value,
    )  # fmt: skip
