"""Files as blocks of bytes and as lines, compressed (.gz, .bz2, .zst) or not, from any offset on.

Offsets are in the uncompressed file. Whatever is wrong with a file is an InputError that names it and the line.
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

MAX_LINE_BYTES = 64 << 20
"""The longest line that is read: a line has to fit in memory."""

COMPRESSED = (".gz", ".bz2", ".zst")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_BLOCK_BYTES = 1 << 20
_READ_BYTES = 1 << 17  # of compressed data, at a time
_FEED_BYTES = 1 << 8  # of it, to zstandard at a time: up to 8 MB come of them
_CORRUPT = (EOFError, OSError, zlib.error, zstandard.ZstdError)


def lines_from(path: str, start: int, end: int | None) -> Iterator[tuple[int, bytes]]:
    """(offset, line) for every line that begins at or after `start`, to the end of the file.

    Nothing is read when no line begins in [start, end). The offset is in the uncompressed file, the line comes
    without its "\n", and the file's byte order mark is dropped.
    """
    first = first_line_start(path, start, end)
    return _split_lines(path, first) if first is not None else iter(())


def first_line_start(path: str, start: int, end: int | None) -> int | None:
    """The offset of the first line that begins at or after `start`; None where there is none before `end`."""
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
            raise InputError(f"{where}: a line of more than {MAX_LINE_BYTES} bytes; break the text into lines")
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
    """The number, from 1, of the line that begins at `offset`. Reads the file up to there: for messages only."""
    number, position = 1, 0
    for block in blocks(path, 0):
        number += block[: max(offset - position, 0)].count(b"\n")
        position += len(block)
        if position >= offset:
            break
    return number


def blocks(path: str, offset: int) -> Iterator[bytes]:
    """The bytes of a file from `offset` on, decompressed, in blocks of about _BLOCK_BYTES."""
    newlines = 0
    try:
        file = _open(path)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be opened ({error.strerror or error}); check that it is there and readable"
        ) from error
    with file:
        if not is_compressed(path):
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
    while block := unpacked.read1(_BLOCK_BYTES):  # Not read(): it loses what came before a fault.
        yield block


def _decompressed_zstd(file: BinaryIO) -> Iterator[bytes]:
    """Frame after frame. (zstandard's own stream_reader takes a truncated frame for the end of the file.)

    A block of 128 kB may be four bytes long, so that what comes of more than _FEED_BYTES might not fit in memory.
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
            yield b"".join(held)  # what came before the fault, which tells its line
        raise
    if size:
        yield b"".join(held)


def _open(path: str) -> BinaryIO:
    return remote.open_to_read(path) if remote.is_remote(path) else open(path, "rb")


def file_bytes(path: str) -> int:
    """The size of a file on disk."""
    try:
        return remote.size(path) if remote.is_remote(path) else Path(path).stat().st_size
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror or error}); check that it is there and readable"
        ) from error


def is_compressed(path: str) -> bool:
    """Whether a file's name says that it is compressed."""
    return path.lower().endswith(COMPRESSED)
