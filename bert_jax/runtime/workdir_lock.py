"""Ownership of a workdir: one run writes to it at a time, and all processes of the run see the same folder."""

import fcntl
import json
import logging
import os
import socket
import time
import uuid

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import atomic, remote
from bert_jax.runtime.processes import is_first, wait_for_first

log = logging.getLogger(__name__)

LOCK_FILE = "lock.json"
WAIT_SECONDS = 60.0
"""Time until another host's file must be visible: NFS caches for up to 60 s that a file is missing."""


class WorkdirLock:
    """Owns a workdir until closed. Raises InputError if another run owns one on a disk.

    On a disk it is an advisory lock of the operating system on a file, which ends with its process. A store has no
    locks: there the run that begins last owns the workdir, and the one before ends when it confirms its ownership.
    """

    def __init__(self, folder: epath.Path):
        self._path = folder / LOCK_FILE
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "token": uuid.uuid4().hex}
        self._content, self._file = json.dumps(owner).encode(), -1
        if remote.is_remote(folder):
            atomic.write_whole(self._path, self._content)
            return
        self._file = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise InputError(
                f"--workdir={folder}: is in use by {self._owner()}; stop it or use another folder"
            ) from error
        except OSError as error:
            log.warning("%s: the file system has no locks (%s); a second run there would not be noticed", folder, error)
        os.truncate(self._file, 0)
        os.pwrite(self._file, self._content, 0)

    def confirm(self) -> None:
        """Raises BertJaxError if the workdir was deleted, and InputError if another run owns it now."""
        try:
            content = atomic.read_whole(self._path)
        except FileNotFoundError as error:
            raise BertJaxError(f"--workdir={self._path.parent}: was deleted; nothing more is written there") from error
        if content != self._content:
            raise InputError(
                f"--workdir={self._path.parent}: now belongs to {self._owner()}, which started later; this run ends"
            )

    def close(self) -> None:
        """Releases the lock; its file stays."""
        if self._file >= 0:
            os.close(self._file)

    def _owner(self) -> str:
        try:
            owner = json.loads(atomic.read_whole(self._path))
            return f"process {owner['pid']} on {owner['host']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another run"


def shared_name() -> str:
    """Returns a random name, the same in all processes; all have to call it."""
    return np.asarray(multihost_utils.broadcast_one_to_all(np.frombuffer(os.urandom(8), np.uint8))).tobytes().hex()


def check_shared(folder: epath.Path) -> None:
    """Raises InputError in all processes if a local folder is not one shared folder; all have to call it.

    Otherwise each folder would have only the checkpoint shards of its host, and the run could not resume.
    """
    if jax.process_count() == 1 or remote.is_remote(folder):
        return
    path = folder / f".shared-{shared_name()}"
    if is_first():
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    wait_for_first()
    deadline = time.monotonic() + WAIT_SECONDS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    seen = np.ravel(multihost_utils.process_allgather(np.array(path.exists())))
    if is_first():
        path.unlink()
    if not seen.all():
        raise InputError(
            f"--workdir={folder}: is not shared: processes {np.flatnonzero(~seen).tolist()} do not see a file of "
            f"process 0; use a shared file system or gs://"
        )
