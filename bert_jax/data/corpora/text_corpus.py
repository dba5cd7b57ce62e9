"""Reads documents from plain text and from WikiExtractor's files.

Ownership of documents. In plain text, a *boundary* is a blank line (in WikiExtractor files, a `<doc ...>` line). A
slice [start, end) owns the documents whose last boundary before them begins in [start, end); the slice at 0 also
owns the first document of the file. A slice reads past its end to finish its last document, and never reads before
its start to find its first. A document that is too long is split at lines that depend only on the file's bytes: with
M = `max_document_bytes`, of which `start` is a multiple, at the first line that begins at or after k * M if no
boundary begins in the M bytes before k * M. A document of up to M bytes is therefore never split, one of 2 M bytes
always is, no part is larger than 2 M bytes and a line, and a file without any blank line is still distributed over its
slices.
"""

import html
import itertools
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
    return _documents(path, start, end, options, utf8, is_boundary)


def wiki_documents(path: str, start: int, end: int | None, options: CorpusOptions, utf8: Utf8) -> Iterator[str]:
    """Yields the documents of a slice of a WikiExtractor file, without their titles."""
    return _documents(path, start, end, options, utf8, _is_wiki_boundary)


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


def _documents(
    path: str, start: int, end: int | None, options: CorpusOptions, utf8: Utf8, is_boundary: Callable[[bytes], bool]
) -> Iterator[str]:
    """Yields the documents that a slice owns; see the module's docstring."""
    limit = options.max_document_bytes
    before = itertools.takewhile(lambda line: line[0] < start, lines_from(path, start - limit, start) if start else ())
    is_quiet = not any(is_boundary(line) for _, line in before)
    block, last_boundary = max(start // limit - 1, 0), -1 if is_quiet else start - 1
    lines: list[str] = []  # of the current document
    title = ""  # of a WikiExtractor document, whose first line repeats it
    owned, at_boundary, warned = start == 0, True, False
    for offset, line in lines_from(path, start, end):
        boundary = is_boundary(line)
        past, block = block, offset // limit
        broken = not boundary and block > past and last_boundary < (block - 1) * limit
        if boundary or broken:
            if lines and broken and at_boundary and not warned:
                warned = True
                log.warning(
                    "%s: split a document of more than %d bytes; further ones in this file are split, too. Separate "
                    "documents by blank lines, or use JSON lines with one document a line",
                    locate(path, offset),
                    limit,
                )
            if lines:
                yield "\n".join(lines)
            lines, title, owned, at_boundary = [], "", True, boundary
        if end is not None and offset >= end and (boundary or broken or not owned):
            return
        if boundary:
            last_boundary, title = offset, _wiki_title(line)
        elif owned:
            text = decode_line(line, path, offset, utf8).strip()
            if text and not (title and title in (text, html.unescape(text))) and text != "</doc>":
                lines.append(text)
            title = title if not text else ""
    if lines:
        yield "\n".join(lines)


def _wiki_title(line: bytes) -> str:
    match = _WIKI_TITLE.search(line) if line.startswith(_WIKI_DOC) else None
    return html.unescape(match[1].decode("utf-8", "replace")).strip() if match else ""
