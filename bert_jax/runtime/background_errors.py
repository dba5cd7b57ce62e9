"""Logs errors of background threads, except those that a library re-raises in the caller."""

import logging
import sys
import threading
import traceback

log = logging.getLogger(__name__)


def show_background_errors() -> None:
    """Logs an error that ends a thread, with its traceback, except for errors of Orbax and TensorStore.

    Those are re-raised in the caller that waits for the result: a hundred lines of traceback from the thread would bury
    the one line with the fix.
    """
    for name in ("absl", "asyncio"):  # asyncio logs errors of tasks other than the one that raised
        logging.getLogger(name).setLevel(logging.CRITICAL)
    threading.excepthook = _log_error
    sys.unraisablehook = lambda args: log.debug("%s", args.exc_value)
    main = threading.main_thread()
    sys.excepthook = lambda *error: sys.__excepthook__(*error) if threading.current_thread() is main else None


def _log_error(args: threading.ExceptHookArgs) -> None:
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(args.exc_traceback)]
    if args.exc_type is SystemExit or any(name.startswith(("orbax.", "tensorstore")) for name in modules):
        return
    log.error("Thread %s has ended: %r", args.thread and args.thread.name, args.exc_value, exc_info=args.exc_value)
