"""The input `-`: stdin, copied to a file once, since a corpus is read in parts, and its format from its first bytes.

The copy's name contains the digest of its bytes: unfinished work on other bytes is not reused, work on the same is.
"""

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bert_jax.data.corpora.csv_corpus import has_column
from bert_jax.errors import InputError
from bert_jax.files.atomic import sync
from bert_jax.files.text_files import compression_of, lines_from

STDIN = "-"
_BLOCK_BYTES = 1 << 20
_HEADER_BYTES = 4096  # of the longest first line that is taken for a header


@contextlib.contextmanager
def spooled(inputs: Sequence[str], folder: Path, text_field: str) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Context manager that replaces the input `-` by the path of a copy of stdin in `folder`.

    Yields the inputs, and the copy's description for a provenance record by its path. Without an input `-`, they are
    the same inputs and an empty one. Errors of the context name stdin in place of the copy.

    Raises:
      InputError: stdin is a terminal, or empty.
    """
    if STDIN not in inputs:
        yield list(inputs), {}
        return
    path, digest = _copy(folder, text_field)
    described = {path: {"path": STDIN, "bytes": os.path.getsize(path), "sha256": digest}}
    try:
        yield [path if name == STDIN else name for name in inputs], described
    except InputError as error:
        raise InputError(str(error).replace(path, "stdin")) from error


def _copy(folder: Path, text_field: str) -> tuple[str, str]:
    """Copies stdin to a file in `folder`, in blocks; returns its path and its SHA-256."""
    if sys.stdin is None or sys.stdin.isatty():
        raise InputError("--input=-: stdin is a terminal; pipe text to the command or name a file")
    unfinished = folder / "stdin.partial"
    digest = hashlib.sha256()
    head = b""
    with open(unfinished, "wb") as file:
        while block := sys.stdin.buffer.read(_BLOCK_BYTES):
            head = head or block
            digest.update(block)
            file.write(block)
    if not head:
        unfinished.unlink()
        raise InputError("--input=-: stdin is empty; pipe text to the command")
    sync(unfinished)
    plain = unfinished.rename(folder / f"stdin.partial{compression_of(head)}")
    name = f"stdin-{digest.hexdigest()}{_table_suffix(str(plain), text_field)}{compression_of(head)}"
    for other in folder.glob("stdin-*"):
        if other.name != name:
            other.unlink()
    if (folder / name).exists():  # keeps its time, by which unfinished work is recognized
        plain.unlink()
    else:
        plain.rename(folder / name)
    return str(folder / name), digest.hexdigest()


def _table_suffix(path: str, text_field: str) -> str:
    """Returns the suffix of a table whose first line is a header with the column of text; "" for other content."""
    for _, line in lines_from(path, 0, None):
        if len(line) <= _HEADER_BYTES and has_column(line, text_field):
            return ".tsv" if b"\t" in line and b"," not in line else ".csv"
        break
    return ""
