"""Notices at once that process 0 is gone, by a connection to the coordination service that it serves.

JAX's client notices it as well, prints a page of C++ and aborts the process, without asking Python. So that the abort
does not come first, every abort is held up for some seconds. It is not changed otherwise: what aborts for another
reason ends by SIGABRT, as always.
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
    """Sets the address of a C function that SIGABRT calls with its number, None for none. Returns the one before."""
    return _LIBC.signal(int(signal.SIGABRT), handler)


class FirstProcessWatch:
    """Ends this process with status 1 and a line when process 0 is gone or silent, until it is closed."""

    def __init__(
        self, address: str, silence: Callable[[], float], *, patience: float, advice: str,
        leave: Callable[[int], Any] = os._exit,
    ):  # fmt: skip
        """`address` is HOST:PORT of the service, `silence` how many seconds ago it has answered, `patience` the limit.

        The line ends with `advice`. `leave` ends the process with a status, at once.
        """
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._silence, self._patience, self._advice, self._leave = silence, patience, advice, leave
        self._closed = threading.Event()
        self._abort_handler = _set_abort_handler(ctypes.cast(_LIBC.sleep, ctypes.c_void_p).value)  # for SIGABRT, 6, s
        self._thread = threading.Thread(target=self._watch, name="first-process", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watches no longer."""
        self._closed.set()
        _set_abort_handler(self._abort_handler)

    def _watch(self) -> None:
        is_known = False
        while not self._closed.is_set():
            try:
                connection = socket.create_connection(self._address, timeout=_CONNECT_SECONDS)
            except OSError as error:
                if is_known and isinstance(error, ConnectionRefusedError):  # its port is closed: nobody serves it
                    self._end("is gone")
                log.debug("process 0 cannot be watched: %s", error)
                self._end_if_silent()
                self._closed.wait(_LOOK_SECONDS)
                continue
            is_known = True
            with connection:
                self._wait_for_end(connection)

    def _wait_for_end(self, connection: socket.socket) -> None:
        """Returns when the other end closes the connection, as it does after minutes in which nothing is asked."""
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
            self._end(f"has been silent for {self._silence():.0f} s and counts as lost")

    def _end(self, what: str) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        log.error("process 0 %s: %s", what, self._advice)
        self._leave(BertJaxError.exit_status)
