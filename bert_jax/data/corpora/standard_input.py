"""Inputs that can be read only once, `-` (stdin), pipes and devices: copied to a file, as a corpus is read in parts."""

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from bert_jax.errors import InputError

STDIN = "-"
_BLOCK_BYTES = 1 << 20


def is_stream(name: str) -> bool:
    """Returns True for `-`, and for a pipe or device, such as `<(zcat FILE)` or /dev/stdin."""
    if name == STDIN or name.startswith(("/dev/stdin", "/dev/fd/", "/proc/self/")):
        return True
    return os.path.exists(name) and not os.path.isfile(name) and not os.path.isdir(name)


@contextlib.contextmanager
def spooled(inputs: Sequence[str], folder: Path) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Context manager that replaces each stream among the inputs by the path of a copy in `folder`.

    Yields the inputs, and a copy's description for a provenance record by its path. Errors name the stream in place of
    the copy.

    Raises:
      InputError: stdin is a terminal; a stream is empty, or cannot be read.
    """
    described: dict[str, dict[str, Any]] = {}
    paths = {name: _copy(name, folder, described) for name in dict.fromkeys(inputs) if is_stream(name)}

    try:
        yield [paths.get(name, name) for name in inputs], described
    except InputError as error:
        message = str(error)
        for path, description in described.items():
            message = message.replace(path, "stdin" if description["path"] == STDIN else description["path"])
        raise InputError(message) from error


def _copy(name: str, folder: Path, described: dict[str, dict[str, Any]]) -> str:
    """Copies a stream to a file in `folder`, in blocks; returns its path."""
    if name == STDIN and (sys.stdin is None or sys.stdin.isatty()):
        raise InputError("input=-: stdin is a terminal; pipe text to the command or name a file")
    copy = folder / f"{len(described)}-{'stdin' if name == STDIN else os.path.basename(name)}"
    digest = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(copy, "wb"))
        source: BinaryIO = sys.stdin.buffer if name == STDIN else stack.enter_context(open(name, "rb"))
        while block := source.read(_BLOCK_BYTES):
            digest.update(block)
            file.write(block)
    size = copy.stat().st_size
    if not size:
        raise InputError(f"input={name}: got no bytes; pipe text to the command")
    described[str(copy)] = {"path": name, "bytes": size, "sha256": digest.hexdigest()}
    return str(copy)
