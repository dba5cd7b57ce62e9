"""A workdir is one run's at a time: the run that holds its lease says so every few seconds, in a file in it.

A lease outlives a run that was killed. It is known to be nobody's at once where its process was of this machine and is
gone, and otherwise when nobody has renewed it for a while: clocks of different machines are not compared. A run that
could not renew it for as long, because it was frozen or the network was gone, writes nothing before it has.
"""

import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from etils import epath

from bert_jax.errors import BertJaxError, InputError
from bert_jax.runtime.lease_file import Found, open_lease_file
from bert_jax.runtime.ticker import Ticker

log = logging.getLogger(__name__)

LEASE_FILE = "lease.json"
RENEW_SECONDS = 10.0
STALE_SECONDS = 30.0  # without a renewal
_FILE_BYTES = 1024  # always as many, so that a renewal in place leaves nothing of the content before it
_TYPES = {"host": str, "pid": int, "machine": str, "started": str, "token": str, "renewed": int}
_TRIES = 5  # to take a lease that changes hands meanwhile


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


def _now() -> float:
    """Seconds that go on while the process or the whole machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Lease:
    """The workdir is this process's until `close`; InputError where it is another's."""

    def __init__(self, folder: epath.Path, *, renew: float = RENEW_SECONDS, stale: float = STALE_SECONDS):
        self._path = folder / LEASE_FILE
        self._file = open_lease_file(self._path)
        self._stale = stale
        pid = os.getpid()
        self._mine: dict[str, Any] = {
            "host": socket.gethostname(), "pid": pid, "machine": _machine(), "started": _started(pid),
            "token": uuid.uuid4().hex, "renewed": 0,
        }  # fmt: skip
        self._lost = ""  # why the workdir is no longer this process's
        self._lock = threading.Lock()  # of renewals
        self._renewed_at = _now()
        self._take()
        self._ticker = Ticker(self._renew, renew, "lease")

    def check(self) -> None:
        """Raises BertJaxError where another run has taken the workdir, as it may when this one was frozen for long.

        Renews the lease first where that was not done for so long that another run may take it.
        """
        if _now() - self._renewed_at > self._stale:
            self.confirm()
        if self._lost:
            raise BertJaxError(f"{self._lost}: nothing more is written there from here")

    def confirm(self) -> None:
        """Renews the lease now, before something large is written or deleted. Raises BertJaxError where it cannot."""
        try:
            self._renew()
        except Exception as error:
            silent = _now() - self._renewed_at
            raise BertJaxError(
                f"{self._path} could not be renewed for {silent:.0f} s ({type(error).__name__}: {error}), and another "
                "run may take the workdir: nothing more is written there from here; start the run again"
            ) from error
        if self._lost:
            raise BertJaxError(f"{self._lost}: nothing more is written there from here")

    def close(self) -> None:
        """Gives the workdir free."""
        self._ticker.close()
        if self._lost:
            return
        try:
            self._file.release(self._is_mine)
        except Exception as error:
            log.warning("%s could not be deleted (%s): the next run here will wait for it", self._path, error)

    def _content(self) -> bytes:
        return json.dumps(self._mine, indent=2).encode().ljust(_FILE_BYTES - 1) + b"\n"

    def _is_mine(self, found: Found) -> bool:
        holder = _holder(found)
        return holder is not None and holder["token"] == self._mine["token"]

    def _take(self) -> None:
        """Creates the file or takes it over. InputError while another run holds it."""
        for _ in range(_TRIES):
            self._renewed_at = _now()
            found = self._file.read()
            try:
                if found is None:
                    self._file.create(self._content())
                else:
                    self._check_gone(found)
                    self._renewed_at = _now()
                    self._file.take_over(found, self._content())
            except FileExistsError:  # another run was faster
                continue
            return
        raise self._refusal(found)

    def _renew(self) -> None:
        with self._lock:
            if self._lost:
                return
            began = _now()
            self._mine["renewed"] += 1
            try:
                self._file.renew(self._is_mine, self._content())
            except FileExistsError:
                by = _name(_holder(self._file.read()))
                self._lost = f"{self._path.parent} was taken over by {by}, which heard nothing of this run for a while"
            except FileNotFoundError:
                self._lost = f"{self._path.parent} was deleted"
            else:
                self._renewed_at = began

    def _check_gone(self, found: Found) -> None:
        """Returns once the holder is known to be gone; InputError while it is there."""
        holder = _holder(found)
        if holder is not None and holder["machine"] == self._mine["machine"]:
            if holder["started"] == _started(holder["pid"]):
                raise self._refusal(found)
            log.info("the run that had %s, %s, is gone", self._path.parent, _name(holder))
            return
        log.info("%s has a lease of %s: %.0f s to see if it is renewed", self._path.parent, _name(holder), self._stale)
        end = time.monotonic() + self._stale
        while time.monotonic() < end:
            time.sleep(min(1.0, self._stale / 10))
            if (now := self._file.read()) != found:
                if now is None:
                    return
                raise self._refusal(now)
        log.info("it was not: %s is gone", _name(holder))

    def _refusal(self, found: Found | None) -> InputError:
        return InputError(
            f"--workdir: {self._path.parent} is in use by another run, {_name(_holder(found))}: wait for it or stop "
            "it, or choose another folder"
        )


def _holder(found: Found | None) -> dict[str, Any] | None:
    """Returns what the file says of its holder, None where it cannot be read: it is damaged, or being written."""
    try:
        holder = json.loads(found.content) if found else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(holder, dict) or any(type(holder.get(name)) is not kind for name, kind in _TYPES.items()):
        return None
    return holder if 0 < holder["pid"] < 2**31 else None


def _name(holder: dict[str, Any] | None) -> str:
    return f"process {holder['pid']} on {holder['host']}" if holder else "an unknown process"
