"""Whether the processes of a run see one workdir, or each a folder of its own that has the same name."""

import socket
import time
import uuid

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from bert_jax.errors import InputError
from bert_jax.files import remote

WAIT_SECONDS = 5.0
"""For a file of another host to be seen: a network's file system remembers for some seconds what was not there."""

_TOKEN = ".shared-check-"
_NAME_BYTES = 256


def check_shared(folder: epath.Path) -> None:
    """InputError, in all processes, where a local workdir is not the same folder for all; all have to call it.

    Checkpoints would be in pieces, a host's in each folder, and a run could not go on from them.
    """
    if jax.process_count() == 1 or remote.is_remote(folder):
        return
    token, problem = uuid.uuid4().hex, ""
    path = folder / f"{_TOKEN}{token}"
    if jax.process_index() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:  # said when the others know: they would wait
            problem = f"{error.strerror} ({error.filename})"
    try:
        first, token, problem = (_of_first(text) for text in (socket.gethostname(), token, problem))
        if problem:
            raise InputError(f"--workdir: {folder} cannot be written to on {first}: {problem}")
        seen = _appears(folder / f"{_TOKEN}{token}")
        everyone = multihost_utils.process_allgather((np.array(seen), _bytes(socket.gethostname())))
    finally:
        if jax.process_index() == 0 and path.exists():
            path.unlink()
    blind = [_text(name) for saw, name in zip(*everyone, strict=True) if not saw]
    if blind:
        raise InputError(
            f"--workdir: {folder} is not shared by the processes ({', '.join(dict.fromkeys(blind))} does not see what "
            f"{first} wrote there): use a shared file system or gs://"
        )


def _appears(path: epath.Path) -> bool:
    deadline = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _of_first(text: str) -> str:
    """The text that the first process gives, cut to `_NAME_BYTES` bytes."""
    return _text(multihost_utils.broadcast_one_to_all(_bytes(text)))


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0"), np.uint8)


def _text(array: np.ndarray) -> str:
    return np.asarray(array, np.uint8).tobytes().rstrip(b"\0").decode("utf-8", "replace")
