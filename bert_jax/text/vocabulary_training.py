"""Trains a vocabulary of any kind: `bert-jax vocab`."""

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator

from bert_jax.text.sentencepiece.sentencepiece_training import train_sentencepiece
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.vocabulary import train_wordpiece
from bert_jax.text.vocabulary_options import SAMPLE_BYTES, WORDPIECE, VocabularyOptions
from bert_jax.text.wordpiece import TokenizerRules, WordPieceTokenizer

log = logging.getLogger(__name__)

_CHECKED_CHARACTERS = 1 << 20  # of the text's start, for the warning about vowel signs and syllables
_WARNED_SHARE = 0.02
_HANGUL = re.compile("[\uac00-\ud7a3]")


def train_vocabulary(documents: Iterable[str], options: VocabularyOptions) -> Tokenizer:
    """Trains a vocabulary on documents, which are streamed once, and returns its tokenizer.

    Raises:
      InputError: the documents have no words, or `options.size` is too small for their characters.
    """
    if options.kind != WORDPIECE:
        return train_sentencepiece(
            documents,
            options.size,
            kind=options.kind,
            lowercase=not options.cased,
            strip_accents=options.strip_accents,
            character_coverage=options.coverage,
            sample_bytes=options.sample_bytes or SAMPLE_BYTES,
        )
    rules = TokenizerRules(
        text="pretokenized" if options.pretokenized else "reference", strip_accents=options.strip_accents
    )
    if options.strip_accents:
        documents = _warn_of_stripped(documents)
    vocabulary = train_wordpiece(documents, options.size, not options.cased, rules, options.coverage)
    return WordPieceTokenizer(vocabulary, not options.cased, rules)


def _warn_of_stripped(documents: Iterable[str]) -> Iterator[str]:
    """Yields the documents; logs a warning if their script needs what the reference calls accents.

    Marks of U+0300 to U+036F are those of Latin, Greek and Cyrillic letters, which the reference strips on purpose.
    Others are part of a word's letters, also of precomposed ones such as U+304C, a voiced kana.
    """
    characters = 0
    counts: Counter[str] = Counter()
    for document in documents:
        if characters < _CHECKED_CHARACTERS:
            start = document[:_CHECKED_CHARACTERS]
            characters += len(start)
            if not start.isascii():
                counts["Hangul syllables"] += len(_HANGUL.findall(start))
                counts["vowel signs, tone marks or voicing marks"] += sum(
                    character > "\u036f" and unicodedata.category(character) == "Mn"
                    for character in unicodedata.normalize("NFD", start)
                )
        yield document
    found, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if count > _WARNED_SHARE * characters:
        log.warning(
            "The text has %s (%.0f%% of its characters), which an uncased vocabulary splits or strips as accents: "
            "pass --keep_accents",
            found,
            100 * count / characters,
        )
