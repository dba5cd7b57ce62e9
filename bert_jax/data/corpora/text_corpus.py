"""Reads documents from plain text and from WikiExtractor's files.

Ownership of documents. In plain text, a *boundary* is a blank line (in WikiExtractor files, a `<doc ...>` line). A
slice [start, end) owns the documents whose last boundary before them begins in [start, end); the slice at 0 also
owns the first document of the file. A slice reads past its end to finish its last document, and never reads before
its start to find its first. A document that is too long is split at lines that depend only on the file's bytes: with
M = `max_document_bytes`, at the first line that begins at or after k * M if no boundary begins in the M bytes
before k * M. A document of up to M bytes is therefore never split, one of 2 M bytes always is, no part is larger
than 2 M bytes and a line, and a file without any blank line is still distributed over its slices.
"""

import html
import logging
import re
from collections.abc import Callable, Iterator

from bert_jax.data.corpora.corpus_options import CorpusOptions
from bert_jax.files.text_files import Utf8, decode_line, lines_from, locate

log = logging.getLogger(__name__)

_WIKI_DOC = b"<doc "
_WIKI_TITLE = re.compile(rb'\btitle="(.*)"\s*>\s*$')


def text_documents(path: str, start: int, end: int | None, options: CorpusOptions, utf8: Utf8) -> Iterator[str]:
    """Yields the documents of a slice of plain text, separated by blank lines or, as an option, by the file's end."""
    is_boundary = _is_never_boundary if options.documents == "file" else _is_blank
    return _TextReader(path, start, end, options, utf8, is_boundary).documents()


def wiki_documents(path: str, start: int, end: int | None, options: CorpusOptions, utf8: Utf8) -> Iterator[str]:
    """Yields the documents of a slice of a WikiExtractor file, without their titles."""
    return _TextReader(path, start, end, options, utf8, _is_wiki_boundary).documents()


def _is_blank(line: bytes) -> bool:
    """Returns True for a line of white space, that of Unicode included."""
    stripped = line.strip()
    if not stripped:
        return True
    if 0x20 < stripped[0] < 0x80:
        return False
    return not stripped.decode("utf-8", "replace").strip()  # U+00A0, U+3000 and similar are blank, too.


def _is_wiki_boundary(line: bytes) -> bool:
    return line.startswith(_WIKI_DOC)


def _is_never_boundary(line: bytes) -> bool:
    return False


class _TextReader:
    """Reader of a slice of a text file. The module's docstring defines ownership and splitting of documents."""

    def __init__(
        self, path: str, start: int, end: int | None, options: CorpusOptions, utf8: Utf8,
        is_boundary: Callable[[bytes], bool],
    ) -> None:  # fmt: skip
        self.path = path
        self.start = start
        self.end = end
        self.limit = options.max_document_bytes
        self.utf8 = utf8
        self.is_boundary = is_boundary
        self.warned = False

    def documents(self) -> Iterator[str]:
        limit = self.limit
        lines: list[str] = []  # Lines of the current document.
        title = ""  # Title of a WikiExtractor document; its first line repeats it.
        owned = self.start == 0
        at_boundary = True  # The current document began at a boundary, not at a split.
        last_boundary = -1
        block = self._block_before()
        for offset, line in lines_from(self.path, self.start, self.end):
            boundary = self.is_boundary(line)
            past_block, block = block, offset // limit
            broken = not boundary and block > past_block and self._is_quiet((block - 1) * limit, last_boundary)
            if boundary or broken:
                if lines:
                    if broken and at_boundary:
                        self._warn(offset)
                    yield "\n".join(lines)
                    lines = []
                owned, at_boundary, title = True, boundary, ""
            if self.end is not None and offset >= self.end and (boundary or broken or not owned):
                return
            if boundary:
                last_boundary = offset
                title = _wiki_title(line)
            elif owned:
                text = decode_line(line, self.path, offset, self.utf8).strip()
                if text and not (title and title in (text, html.unescape(text))) and text != "</doc>":
                    lines.append(text)
                title = title if not text else ""
        if lines:
            yield "\n".join(lines)

    def _block_before(self) -> int:
        """Returns the index of the block, of `max_document_bytes`, in which the last line before the slice begins."""
        if self.start == 0:
            return 0
        block = self.start // self.limit
        block_start = block * self.limit
        begins_there = block_start == 0 or any(True for _ in lines_from(self.path, block_start, self.start))
        return block if begins_there else block - 1

    def _is_quiet(self, low: int, last_boundary: int) -> bool:
        """Returns True if no boundary begins between `low` and the current line; usually reads only a few lines."""
        if last_boundary >= low:
            return False
        if low >= self.start:
            return True
        for offset, line in lines_from(self.path, max(low, 0), self.start):
            if offset >= self.start:
                break
            if self.is_boundary(line):
                return False
        return True

    def _warn(self, offset: int) -> None:
        if not self.warned:
            self.warned = True
            log.warning(
                "%s: split a document of more than %d bytes; further ones in this file are split, too. Separate "
                "documents by blank lines, or use JSON lines with one document a line",
                locate(self.path, offset),
                self.limit,
            )


def _wiki_title(line: bytes) -> str:
    match = _WIKI_TITLE.search(line) if line.startswith(_WIKI_DOC) else None
    return html.unescape(match[1].decode("utf-8", "replace")).strip() if match else ""
