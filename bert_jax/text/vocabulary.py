"""Trains a WordPiece vocabulary.

Google's trainer was never released. This module uses the trainer of the `tokenizers` library, which merges the most
frequent pair of adjacent pieces until the vocabulary is full. By default it is not deterministic: it numbers the
initial pieces in the order of a randomized hash table and breaks ties by those numbers. Here words are counted first,
and the trainer gets the initial pieces in sorted order. The vocabulary is then deterministic: it depends only on the
text, not on the run, the number of threads or the order of the documents.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from bert_jax.errors import InputError
from bert_jax.text.tokenizer import SPECIAL_TOKENS
from bert_jax.text.vocabulary_options import WORDPIECE_COVERAGE
from bert_jax.text.wordpiece import CONTINUATION, MAX_WORD_CHARACTERS, TokenizerRules, normalizer, pre_tokenizer

log = logging.getLogger(__name__)

_CHUNK_CHARACTERS = 1 << 14
_MIN_PAIR_COUNT = 2
_LONG_WORD = 20  # characters
_LONG_SHARE = 0.2  # of the characters; German has some 0.02


def train_wordpiece(
    documents: Iterable[str],
    size: int,
    lowercase: bool,
    rules: TokenizerRules | None = None,
    character_coverage: float = WORDPIECE_COVERAGE,
) -> list[str]:
    """Trains a WordPiece vocabulary on documents, which are streamed once.

    The order of pieces is SPECIAL_TOKENS (ids 0 to 4), the alphabet, its continuations (`##a`), then the merges, most
    frequent first. Memory grows with the number of distinct words. Wrap `documents` to show progress.

    Args:
      documents: texts of any length.
      size: the number of pieces. A small corpus may give fewer, which is logged.
      lowercase: lower-case the text, as the tokenizer that will use the vocabulary.
      rules: the further rules of that tokenizer.
      character_coverage: the share of the text's characters that the alphabet covers.

    Raises:
      InputError: the documents have no words, or `size` is below the number of special tokens and characters.
    """
    words = _known_length(count_words(documents, lowercase, rules))
    alphabet = _alphabet(words, character_coverage)
    words = {word: count for word, count in words.items() if alphabet.issuperset(word)}
    first = sorted({c for word in words for c in word})
    continuations = [CONTINUATION + character for character in sorted({c for word in words for c in word[1:]})]
    needed = len(SPECIAL_TOKENS) + len(first) + len(continuations)
    if size < needed:
        raise InputError(
            f"--size={size}: too small for this text; expected at least {needed} ({len(SPECIAL_TOKENS)} special "
            f"tokens, {len(first)} characters and {len(continuations)} continuations)"
        )
    vocabulary = [*SPECIAL_TOKENS, *first, *continuations]
    known = set(vocabulary)
    vocabulary += [piece for piece in _train(words, size, continuations) if piece not in known]
    if len(vocabulary) < size:
        log.warning(
            "The vocabulary has %d pieces, fewer than --size=%d: the text has no more frequent pairs",
            len(vocabulary),
            size,
        )
    return vocabulary


def count_words(documents: Iterable[str], lowercase: bool, rules: TokenizerRules | None = None) -> dict[str, int]:
    """Counts words as the tokenizer splits them, also those that are too long for it and are [UNK]."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizer(lowercase, rules)
    tokenizer.pre_tokenizer = pre_tokenizer(rules)
    counter = trainers.WordPieceTrainer(vocab_size=0, show_progress=False)
    tokenizer.train_from_iterator(_chunks(documents), counter)
    # The trainer exposes its counts only in its pickled state.
    counts = json.loads(counter.__getstate__())["WordPieceTrainer"]["bpe_trainer"]["words"]
    return {word: counts[word] for word in sorted(counts)}


def _known_length(words: dict[str, int]) -> dict[str, int]:
    """Returns the words that the tokenizer does not take for [UNK]; warns of text that is written without spaces.

    Raises:
      InputError: there are no such words.
    """
    kept = {word: count for word, count in words.items() if len(word) <= MAX_WORD_CHARACTERS}
    characters = sum(len(word) * count for word, count in words.items())
    long = sum(len(word) * count for word, count in words.items() if len(word) > _LONG_WORD)
    if not kept:
        found = f"only words of more than {MAX_WORD_CHARACTERS} characters, which are [UNK]" if words else "no words"
        fix = "pass --kind unigram for text without spaces" if words else "check that its files are not empty"
        raise InputError(f"--input: the corpus has {found}; {fix}")
    if long > _LONG_SHARE * characters:
        log.warning(
            "%.0f%% of the text is in words of more than %d characters: it seems to be written without spaces, and "
            "WordPiece takes what is between two spaces for a word. Pass --kind unigram; or segment the text into "
            "words first, and pass --pretokenized",
            100 * long / characters,
            _LONG_WORD,
        )
    return kept


def _chunks(documents: Iterable[str]) -> Iterator[str]:
    """Yields lines in chunks, since the library needs some fifty times the memory of each text."""
    for document in documents:
        start = 0
        while len(document) - start > _CHUNK_CHARACTERS:
            end = document.find("\n", start + _CHUNK_CHARACTERS)
            if end < 0:
                break
            yield document[start:end]
            start = end
        yield document[start:]


def _alphabet(words: dict[str, int], coverage: float) -> set[str]:
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    minimum = coverage * counts.total()
    alphabet: set[str] = set()
    covered = 0
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if covered >= minimum:
            break
        alphabet.add(character)
        covered += count
    return alphabet


def _train(words: dict[str, int], size: int, continuations: list[str]) -> list[str]:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=_MIN_PAIR_COUNT,
        show_progress=False,
        special_tokens=[*SPECIAL_TOKENS, *continuations],  # Numbered in this order, before any word.
    )
    tokenizer.train_from_iterator(_repeated(words), trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def _repeated(words: dict[str, int]) -> Iterator[str]:
    """Yields text in which each word occurs as often as counted, since the trainer accepts text but no counts."""
    chunk: list[str] = []
    characters = 0
    for word, count in words.items():
        limit = max(1, _CHUNK_CHARACTERS // (len(word) + 1))
        while count:
            repeats = min(count, limit)
            chunk.append(" ".join([word] * repeats))
            characters += (len(word) + 1) * repeats
            count -= repeats
            if characters >= _CHUNK_CHARACTERS:
                yield " ".join(chunk)
                chunk, characters = [], 0
    yield " ".join(chunk)
