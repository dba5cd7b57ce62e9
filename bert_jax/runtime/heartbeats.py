"""Heartbeats and failure propagation between the processes of a run.

A collective waits forever for a process that has ended. Each process therefore writes a heartbeat every few seconds to
the key-value store of JAX's coordination service, which process 0 hosts. Process 0 writes a failure there for a process
without heartbeats. All other processes then end, each with a log line that gives the reason.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from bert_jax.errors import BertJaxError
from bert_jax.runtime.ticker import Ticker

log = logging.getLogger(__name__)

RESTART_ADVICE = "rerun the same command; it resumes from the newest checkpoint"
_EVERY_SECONDS = 5.0
PATIENCE_SECONDS = 30.0  # without a heartbeat before a process counts as lost
_LINGER_SECONDS = 15.0  # that process 0, which hosts the store, waits for the others to read the reason


class Store(Protocol):
    """The methods in use of JAX's client of the coordination service."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
    def key_value_try_get(self, key: str) -> str: ...
    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...


def _alive(number: int) -> str:
    return f"bert_jax/alive/{number}"


_FAILURE = "bert_jax/failure"
_LEFT = "bert_jax/left"


class Peers:
    """Watches the other processes until closed, and ends this one when another is lost or has failed."""

    def __init__(
        self, store: Store, number: int, count: int, *,
        leave: Callable[[int], Any] = os._exit,
        every: float = _EVERY_SECONDS, patience: float = PATIENCE_SECONDS, linger: float = _LINGER_SECONDS,
    ):  # fmt: skip
        """Starts the heartbeats of process `number` of `count`. `leave` ends the process with a status, at once."""
        self._store, self._number, self._count = store, number, count
        self._leave, self._every, self._patience, self._linger = leave, every, patience, linger
        self._ended = threading.Event()  # `leave` was called, and has returned, as in tests alone
        self._identity = {"host": socket.gethostname(), "pid": os.getpid()}
        self._beats = 0
        self._answered_at = self._watched_at = time.monotonic()
        self._heard: dict[int, tuple[str, float]] = {}  # last heartbeat of each process, and when it was first seen
        self._beat()
        self._ticker = Ticker(self._watch, every, "peers")

    def silence(self) -> float:
        """Returns the seconds since the last answer of process 0."""
        return time.monotonic() - self._answered_at

    def report(self, status: int, message: str) -> None:
        """Reports to the others that this process ends with `status`, and why. Only the first report counts.

        Process 0 waits a while for them to read it, because the store ends with it.
        """
        self._ticker.close()
        self._report_failure({"status": status, "message": message, "number": self._number, **self._identity})
        self._wait_for_others()

    def wait_for_reason(self) -> None:
        """Waits, after a failed collective, until the cause is known: the watch then ends this process with its status.

        The cause is the report of another process, or a process without heartbeats. Returns after `patience` and four
        more heartbeats if neither is found.
        """
        self._ended.wait(self._patience + 4 * self._every)

    def close(self) -> None:
        """Marks this process as done and ends its heartbeats."""
        self._ticker.close()
        self._beat(done=True)

    def _beat(self, *, done: bool = False) -> None:
        self._beats += 1
        heartbeat = json.dumps({**self._identity, "beats": self._beats, "done": done})
        self._store.key_value_set(_alive(self._number), heartbeat, allow_overwrite=True)

    def _watch(self) -> None:
        gap, self._watched_at = time.monotonic() - self._watched_at, time.monotonic()
        # The others have ended, or will; what is in buffers must not be written. They may have counted the seconds
        # since the heartbeat before, and process 0, which writes, gives way to them.
        if gap > self._patience + (self._every if self._number else -self._every):
            log.error("This process was stopped for %.0f s and counts as lost: %s", gap, RESTART_ADVICE)
            self._leave(BertJaxError.exit_status)
            self._ended.set()
            return
        try:
            self._beat()
            failure = self._failure() or (self._lost() if self._number == 0 else None)
        except Exception as error:  # of the store, which process 0 hosts
            log.debug("Process 0 does not answer: %s", error)  # `FirstProcessWatch` handles that
            return
        self._answered_at = time.monotonic()
        if failure is None:
            return
        sender = f"Process {failure['number']} ({failure['host']}, pid {failure['pid']})"
        log.error("%s %s", sender, failure["message"])
        self._wait_for_others(lost=failure.get("lost", 0))
        self._leave(failure["status"])
        self._ended.set()

    def _failure(self) -> dict[str, Any] | None:
        """Reads the first reported failure, or None."""
        try:
            return json.loads(self._store.key_value_try_get(_FAILURE))
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def _report_failure(self, failure: dict[str, Any]) -> None:
        try:
            self._store.key_value_set(_FAILURE, json.dumps(failure))
        except Exception as error:
            log.debug("Failure was not reported: %s", error)  # another was first, or process 0 has ended

    def _lost(self) -> dict[str, Any] | None:
        """Finds a process without heartbeats, and reports it as a failure with the number of such processes."""
        now = time.monotonic()
        silences: dict[int, tuple[float, dict[str, Any]]] = {}
        for key, heartbeat in self._store.key_value_dir_get("bert_jax/alive/"):
            number = int(key.rsplit("/", 1)[-1])
            if heartbeat != self._heard.get(number, ("", now))[0]:
                self._heard[number] = heartbeat, now
            sender = json.loads(heartbeat)
            if number and not sender["done"]:
                silences[number] = now - self._heard[number][1], sender
        silence, number = max(((silence, number) for number, (silence, _) in silences.items()), default=(0.0, 0))
        if silence <= self._patience:
            return None
        message = f"sent no heartbeat for {silence:.0f} s and counts as lost: {RESTART_ADVICE}"
        # Where this process is cut off, all are silent, and none will read the report.
        lost = sum(other > self._patience - self._every for other, _ in silences.values())
        status = BertJaxError.exit_status
        failure = {**silences[number][1], "number": number, "status": status, "message": message, "lost": lost}
        self._report_failure(failure)
        return failure

    def _wait_for_others(self, lost: int = 0) -> None:
        """Announces the end of this process; process 0 waits for all but `lost` processes."""
        try:
            self._store.key_value_set(f"{_LEFT}/{self._number}", "", allow_overwrite=True)
            end = time.monotonic() + self._linger
            while self._number == 0 and time.monotonic() < end:
                if len(self._store.key_value_dir_get(f"{_LEFT}/")) >= self._count - lost:
                    return
                time.sleep(0.1)
        except Exception as error:
            log.debug("Process 0 has ended: %s", error)
