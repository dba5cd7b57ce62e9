"""The sentences of a document."""

import logging
import re

import sentencex

log = logging.getLogger(__name__)

# sentencex 1.0 panics on white space of several bytes after an initial ("J.\u00a0Smith"). To BERT all of it is a space.
_OTHER_SPACES = re.compile(r"[^\S\x00-\x7f]")


def split(text: str, language: str = "en") -> list[str]:
    r"""The sentences of running text, stripped, by `sentencex`. The end of a line always ends a sentence.

    White space that is not ASCII becomes a space.

    Args:
      text: lines parted by "\n".
      language: an ISO 639 code. It decides the abbreviations after which a full stop ends nothing ("Dr.").
    """
    if not text.isascii():
        text = _OTHER_SPACES.sub(" ", text)
    # A call for each line: on Wikipedia it is faster than one for the document (64 MB/s, not 46, and 8 where that is
    # 1 MB long), and a quotation mark that is never closed swallows a paragraph and not many.
    segments = (segment for line in text.split("\n") for segment in _segment(line, language))
    return [sentence for segment in segments if (sentence := segment.strip())]


def lines(text: str) -> list[str]:
    r"""The sentences of text that has one on each line, as BERT's own input files do. Only "\n" ends a line."""
    return [sentence for line in text.split("\n") if (sentence := line.strip())]


def _segment(line: str, language: str) -> list[str]:
    try:
        return sentencex.segment(language, line)
    except BaseException as error:  # A Rust panic is no Exception; one line must not end hours of work.
        if type(error).__name__ != "PanicException":
            raise
        log.warning("sentencex fails on a line of %d characters, which is taken whole: %s", len(line), error)
        return [line]
