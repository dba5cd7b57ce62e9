"""Lease of a workdir: one run holds it at a time and renews it every few seconds, in a file in the workdir.

A lease outlives a killed run. It is taken over at once if its process was on this machine and has ended, and otherwise
when it has not been renewed for a while; clocks of different machines are not compared. A run that could not renew its
lease for as long, because it was frozen or the network was down, renews it before it writes anything.
"""

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from etils import epath

from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import json_checksums
from bert_jax.runtime.lease_file import Found, open_lease_file
from bert_jax.runtime.ticker import Ticker

log = logging.getLogger(__name__)

LEASE_FILE = "lease.json"
RENEW_SECONDS = 10.0
STALE_SECONDS = 30.0  # without a renewal
_FILE_BYTES = 1024  # fixed size, so that a renewal in place overwrites the previous content
_TYPES = {"host": str, "pid": int, "machine": str, "started": str, "token": str, "renewed": int}
_ENDED = ("Z", "X")  # killed, and not yet waited for by what started it
_TRIES = 5  # to take a lease that changes hands in the meantime


def _machine() -> str:
    """Identifies the scope of process ids: this boot of the machine, and the container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _started(pid: int) -> str:
    """Returns the start time of a process of this machine, "" if it has ended: process ids are reused."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return "" if state in _ENDED else fields[18]  # clock ticks since boot
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:  # it exists and belongs to another user
        pass
    return "" if Path("/proc/self/stat").exists() else "unknown"


def _now() -> float:
    """Returns seconds of a clock that continues while the process or the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Lease:
    """Holds the lease of a workdir until `close`. Raises InputError if another run holds it."""

    def __init__(
        self, folder: epath.Path, *, renew: float = RENEW_SECONDS, stale: float = STALE_SECONDS,
        now: Callable[[], float] = _now,
    ):  # fmt: skip
        """Takes the lease and renews it every `renew` seconds.

        It expires `stale` seconds after a renewal; `now` is the clock that tells its age, in seconds.
        """
        self._now = now
        self._path = folder / LEASE_FILE
        self._file = open_lease_file(self._path)
        self._stale = stale
        pid = os.getpid()
        self._mine: dict[str, Any] = {
            "host": socket.gethostname(), "pid": pid, "machine": _machine(), "started": _started(pid),
            "token": uuid.uuid4().hex, "renewed": 0,
        }  # fmt: skip
        self._lost = ""  # why this process no longer holds the lease
        self._lock = threading.Lock()  # for renewals
        self._renewed_at = self._now()
        self._take()
        self._ticker = Ticker(self._renew, renew, "lease")

    def check(self) -> None:
        """Raises BertJaxError if another run has taken over the lease, such as while this one was frozen.

        Renews the lease first if it is so old that another run may take it over.
        """
        if self._now() - self._renewed_at > self._stale:
            self.confirm()
        if self._lost:
            raise BertJaxError(f"{self._lost}; this run ends and writes nothing more there")

    def confirm(self) -> None:
        """Renews the lease now, before something large is written or deleted. Raises BertJaxError if it cannot."""
        try:
            self._renew()
        except Exception as error:
            silent = self._now() - self._renewed_at
            raise BertJaxError(
                f"{self._path} could not be renewed for {silent:.0f} s ({type(error).__name__}: {error}), and another "
                "run may take over the workdir; this run ends and writes nothing more there; rerun the command"
            ) from error
        if self._lost:
            raise BertJaxError(f"{self._lost}; this run ends and writes nothing more there")

    def close(self) -> None:
        """Releases the lease."""
        self._ticker.close()
        if self._lost:
            return
        try:
            self._file.release(self._is_mine)
        except Exception as error:
            log.warning(
                "Lease %s could not be deleted (%s); the next run in this workdir will wait for it to expire",
                self._path,
                error,
            )

    def _content(self) -> bytes:
        return json.dumps(json_checksums.with_checksum(self._mine), indent=2).encode().ljust(_FILE_BYTES - 1) + b"\n"

    def _is_mine(self, found: Found) -> bool:
        holder = _holder(found, is_verified=False)
        return holder is not None and holder["token"] == self._mine["token"]

    def _take(self) -> None:
        """Creates the file or takes it over. InputError while another run holds it."""
        for _ in range(_TRIES):
            self._renewed_at = self._now()
            found = self._file.read()
            try:
                if found is None:
                    self._file.create(self._content())
                else:
                    self._check_gone(found)
                    self._renewed_at = self._now()
                    self._file.take_over(found, self._content())
            except FileExistsError:  # another run was faster
                continue
            return
        raise self._refusal(found)

    def _renew(self) -> None:
        with self._lock:
            if self._lost:
                return
            began = self._now()
            self._mine["renewed"] += 1
            try:
                self._file.renew(self._is_mine, self._content())
            except FileExistsError:
                by = _name(_holder(self._file.read()))
                self._lost = (
                    f"{self._path.parent} was taken over by {by}, because this run did not renew its lease for a while"
                )
            except FileNotFoundError:
                self._lost = f"{self._path.parent} was deleted"
            else:
                self._renewed_at = began

    def _check_gone(self, found: Found) -> None:
        """Returns once the holder has ended or its lease has expired. Raises InputError if it is alive."""
        holder = _holder(found)
        if holder is not None and holder["machine"] == self._mine["machine"]:
            if holder["started"] == _started(holder["pid"]):
                raise self._refusal(found)
            log.info("Lease of %s was held by %s, which has ended; taking over", self._path.parent, _name(holder))
            return
        log.info(
            "Workdir %s is locked by %s; waiting %.0f s for the lease to expire",
            self._path.parent, _name(holder), self._stale,
        )  # fmt: skip
        end = time.monotonic() + self._stale
        while time.monotonic() < end:
            time.sleep(min(1.0, self._stale / 10))
            if (now := self._file.read()) != found:
                if now is None:
                    return
                raise self._refusal(now)
        log.info("Lease of %s, held by %s, expired; taking over", self._path.parent, _name(holder))

    def _refusal(self, found: Found | None) -> InputError:
        return InputError(
            f"--workdir={self._path.parent}: is in use by another run, {_name(_holder(found))}; wait for it or stop "
            "it, or choose another folder"
        )


def _holder(found: Found | None, *, is_verified: bool = True) -> dict[str, Any] | None:
    """Parses the holder in the file; None if the file is damaged or being written.

    Only the token counts for the holder itself, which replaces the file: it does not need the checksum.
    """
    try:
        holder = json.loads(found.content) if found else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(holder, dict) or any(type(holder.get(name)) is not kind for name, kind in _TYPES.items()):
        return None
    if is_verified and not json_checksums.is_intact(holder):
        return None
    return holder if 0 < holder["pid"] < 2**31 else None


def _name(holder: dict[str, Any] | None) -> str:
    return f"process {holder['pid']} on {holder['host']}" if holder else "an unknown process"
