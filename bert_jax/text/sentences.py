"""Splits documents into sentences."""

import logging
import re

import sentencex

log = logging.getLogger(__name__)

# sentencex 1.0 panics on multi-byte white space after an initial ("J.\u00a0Smith"). BERT treats all of it as a space.
_OTHER_SPACES = re.compile(r"[^\S\x00-\x7f]")


def split(text: str, language: str = "en") -> list[str]:
    r"""Splits running text into stripped sentences with `sentencex`. The end of a line always ends a sentence.

    White space that is not ASCII becomes a space.

    Args:
      text: lines separated by "\n".
      language: an ISO 639 code, which selects the abbreviations that do not end a sentence ("Dr.").
    """
    if not text.isascii():
        text = _OTHER_SPACES.sub(" ", text)
    # One call a line is faster on Wikipedia than one a document (64 MB/s, not 46, and 8 for a document of 1 MB), and
    # limits the effect of an unclosed quotation mark to one paragraph.
    segments = (segment for line in text.split("\n") for segment in _segment(line, language))
    return [sentence for segment in segments if (sentence := segment.strip())]


def lines(text: str) -> list[str]:
    r"""Splits text with one sentence a line, as in BERT's own input files. Only "\n" ends a line."""
    return [sentence for line in text.split("\n") if (sentence := line.strip())]


def _segment(line: str, language: str) -> list[str]:
    try:
        return sentencex.segment(language, line)
    except BaseException as error:  # A Rust panic is not an Exception; one line must not end hours of work.
        if type(error).__name__ != "PanicException":
            raise
        log.warning("Sentence splitting failed on a line of %d characters, kept as one sentence: %s", len(line), error)
        return [line]
