"""Check that all processes of a run see one workdir, not different folders with the same path."""

import os
import socket
import time
import uuid
from contextlib import suppress

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from bert_jax.errors import InputError
from bert_jax.files import remote

WAIT_SECONDS = 60.0
"""Time until another host's file must be visible: NFS caches for up to 60 s that a file or folder is missing."""

_TOKEN = ".shared-check-"
_NAME_BYTES = 256


def check_shared(folder: epath.Path) -> None:
    """Raises InputError in all processes if a local workdir is not one shared folder; all have to call it.

    Otherwise each folder would have only the checkpoint shards of its host, and the run could not resume.
    """
    if jax.process_count() == 1 or remote.is_remote(folder):
        return
    token, problem = uuid.uuid4().hex, ""
    path = folder / f"{_TOKEN}{token}"
    if jax.process_index() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:  # raised once the others know it, which would wait
            problem = f"{error.strerror} ({error.filename})"
    try:
        first, token, problem = (broadcast_first(text) for text in (socket.gethostname(), token, problem))
        if problem:
            raise InputError(f"--workdir={folder}: cannot be written to on {first} ({problem})")
        seen = _appears(folder / f"{_TOKEN}{token}")
        everyone = multihost_utils.process_allgather((np.array(seen), _bytes(socket.gethostname())))
    finally:
        if jax.process_index() == 0 and path.exists():
            path.unlink()
    blind = [_text(name) for saw, name in zip(*everyone, strict=True) if not saw]
    if blind:
        raise InputError(
            f"--workdir={folder}: is not shared by the processes ({', '.join(dict.fromkeys(blind))} does not see a "
            f"file that {first} wrote there); use a shared file system or gs://"
        )


def _appears(path: epath.Path) -> bool:
    deadline = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
        with suppress(OSError):  # makes NFS ask the server, unless it trusts its cache
            os.listdir(path.parent.parent)
    return True


def broadcast_first(text: str) -> str:
    """Broadcasts the text of process 0, truncated to `_NAME_BYTES` bytes."""
    return _text(multihost_utils.broadcast_one_to_all(_bytes(text)))


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0"), np.uint8)


def _text(array: np.ndarray) -> str:
    return np.asarray(array, np.uint8).tobytes().rstrip(b"\0").decode("utf-8", "replace")
