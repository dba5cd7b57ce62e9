"""Splits documents into sentences."""

import logging
import re

import sentencex

log = logging.getLogger(__name__)

# sentencex 1.0 panics on multi-byte white space after an initial ("J.\u00a0Smith"). BERT treats all of it as a space.
_OTHER_SPACES = re.compile(r"[^\S\x00-\x7f]")

_KHMER_ENDS = re.compile(r"""(?<=[។៕])(?!ល។|[។៕»”"')])|(?<=[។៕][»”"')])""")  # ។ល។ is "etc."
_TIBETAN_ENDS = re.compile(r"(?<=[།༎])\s+(?![།༎])")
_ETHIOPIC_ENDS = re.compile(r"(?<=፡፡)")  # often written for the full stop U+1362
_MISSING_ENDS = {
    "km": _KHMER_ENDS, "bo": _TIBETAN_ENDS, "dz": _TIBETAN_ENDS, "am": _ETHIOPIC_ENDS, "ti": _ETHIOPIC_ENDS,
}  # fmt: skip
"""Sentence ends that sentencex 1.0 misses, by language."""

_KOREAN_QUOTE = re.compile(r"""[.!?…][”"’'」』]\0[\uac00-\ud7a3]""")
_JAPANESE_QUOTE = re.compile(r"[。！？…] ?[」』]\s*\0(?:と(?!ても|ころ|きどき|もかく|にかく)|って|など|を|の(?!ち))")
_CONTINUED_QUOTES = {"ko": _KOREAN_QUOTE, "ko-kp": _KOREAN_QUOTE, "ja": _JAPANESE_QUOTE}
r"""Quotations whose sentence continues, by language, where sentencex 1.0 splits; "\0" is its end."""

_CONTEXT = 8  # characters before and after the end of a sentence that `_CONTINUED_QUOTES` look at


def split(text: str, language: str = "en") -> list[str]:
    r"""Splits running text into stripped sentences with `sentencex`. The end of a line always ends a sentence.

    White space that is not ASCII becomes a space; nothing else changes inside of a sentence.

    Args:
      text: lines separated by "\n".
      language: an ISO 639 code, which selects the abbreviations that do not end a sentence ("Dr.").
    """
    if not text.isascii():
        text = _OTHER_SPACES.sub(" ", text)
    # One call a line is faster on Wikipedia than one a document (64 MB/s, not 46, and 8 for a document of 1 MB), and
    # limits the effect of an unclosed quotation mark to one paragraph.
    segments = (segment for line in text.split("\n") for segment in _correct(_segment(line, language), language))
    return [sentence for segment in segments if (sentence := segment.strip())]


def lines(text: str) -> list[str]:
    r"""Splits text with one sentence a line, as in BERT's own input files. Only "\n" ends a line."""
    return [sentence for line in text.split("\n") if (sentence := line.strip())]


def _segment(line: str, language: str) -> list[str]:
    try:
        result: list[str] = sentencex.segment(language, line)
        return result
    except BaseException as error:  # A Rust panic is not an Exception; one line must not end hours of work.
        if type(error).__name__ != "PanicException":
            raise
        log.warning("Sentence splitting failed on a line of %d characters, kept as one sentence: %s", len(line), error)
        return [line]


def _correct(segments: list[str], language: str) -> list[str]:
    """Joins quotations and the sentences that they are part of; splits at marks that sentencex does not know."""
    quote, ends = _CONTINUED_QUOTES.get(language), _MISSING_ENDS.get(language)
    if quote and len(segments) > 1:
        joined = segments[:1]
        for segment in segments[1:]:
            if quote.search(f"{joined[-1][-_CONTEXT:]}\0{segment[:_CONTEXT]}"):
                joined[-1] += segment
            else:
                joined.append(segment)
        segments = joined
    return [part for segment in segments for part in ends.split(segment)] if ends else segments
