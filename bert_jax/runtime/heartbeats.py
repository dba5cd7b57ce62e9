"""What the processes of a run tell each other apart from the work: that they are alive, and why one has failed.

A collective waits for ever for a process that is gone. Each process therefore says every few seconds that it is alive,
in the key-value store that JAX's coordination service keeps in process 0, and process 0 says in the same place which
one has fallen silent. All of the others then end, each with a line that says why.
"""

import json
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

from bert_jax.errors import BertJaxError
from bert_jax.runtime.ticker import Ticker

log = logging.getLogger(__name__)

AGAIN = "start the run again, it goes on from its newest checkpoint"
_EVERY_SECONDS = 5.0
PATIENCE_SECONDS = 30.0  # of silence before a process counts as lost
_LINGER_SECONDS = 15.0  # that process 0, which has the store, waits for the others to read why it ends


class Store(Protocol):
    """What is used of JAX's client of the coordination service."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
    def key_value_try_get(self, key: str) -> str: ...
    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...


def _alive(number: int) -> str:
    return f"bert_jax/alive/{number}"


_FAILURE = "bert_jax/failure"
_LEFT = "bert_jax/left"


class Peers:
    """Watches the other processes until it is closed, and ends this one when one of them is lost or has failed."""

    def __init__(
        self, store: Store, number: int, count: int, *,
        leave: Callable[[int], Any] = os._exit,
        every: float = _EVERY_SECONDS, patience: float = PATIENCE_SECONDS, linger: float = _LINGER_SECONDS,
    ):  # fmt: skip
        """This is process `number` of `count`. `leave` ends the process with a status, at once."""
        self._store, self._number, self._count = store, number, count
        self._leave, self._patience, self._linger = leave, patience, linger
        self._me = {"host": socket.gethostname(), "pid": os.getpid()}
        self._beats = 0
        self._answered_at = time.monotonic()
        self._heard: dict[int, tuple[str, float]] = {}  # what each process has said last, and since when
        self._beat()
        self._ticker = Ticker(self._watch, every, "peers")

    def silence(self) -> float:
        """Returns how many seconds ago process 0 has answered last."""
        return time.monotonic() - self._answered_at

    def report(self, status: int, message: str) -> None:
        """Tells the others that this process ends with `status`, and why. The first to say so is the one that counts.

        Process 0 waits a while for them to read it: the store goes with it.
        """
        self._ticker.close()
        self._say({"status": status, "message": message, "number": self._number, **self._me})
        self._wait_for_others()

    def close(self) -> None:
        """This process is done, and will be silent."""
        self._ticker.close()
        self._beat(done=True)

    def _beat(self, *, done: bool = False) -> None:
        self._beats += 1
        said = json.dumps({**self._me, "beats": self._beats, "done": done})
        self._store.key_value_set(_alive(self._number), said, allow_overwrite=True)

    def _watch(self) -> None:
        try:
            self._beat()
            failure = self._failure() or (self._lost() if self._number == 0 else None)
        except Exception as error:  # of the store, which process 0 has
            log.debug("process 0 does not answer: %s", error)  # `FirstProcessWatch` sees to that
            return
        self._answered_at = time.monotonic()
        if failure is None:
            return
        who = f"process {failure['number']} ({failure['host']}, pid {failure['pid']})"
        log.error("%s %s", who, failure["message"])
        self._wait_for_others(but=1 if failure.get("lost") else 0)
        self._leave(failure["status"])

    def _failure(self) -> dict[str, Any] | None:
        """What a process has said of its end; nothing where none has."""
        try:
            return json.loads(self._store.key_value_try_get(_FAILURE))
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def _say(self, failure: dict[str, Any]) -> None:
        try:
            self._store.key_value_set(_FAILURE, json.dumps(failure))
        except Exception as error:
            log.debug("the others are not told: %s", error)  # another was first, or process 0 is gone

    def _lost(self) -> dict[str, Any] | None:
        """The failure that a process's silence is, told to the others."""
        now = time.monotonic()
        for key, said in self._store.key_value_dir_get("bert_jax/alive/"):
            number = int(key.rsplit("/", 1)[-1])
            if said != self._heard.get(number, ("", now))[0]:
                self._heard[number] = said, now
            silence = now - self._heard[number][1]
            about = json.loads(said)
            if number and not about["done"] and silence > self._patience:
                message = f"has been silent for {silence:.0f} s and counts as lost: {AGAIN}"
                failure = {
                    **about, "number": number, "status": BertJaxError.exit_status, "message": message, "lost": True
                }  # fmt: skip
                self._say(failure)
                return failure
        return None

    def _wait_for_others(self, but: int = 0) -> None:
        """Says that this process goes; process 0 goes last, `but` for so many that will not be heard of again."""
        try:
            self._store.key_value_set(f"{_LEFT}/{self._number}", "", allow_overwrite=True)
            end = time.monotonic() + self._linger
            while self._number == 0 and time.monotonic() < end:
                if len(self._store.key_value_dir_get(f"{_LEFT}/")) >= self._count - but:
                    return
                time.sleep(0.1)
        except Exception as error:
            log.debug("process 0 is gone: %s", error)
