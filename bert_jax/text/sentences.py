"""Splits documents into sentences, by the rules of `sentencex` for a language."""

import itertools
import logging
import re

import sentencex

from bert_jax.errors import InputError, is_panic

log = logging.getLogger(__name__)

_OWN_RULES = "am ar bg bn ca da de el en es fi fr gu hi hy it ja kk kn ml mr my nl pa pl pt ru sk ta te uk"
"""The languages that sentencex has rules for."""

_WITHOUT_SENTENCE_MARKS = ("th", "lo")
"""Thai and Lao have spaces between clauses and sentences, and mostly no mark at the end of a sentence."""

_CODE = re.compile(r"[a-z]{2,3}(-[a-z0-9]+)*")

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

_BLOCK = 8192  # characters in a call of sentencex, whose time grows with the square of the unclosed quotes in a call
_LONGEST = 512  # bytes of UTF-8; some 110 tokens of English, 170 of Chinese
_QUOTE = re.compile(r"""(?<!\w)['’]|['’](?!\w)|["“‘«„‹”»›「」『』()\[\]{}]""")
_OPENING_AT_END = re.compile(r"""\s["'“‘«„‹「『(\[{]+\s*\Z""")


def check_language(code: str) -> None:
    """Raises InputError for what is no language code, such as a name of a language."""
    if not _CODE.fullmatch(code):
        raise InputError(f"language={code!r}: expected an ISO 639-1 code in lower case, such as one of {_OWN_RULES}")


def warn_of_language(code: str) -> None:
    """Logs a warning if lines of a language are split into sentences by the rules of another one."""
    if code in _WITHOUT_SENTENCE_MARKS:
        log.warning("--language=%s has no marks of sentences: pass --sentences lines, or --pairs none", code)
    elif code not in _OWN_RULES.split():
        log.warning("--language=%s has no sentence rules of its own: using those of a related language", code)


def split(text: str, language: str = "en") -> list[str]:
    r"""Splits running text into stripped sentences with `sentencex`. The end of a line always ends a sentence.

    White space that is not ASCII becomes a space; nothing else changes inside of a sentence. A sentence of more than
    `_LONGEST` bytes is split at the ends of sentences within its quotations and brackets, which may be unpaired, and
    then between words. The time is linear in the length of the text.

    Args:
      text: lines separated by "\n".
      language: an ISO 639 code, which selects the abbreviations that do not end a sentence ("Dr.").
    """
    short = _LONGEST  # characters that are surely not more bytes
    if not text.isascii():
        text, short = _OTHER_SPACES.sub(" ", text), _LONGEST // 4
    result = []
    for line in text.split("\n"):  # one call a line is faster on Wikipedia than one a document
        for segment in _correct(_segments(line, language), language):
            for part in [segment] if len(segment) <= short else _shortened(segment, language):
                if sentence := part.strip():
                    result.append(sentence)
    return result


def _segments(line: str, language: str) -> list[str]:
    """Splits a line into segments, with calls on blocks of it."""
    segments: list[str] = []
    start = 0
    while len(line) - start > _BLOCK:
        block = line[start : start + _BLOCK]
        found = _segment(block, language)
        if len(found) == 1:
            found = _ignoring_quotes(block, language)
        if len(found) == 1:
            found = [block[: block.rfind(" ") + 1] or block]
        else:
            found.pop()  # may continue in the next block
        segments += found
        start += sum(map(len, found))
    return [*segments, *_segment(line[start:], language)] if start else _segment(line, language)


def _shortened(segment: str, language: str) -> list[str]:
    """Splits a segment into parts if it is too long."""
    if _bytes(segment) <= _LONGEST:
        return [segment]
    return [part for sentence in _ignoring_quotes(segment, language) for part in _by_words(sentence)]


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _ignoring_quotes(text: str, language: str) -> list[str]:
    """Splits text as if its quotation marks and brackets were spaces; they stay where they are."""
    bounds = [0, *itertools.accumulate(map(len, _segment(_QUOTE.sub(" ", text), language)))]
    for number in range(1, len(bounds) - 1):  # an opening quotation mark belongs to the sentence after it
        if opening := _OPENING_AT_END.search(text, bounds[number - 1], bounds[number]):
            bounds[number] = opening.start() + 1
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


def _by_words(text: str) -> list[str]:
    """Splits text into equal parts of about `_LONGEST` bytes at most, between words if there are any."""
    result = []
    while (size := _bytes(text)) > _LONGEST:
        length = -(-len(text) // -(-size // _LONGEST))
        end = text.rfind(" ", length // 2, length) + 1 or length
        result.append(text[:end])
        text = text[end:]
    return [*result, text]


def lines(text: str) -> list[str]:
    r"""Splits text with one sentence a line, as in BERT's own input files. Only "\n" ends a line."""
    return [sentence for line in text.split("\n") if (sentence := line.strip())]


def _segment(line: str, language: str) -> list[str]:
    try:
        return sentencex.segment(language, line)
    except BaseException as error:  # One line must not end hours of work.
        if not is_panic(error):
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
