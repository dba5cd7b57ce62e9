"""Documents from texts: lines stripped, blank lines dropped, long documents split at line ends."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from bert_jax.data.corpora.corpus_options import CorpusOptions

log = logging.getLogger(__name__)

Position = TypeVar("Position")


def documents_of(
    texts: Iterable[tuple[Position, str]], options: CorpusOptions, where: Callable[[Position], str]
) -> Iterator[str]:
    """Yields one document a text, or several if it is too long, and none for a text without words.

    Args:
      texts: (position, text) pairs.
      options: with the limit of a document's bytes.
      where: maps a position to its location in messages.
    """
    warned = False
    for position, text in texts:
        parts = list(_split(filter(None, map(str.strip, text.split("\n"))), options.max_document_bytes))
        if len(parts) > 1 and not warned:
            warned = True
            limit = options.max_document_bytes
            log.warning("%s: split a document of more than %d bytes", where(position), limit)
        yield from parts


def is_blank(line: bytes) -> bool:
    """Returns True for a line of white space, that of Unicode included."""
    stripped = line.strip()
    if not stripped:
        return True
    if 0x20 < stripped[0] < 0x80:
        return False
    return not stripped.decode("utf-8", "replace").strip()  # U+00A0, U+3000 and similar are blank, too.


def _split(lines: Iterable[str], limit: int) -> Iterator[str]:
    part: list[str] = []
    size = 0
    for line in lines:
        line_bytes = len(line.encode()) + 1
        if part and size + line_bytes > limit + 1:
            yield "\n".join(part)
            part, size = [], 0
        part.append(line)
        size += line_bytes
    if part:
        yield "\n".join(part)
