"""Reads files as blocks of bytes or as lines from any offset; .gz, .bz2 and .zst files are decompressed.

Offsets are in the uncompressed file. An invalid file raises an InputError that names the file and the line.
"""

import bz2
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.files.atomic import named_errors

MAX_LINE_BYTES = 64 << 20
"""Length limit of a line, since a line must fit in memory."""

COMPRESSED = (".gz", ".bz2", ".zst")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_BLOCK_BYTES = 1 << 20
_READ_BYTES = 1 << 17  # of compressed data per read
_FEED_BYTES = 1 << 8  # of compressed data per call of zstandard; decompresses to at most 8 MB
_CORRUPT = (EOFError, OSError, zlib.error, zstandard.ZstdError)


def lines_from(path: str, start: int, end: int | None) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, line) for every line that begins at or after `start`, to the end of the file.

    Yields nothing if no line begins in [start, end). The offset is in the uncompressed file. The line has no trailing
    "\n", and the file's byte order mark is dropped.
    """
    first = first_line_start(path, start, end)
    return _split_lines(path, first) if first is not None else iter(())


def first_line_start(path: str, start: int, end: int | None) -> int | None:
    """Returns the offset of the first line that begins in [start, end), or None."""
    if start == 0:
        return 0
    offset = start - 1
    for block in blocks(path, offset):
        newline = block.find(b"\n")
        if newline >= 0:
            first = offset + newline + 1
            return first if end is None or first < end else None
        offset += len(block)
        if end is not None and offset >= end:
            return None
    return None


def _split_lines(path: str, offset: int) -> Iterator[tuple[int, bytes]]:
    carry: list[bytes] = []
    carried = 0
    for block in blocks(path, offset):
        first, *rest = block.split(b"\n")
        carry.append(first)
        carried += len(first)
        if carried > MAX_LINE_BYTES:
            where = f"{path}:{line_number(path, offset)}"
            raise InputError(f"{where}: a line must be at most {MAX_LINE_BYTES} bytes; insert line breaks")
        if not rest:
            continue
        line = b"".join(carry)
        yield offset, line if offset else line.removeprefix(BYTE_ORDER_MARK)
        offset += len(line) + 1
        last = rest.pop()
        for line in rest:
            yield offset, line
            offset += len(line) + 1
        carry, carried = [last], len(last)
    line = b"".join(carry)
    if line:
        yield offset, line if offset else line.removeprefix(BYTE_ORDER_MARK)


def line_number(path: str, offset: int) -> int:
    """Returns the number, from 1, of the line that begins at `offset`. Slow, for messages: reads the file up to it."""
    number, position = 1, 0
    for block in blocks(path, 0):
        number += block[: max(offset - position, 0)].count(b"\n")
        position += len(block)
        if position >= offset:
            break
    return number


def blocks(path: str, offset: int) -> Iterator[bytes]:
    """Yields the decompressed bytes of a file from `offset` on, in blocks of about _BLOCK_BYTES."""
    newlines = 0
    try:
        file = _open(path)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be opened ({error.strerror or error}); check the path and its permissions"
        ) from error
    with file:
        if not is_compressed(path):
            with named_errors(path):
                file.seek(offset)
                while block := file.read(_BLOCK_BYTES):
                    yield block
            return
        unpacked = _decompressed(path, file)
        while True:
            try:
                block = next(unpacked, b"")
            except _CORRUPT as error:
                raise InputError(
                    f"{path}:{newlines + 1}: the compressed file is truncated or corrupt here ({error}); fetch it again"
                ) from error
            if not block:
                return
            newlines += block.count(b"\n")
            skipped = min(offset, len(block))
            offset -= skipped
            if skipped < len(block):
                yield block[skipped:]


def _decompressed(path: str, file: BinaryIO) -> Iterator[bytes]:
    if path.lower().endswith(".zst"):
        yield from _decompressed_zstd(file)
        return
    unpacked = gzip.GzipFile(fileobj=file) if path.lower().endswith(".gz") else bz2.BZ2File(file)
    while block := unpacked.read1(_BLOCK_BYTES):  # Not read(), which loses the data before a corrupt block.
        yield block


def _decompressed_zstd(file: BinaryIO) -> Iterator[bytes]:
    """Decompresses frame by frame, since zstandard's stream_reader takes a truncated frame for the end of the file.

    Four bytes may decompress to a block of 128 kB, so longer input might decompress to more than memory holds.
    """
    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    held: list[bytes] = []
    size = 0
    try:
        while data := file.read(_READ_BYTES):
            for first in range(0, len(data), _FEED_BYTES):
                feed = data[first : first + _FEED_BYTES]
                while feed:
                    frame = frame or unpacker.decompressobj()
                    block = frame.decompress(feed)
                    held.append(block)
                    size += len(block)
                    feed = frame.unused_data if frame.eof else b""
                    frame = None if frame.eof else frame
                if size >= _BLOCK_BYTES:
                    yield b"".join(held)
                    held, size = [], 0
        if frame is not None:
            raise EOFError("the file ends within a frame")
    except _CORRUPT:
        if size:
            yield b"".join(held)  # the data before the corrupt block, which gives its line number
        raise
    if size:
        yield b"".join(held)


def _open(path: str) -> BinaryIO:
    return remote.open_to_read(path) if remote.is_remote(path) else open(path, "rb")


def file_bytes(path: str) -> int:
    """Returns the size of a file on disk, in bytes."""
    try:
        return remote.size(path) if remote.is_remote(path) else Path(path).stat().st_size
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror or error}); check the path and its permissions"
        ) from error


def is_compressed(path: str) -> bool:
    """Returns True for a path with a compression suffix."""
    return path.lower().endswith(COMPRESSED)
