"""The input `-`: text or JSON lines on stdin, copied to a file once, since a corpus is read in parts."""

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bert_jax.errors import InputError

STDIN = "-"
_BLOCK_BYTES = 1 << 20


@contextlib.contextmanager
def spooled(inputs: Sequence[str], folder: Path) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Context manager that replaces the input `-` by the path of a copy of stdin in `folder`.

    Yields the inputs, and the copy's description for a provenance record by its path. Without an input `-`, they are
    the same inputs and an empty one. Errors of the context name stdin in place of the copy.

    Raises:
      InputError: stdin is a terminal, or empty.
    """
    if STDIN not in inputs:
        yield list(inputs), {}
        return
    path, digest = _copy(folder)
    described = {path: {"path": STDIN, "bytes": os.path.getsize(path), "sha256": digest}}
    try:
        yield [path if name == STDIN else name for name in inputs], described
    except InputError as error:
        raise InputError(str(error).replace(path, "stdin")) from error


def _copy(folder: Path) -> tuple[str, str]:
    """Copies stdin to a file in `folder`, in blocks; returns its path and its SHA-256."""
    if sys.stdin is None or sys.stdin.isatty():
        raise InputError("--input=-: stdin is a terminal; pipe text to the command or name a file")
    copy = folder / "stdin"
    digest = hashlib.sha256()
    with open(copy, "wb") as file:
        while block := sys.stdin.buffer.read(_BLOCK_BYTES):
            digest.update(block)
            file.write(block)
    if not copy.stat().st_size:
        raise InputError("--input=-: stdin is empty; pipe text to the command")
    return str(copy), digest.hexdigest()
