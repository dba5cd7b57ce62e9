"""Opens files of text, reads their lines from any offset and decodes them.

Offsets are in the decompressed file. The name's extension says how it is compressed and what it holds.
"""

import io
import lzma
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import remote

MAX_LINE_BYTES = 64 << 20
"""Length limit of a line, since a line must fit in memory."""

COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".xz": "xz"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_HEAD_BYTES = 4096
_JSON_OBJECT = re.compile(rb'[ \t]*\{[ \t]*"[^"]*"[ \t]*:')
_FORMATS = {
    ".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".tab": "tsv",
    ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow",
}  # fmt: skip


def named_format(path: str) -> str:
    """Returns "parquet", "arrow", "csv", "tsv" or "json" (lines) for the extension of a name; "" for any other.

    An extension of compression behind it does not count.
    """
    stem, extension = os.path.splitext(path.lower())
    return _FORMATS.get(os.path.splitext(stem)[1] if extension in COMPRESSED else extension, "")


def is_special(path: str | os.PathLike[str]) -> bool:
    """Returns whether a local path is a pipe or a device, which can be read only once."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def text_format(path: str) -> str:
    """Returns the format of a corpus file: "text", or one of `named_format`.

    A file of another name is "json" if it begins with an object. Raises InputError for a file that cannot be read, for
    a pipe or device, and for a file that is neither text nor named as a table.
    """
    if is_special(path):
        raise InputError(f"{path}: expected a regular file; save the input to a file")
    named = named_format(path)
    if named in ("parquet", "arrow"):
        return named
    with read_errors(path), open_text(path) as file:
        head = file.read(_HEAD_BYTES).removeprefix(_BYTE_ORDER_MARK)
    if b"\0" in head:
        raise InputError(
            f"{path}: not text in UTF-8 (byte 0x00 at offset {head.index(0)}); name compressed files "
            f"{', '.join(COMPRESSED)}, re-encode text, such as with iconv -f UTF-16 -t UTF-8, and leave out other files"
        )
    if head.startswith(b"<doc "):
        raise InputError(f"{path}: <doc> elements; run WikiExtractor with --json")
    return named or ("json" if _JSON_OBJECT.match(head) else "text")


def open_text(path: str) -> BinaryIO:
    """Opens a file for reading; compressed files are decompressed, all of their parts, to the last byte.

    A file with CR but no LF in its first bytes is read into memory. If it has none at all, its lines end with CR, which
    LF replaces.
    """
    file = remote.open_to_read(path)
    match COMPRESSED.get(os.path.splitext(path.lower())[1]):
        case None:
            buffered = file
        case "xz":
            buffered = io.BufferedReader(lzma.LZMAFile(file), 1 << 20)  # noqa: SIM115
        case compression:
            # pyarrow notices a truncated file, which the readers of `zstandard` and fsspec take for a shorter one.
            import pyarrow as pa

            buffered = io.BufferedReader(pa.CompressedInputStream(file, compression), 1 << 20)
    head = buffered.peek(_HEAD_BYTES)[:-1]  # type: ignore[attr-defined]  # the last byte may be the CR of a CR LF
    if b"\n" in head or b"\r" not in head:
        return buffered
    content = buffered.read()
    return io.BytesIO(content if b"\n" in content else content.replace(b"\r", b"\n"))


def lines_from(path: str, start: int, end: int | None) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, line) for every line that begins at or after `start`, to the end of the file.

    Yields nothing if no line begins in [start, end). The line has no trailing "\n", and the file's byte order mark is
    dropped. Raises InputError for a file that cannot be read, and for a line of more than MAX_LINE_BYTES.
    """
    with read_errors(path), open_text(path) as file:
        offset = start
        if start:  # skips the rest of a line that begins before
            file.seek(start - 1)
            offset += len(file.readline(-1 if end is None else end - start + 1)) - 1
        if end is not None and offset >= end:
            return
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                where = locate(path, offset)
                raise InputError(f"{where}: a line must be at most {MAX_LINE_BYTES} bytes; insert line breaks")
            text = line.removesuffix(b"\n")
            yield offset, text if offset else text.removeprefix(_BYTE_ORDER_MARK)
            offset += len(line)


def locate(path: str, offset: int) -> str:
    """Returns "PATH:LINE" of the line that begins at `offset`. Slow, for messages: reads the file up to it."""
    number = 1
    with read_errors(path), open_text(path) as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            number += block.count(b"\n")
            offset -= len(block)
    return f"{path}:{number}"


@dataclass
class Utf8:
    """Decoder of UTF-8.

    Attributes:
      errors: "strict", or "replace" to read invalid bytes as U+FFFD.
      replaced: the number of lines or values that had invalid bytes.
    """

    errors: str = "strict"
    replaced: int = 0

    def decode(self, data: bytes) -> str:
        """Decodes a line or a value. Raises ValueError for invalid bytes, unless they are replaced."""
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            if self.errors == "strict":
                fix = "re-encode it, such as with iconv, or pass --errors replace to prepare and vocab"
                raise ValueError(f"not UTF-8 (byte 0x{data[error.start]:02x}); {fix}") from error
        self.replaced += 1
        return data.decode("utf-8", self.errors)


def decode_line(line: bytes, path: str, offset: int, utf8: Utf8) -> str:
    """Decodes the line of a file that begins at `offset`. Raises InputError, with its number, for invalid UTF-8."""
    try:
        return utf8.decode(line)
    except ValueError as error:
        raise InputError(f"{locate(path, offset)}: {error}") from error


def read_lines(path: str) -> list[str]:
    """Returns the lines of a file of plain text, without the spaces around them. Raises InputError for other files."""
    if named_format(path):
        raise InputError(f"input={path}: got a table or JSON lines, expected a file of plain text, one text a line")
    text_format(path)  # refuses what is not text
    lines = [decode_line(line, path, offset, Utf8()).strip() for offset, line in lines_from(path, 0, None)]
    if not lines:
        raise InputError(f"input={path}: the file is empty: expected at least one line")
    return lines


def file_bytes(path: str) -> int:
    """Returns the size of a file in bytes, as it is stored. Raises InputError if it cannot be read."""
    with read_errors(path):
        return int(epath.Path(path).stat().length)


@contextmanager
def read_errors(path: str) -> Iterator[None]:
    """Raises errors of reading a file, also of pyarrow, as an InputError with its name."""
    try:
        with remote.store_errors(path):
            yield
    except (OSError, EOFError, lzma.LZMAError, ValueError, NotImplementedError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())[:300]
        raise InputError(f"{path}: cannot be read ({reason}); check it, or fetch it again") from error
