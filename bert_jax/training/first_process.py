"""Notices at once that process 0 is gone, by a connection to the coordination service that it serves.

JAX's client notices it as well, and then aborts the process. This is faster, mostly: where it is not, the process ends
by SIGABRT, after JAX's own line.
"""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from bert_jax.errors import BertJaxError

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
_LOOK_SECONDS = 1.0


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
        self._thread = threading.Thread(target=self._watch, name="first-process", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watches no longer."""
        self._closed.set()

    def _watch(self) -> None:
        is_connected = False
        while not self._closed.is_set():
            try:
                with socket.create_connection(self._address, timeout=_CONNECT_SECONDS) as connection:
                    is_connected = True
                    self._wait_for_end(connection)
            except ConnectionRefusedError:  # its port is closed: nobody serves it any more
                if is_connected:
                    self._end("is gone")
            except OSError as error:
                log.debug("process 0 cannot be watched: %s", error)
            self._end_if_silent()
            self._closed.wait(0.1 if is_connected else _LOOK_SECONDS)

    def _wait_for_end(self, connection: socket.socket) -> None:
        """Returns when the other end closes the connection, as it does after minutes in which nothing is asked."""
        connection.settimeout(_LOOK_SECONDS)
        while not self._closed.is_set():
            with contextlib.suppress(TimeoutError):
                if not connection.recv(1024):
                    return
            self._end_if_silent()

    def _end_if_silent(self) -> None:
        if self._silence() > self._patience:
            self._end(f"has been silent for {self._silence():.0f} s and counts as lost")

    def _end(self, what: str) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        log.error("process 0 %s: %s", what, self._advice)
        self._leave(BertJaxError.exit_status)
