"""A workdir is one run's at a time: the run that holds its lease says so every few seconds, in a file in it.

A lease outlives a run that was killed. It is known to be nobody's at once where its process was of this machine and is
gone, and otherwise when nobody has renewed it for a while: clocks of different machines are not compared.
"""

import json
import logging
import os
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from etils import epath

from bert_jax import remote, whole_files
from bert_jax.errors import BertJaxError, InputError
from bert_jax.training.ticker import Ticker

log = logging.getLogger(__name__)

LEASE_FILE = "lease.json"
RENEW_SECONDS = 10.0
STALE_SECONDS = 30.0  # without a renewal
_SETTLE_SECONDS = 0.5  # in which one of two that wrote at the same time turns out to have been the first


def _machine() -> str:
    """What tells process ids apart: the machine since its start, and the container in it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return socket.gethostname()


def _started(pid: int) -> str:
    """When a process of this machine started, "" where there is none: process ids are used again."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rsplit(")", 1)[1].split()[19]  # in ticks since the machine's start
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:  # it is there, and another user's
        pass
    return "" if Path("/proc/self/stat").exists() else "unknown"


class Lease:
    """The workdir is this process's until `close`; InputError where it is another's."""

    def __init__(self, folder: epath.Path, *, renew: float = RENEW_SECONDS, stale: float = STALE_SECONDS):
        self._path = folder / LEASE_FILE
        self._stale = stale
        pid = os.getpid()
        self._mine: dict[str, Any] = {
            "host": socket.gethostname(), "pid": pid, "machine": _machine(), "started": _started(pid),
            "token": uuid.uuid4().hex, "renewed": 0,
        }  # fmt: skip
        self._taken_by: dict[str, Any] | None = None
        if holder := self._read():
            self._check_gone(holder)
        self._write()
        time.sleep(_SETTLE_SECONDS)
        if (holder := self._read()) and holder["token"] != self._mine["token"]:
            raise self._refusal(holder)
        self._ticker = Ticker(self._renew, renew, "lease")

    def check(self) -> None:
        """BertJaxError where another run has taken the workdir, as it may when this one was frozen for long."""
        if self._taken_by:
            raise BertJaxError(
                f"{self._path.parent} was taken over by {_name(self._taken_by)}, which heard nothing of this run for "
                f"{self._stale:.0f} s: nothing more is written there from here"
            )

    def close(self) -> None:
        """Gives the workdir free."""
        self._ticker.close()
        try:
            holder = self._read()
            if holder and holder["token"] == self._mine["token"]:
                self._path.unlink()
        except (OSError, BertJaxError) as error:
            log.warning("%s could not be deleted (%s): the next run here will wait for it", self._path, error)

    def _read(self) -> dict[str, Any] | None:
        if not remote.exists(self._path):
            return None
        try:
            text = remote.patiently(self._path, self._path.read_text)
        except FileNotFoundError:
            return None
        try:
            holder = json.loads(text)
            if all(name in holder for name in self._mine):
                return holder
        except (ValueError, TypeError):
            pass
        return {**self._mine, "host": "an unknown host", "pid": 0, "machine": "", "token": text}

    def _write(self) -> None:
        whole_files.write_whole(self._path, (json.dumps(self._mine, indent=2) + "\n").encode())

    def _renew(self) -> None:
        try:
            holder = self._read()
            if holder and holder["token"] != self._mine["token"]:
                self._taken_by = holder
                return
            self._mine["renewed"] += 1
            self._write()
        except (OSError, BertJaxError) as error:  # tried again at the next renewal
            log.warning("%s could not be renewed: %s", self._path, error)

    def _check_gone(self, holder: dict[str, Any]) -> None:
        """Returns once the holder is known to be gone; InputError while it is there."""
        if holder["machine"] == self._mine["machine"]:
            if holder["started"] == _started(holder["pid"]):
                raise self._refusal(holder)
            log.info("the run that had %s, %s, is gone", self._path.parent, _name(holder))
            return
        log.info("%s has a lease of %s: %.0f s to see if it is renewed", self._path.parent, _name(holder), self._stale)
        end = time.monotonic() + self._stale
        while time.monotonic() < end:
            time.sleep(min(1.0, self._stale / 10))
            if (now := self._read()) != holder:
                if now is None:
                    return
                raise self._refusal(now)
        log.info("it was not: %s is gone", _name(holder))

    def _refusal(self, holder: dict[str, Any]) -> InputError:
        return InputError(
            f"--workdir: {self._path.parent} is in use by another run, {_name(holder)}: wait for it or stop it, or "
            "choose another folder"
        )


def _name(holder: dict[str, Any]) -> str:
    return f"process {holder['pid']} on {holder['host']}"
