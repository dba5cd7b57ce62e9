"""Watch over process 0: detects its end at once, by a connection to its coordination service.

JAX's client detects it as well, prints a page of C++ messages and aborts the process without returning to Python; so
does that of process 0 where another process is cut off. To log first, every abort is delayed by some seconds, and an
abort for another reason still ends the process by SIGABRT.
"""

import ctypes
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from bert_jax.errors import BertJaxError

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
_LOOK_SECONDS = 1.0


_LIBC = ctypes.CDLL(None)
_LIBC.signal.argtypes, _LIBC.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p


def _set_abort_handler(handler: int | None) -> int | None:
    """Sets the address of the C function that handles SIGABRT, None for the default. Returns the previous one."""
    return _LIBC.signal(int(signal.SIGABRT), handler)


class DelayedAborts:
    """Delays aborts of this process by 6 seconds, until closed."""

    def __init__(self) -> None:
        """Replaces the handler of SIGABRT by sleep(3), which gets the signal's number: 6."""
        self._previous = _set_abort_handler(ctypes.cast(_LIBC.sleep, ctypes.c_void_p).value)

    def close(self) -> None:
        """Restores the handler."""
        _set_abort_handler(self._previous)


class FirstProcessWatch:
    """Ends this process with a log line and status 1 when process 0 has ended or is silent, until closed."""

    def __init__(
        self, address: str, silence: Callable[[], float], *, patience: float, advice: str,
        leave: Callable[[int], Any] = os._exit,
    ):  # fmt: skip
        """Starts watching the service at `address`, HOST:PORT.

        `silence` returns the seconds since its last answer, `patience` is the limit in seconds. The log line ends with
        `advice`. `leave` ends the process with a status, at once.
        """
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._silence, self._patience, self._advice, self._leave = silence, patience, advice, leave
        self._closed = threading.Event()
        self._aborts = DelayedAborts()
        self._thread = threading.Thread(target=self._watch, name="first-process", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching."""
        self._closed.set()
        self._aborts.close()

    def _watch(self) -> None:
        was_connected = False
        while not self._closed.is_set():
            try:
                connection = socket.create_connection(self._address, timeout=_CONNECT_SECONDS)
            except OSError as error:
                if was_connected and isinstance(error, ConnectionRefusedError):  # the port is closed: the process ended
                    self._end("has ended")
                log.debug("Cannot connect to process 0: %s", error)
                self._end_if_silent()
                self._closed.wait(_LOOK_SECONDS)
                continue
            was_connected = True
            with connection:
                self._wait_for_end(connection)

    def _wait_for_end(self, connection: socket.socket) -> None:
        """Returns when the service closes the connection, which it does after some idle minutes."""
        connection.settimeout(_LOOK_SECONDS)
        while not self._closed.is_set():
            try:
                if not connection.recv(1024):
                    return
            except TimeoutError:
                self._end_if_silent()
            except OSError:  # reset by the other end
                return

    def _end_if_silent(self) -> None:
        if self._silence() > self._patience:
            self._end(f"has not answered for {self._silence():.0f} s and counts as lost")

    def _end(self, reason: str) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        log.error("Process 0 %s: %s", reason, self._advice)
        self._leave(BertJaxError.exit_status)
