"""Warnings about the characters of a corpus, from a sample: HTML, and letters that an uncased vocabulary confuses."""

import itertools
import logging
import re
import unicodedata
from collections.abc import Sequence

from bert_jax.data.corpora.corpus import Slice, read
from bert_jax.data.corpora.corpus_options import CorpusOptions
from bert_jax.errors import InputError

log = logging.getLogger(__name__)

_SLICES = 8
_CHARACTERS = 1 << 17  # of each slice
_DOCUMENTS = 500  # of each slice
_HTML = re.compile(
    r"</?(?:a|b|br|div|em|h[1-6]|i|img|li|p|span|strong|table|td|tr|ul)\b[^<>]{0,200}>|&(?:[a-z]{2,8}|#\d+);"
)
_FREQUENT_HTML = 2000  # characters of text a tag or entity, below which they are frequent
_FREQUENT_I = 0.02  # of the letters i of any kind: İ and ı are some 25% of them in Turkish
_FREQUENT_MARKS = 0.02  # of the characters
_SHOWN = 3


def warn_of_text(slices: Sequence[Slice], options: CorpusOptions, *, lowercase: bool, strip_accents: bool) -> None:
    """Logs a warning if a sample of a corpus has many HTML tags or entities, or what the vocabulary confuses.

    Lower-casing confuses dotted and dotless i. BERT's stripping of accents (`strip_accents`) drops marks that are parts
    of letters, and splits the syllables of Korean. Those of U+0300 to U+036F, of Latin, Greek and Cyrillic letters, are
    stripped on purpose. Text that cannot be read is left to the reader of the whole corpus.
    """
    logging.disable(logging.WARNING)  # all slices are read later, with their warnings and errors
    try:
        text = "\n".join(_beginning(piece, options) for piece in slices[:: -(-len(slices) // _SLICES) or 1])
    except InputError:
        return
    finally:
        logging.disable(logging.NOTSET)
    if len(found := _HTML.findall(text)) * _FREQUENT_HTML > len(text):
        shown = " and ".join(list(dict.fromkeys(found))[:_SHOWN])
        log.warning("The text has many HTML tags and entities, such as %s, which become tokens: remove them", shown)
    special, plain = (sum(map(text.count, letters)) for letters in ("İı", "iI"))
    if lowercase and special > _FREQUENT_I * (special + plain):
        share = 100 * special / (special + plain)
        log.warning("%.0f%% of the letters i are İ or ı, which lower-casing confuses: train with --cased", share)
    decomposed = unicodedata.normalize("NFD", text) if strip_accents and not text.isascii() else ""
    marks = sum(
        mark > "\u036f" and (unicodedata.category(mark) == "Mn" or "\u1100" <= mark <= "\u11ff") for mark in decomposed
    )
    if marks > _FREQUENT_MARKS * len(text):
        log.warning(
            "The text has many syllables, vowel signs, tone marks or voicing marks that are split or stripped as "
            "accents: train the vocabulary with --keep_accents"
        )


def _beginning(piece: Slice, options: CorpusOptions) -> str:
    taken: list[str] = []
    for document in itertools.islice(read(piece, options), _DOCUMENTS):
        taken.append(document[:_CHARACTERS])
        if sum(map(len, taken)) >= _CHARACTERS:
            break
    return "\n".join(taken)
