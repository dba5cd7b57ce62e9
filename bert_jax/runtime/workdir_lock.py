"""Ownership of a workdir: one run writes to it at a time, and all processes of the run see the same folder."""

import fcntl
import logging
import os
import socket
import time

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import atomic, remote
from bert_jax.runtime.processes import is_first

log = logging.getLogger(__name__)

LOCK_FILE = "lock"
WAIT_SECONDS = 60.0
"""Time until another host's file must be visible: NFS caches for up to 60 s that a file is missing."""


class WorkdirLock:
    """Owns a workdir, which it makes if needed, until closed. All processes of a run have to create it.

    On a disk it is an advisory lock of the operating system on a file, which ends with its process. A store has no
    locks: there the run that begins last owns the workdir, and the one before ends when it confirms its ownership.

    Raises BertJaxError if another run owns the workdir on a disk: NFS may keep the lock of a machine that is gone for
    some minutes, after which the command works. Raises InputError in a process that does not see the folder of process
    0: each folder would have only the checkpoint shards of its host, and the run could not resume.
    """

    def __init__(self, folder: epath.Path):
        self._path, self._file, self._name = folder / LOCK_FILE, -1, f"workdir={folder}"
        token = shared_name()
        self._content = f"process {os.getpid()} on {socket.gethostname()}, run {token}"
        if is_first():
            atomic.make_folder(folder)
            self._lock()
        multihost_utils.sync_global_devices("locked")
        deadline = time.monotonic() + WAIT_SECONDS
        while not remote.is_remote(folder) and token not in self._owner():
            if time.monotonic() > deadline:
                reason = f"process {jax.process_index()} does not see the {LOCK_FILE} of process 0"
                raise InputError(f"{self._name}: {reason}; use a file system that all share, or gs://")
            time.sleep(0.1)

    def _lock(self) -> None:
        if remote.is_remote(self._path):
            atomic.write_whole(self._path, self._content.encode())
            return
        self._file = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            fix = f"stop it, use another folder, or delete {self._path} if its machine is gone"
            raise BertJaxError(f"{self._name}: is in use by {self._owner()}; {fix}") from error
        except OSError as error:
            log.warning("%s: has no locks (%s); a second run there would not be noticed", self._name, error)
        os.truncate(self._file, 0)
        os.pwrite(self._file, self._content.encode(), 0)

    def confirm(self) -> None:
        """Raises BertJaxError in process 0 if the workdir was deleted, and InputError if another run owns it now."""
        if not is_first() or (owner := self._owner()) == self._content:
            return
        if not owner:
            raise BertJaxError(f"{self._name}: was deleted; nothing more is written there")
        raise InputError(f"{self._name}: now belongs to {owner}, which started later; this run ends")

    def close(self) -> None:
        """Releases the lock; its file stays."""
        if self._file >= 0:
            os.close(self._file)

    def _owner(self) -> str:
        return atomic.read_whole(self._path).decode() if remote.exists(self._path) else ""


def shared_name() -> str:
    """Returns a random name, the same in all processes; all have to call it."""
    return np.asarray(multihost_utils.broadcast_one_to_all(np.frombuffer(os.urandom(8), np.uint8))).tobytes().hex()
