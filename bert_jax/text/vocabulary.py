"""Trains a WordPiece vocabulary: `bert-jax vocab`.

Google's trainer was never released; this is the one of the `tokenizers` library, which merges the most frequent pair of
neighbouring pieces until the vocabulary is full. Left alone it numbers its first pieces in the order of a randomised
hash table and breaks ties between equally frequent pairs by those numbers, so that every run gives another vocabulary.
Here the text is counted into words first, and the trainer is given the pieces it starts from, in order, then the
words: the vocabulary depends on the text alone, not on the run, the number of threads or the order of the documents.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from bert_jax.errors import InputError
from bert_jax.text.tokenization import CONTINUATION, MAX_WORD_CHARACTERS, SPECIAL_TOKENS, normalizer, pre_tokenizer

log = logging.getLogger(__name__)

_CHUNK_CHARACTERS = 1 << 14


def train_wordpiece(
    documents: Iterable[str],
    size: int,
    lowercase: bool,
    min_frequency: int = 2,
    character_coverage: float = 0.99995,
) -> list[str]:
    """Trains a WordPiece vocabulary on documents, which are read once and streamed.

    The pieces come as SPECIAL_TOKENS (ids 0 to 4), the alphabet, its continuations (`##a`), then the merges, the most
    frequent first. Memory is that of the distinct words. Wrap `documents` to follow the progress.

    Args:
      documents: text, of any length.
      size: the number of pieces. A small corpus may give fewer: that is logged.
      lowercase: whether to lower-case and strip accents first, as the tokenizer that uses the vocabulary will.
      min_frequency: a piece is only made of a pair that occurs this often.
      character_coverage: the share of the text's characters that the alphabet covers, from the most frequent down.
        A word with any other character is [UNK]. Rare characters otherwise fill the vocabulary: with 1.0, half of
        8,192 pieces learnt from English Wikipedia are characters like U+10CC0.

    Raises:
      InputError: the documents hold no word, or `size` does not hold the special tokens and the alphabet.
    """
    if not 0 < character_coverage <= 1:
        raise InputError(f"character_coverage is {character_coverage}; it must be above 0 and at most 1")
    words = count_words(documents, lowercase)
    if not words:
        raise InputError("there is no word to learn a vocabulary from: the corpus is empty; check the input")
    alphabet = _alphabet(words, character_coverage)
    words = {word: count for word, count in words.items() if alphabet.issuperset(word)}
    first = sorted({c for word in words for c in word})
    continuations = [CONTINUATION + character for character in sorted({c for word in words for c in word[1:]})]
    needed = len(SPECIAL_TOKENS) + len(first) + len(continuations)
    if size < needed:
        raise InputError(
            f"a vocabulary of {size} pieces is too small: this text needs at least {needed} ({len(SPECIAL_TOKENS)} "
            f"special tokens, {len(first)} characters and {len(continuations)} continuations); ask for more"
        )
    vocabulary = [*SPECIAL_TOKENS, *first, *continuations]
    known = set(vocabulary)
    vocabulary += [piece for piece in _train(words, size, continuations, min_frequency) if piece not in known]
    if len(vocabulary) < size:
        log.warning("the text gives %d pieces, not the %d asked for", len(vocabulary), size)
    return vocabulary


def count_words(documents: Iterable[str], lowercase: bool) -> dict[str, int]:
    """How often each word occurs, as the tokenizer splits words; those that it takes for [UNK] by length left out."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizer(lowercase)
    tokenizer.pre_tokenizer = pre_tokenizer()
    counter = trainers.WordPieceTrainer(vocab_size=0, show_progress=False)
    tokenizer.train_from_iterator(_chunks(documents), counter)
    # The trainer keeps its counts, and shows them only in what it is pickled as.
    counts = json.loads(counter.__getstate__())["WordPieceTrainer"]["bpe_trainer"]["words"]
    return {word: counts[word] for word in sorted(counts) if len(word) <= MAX_WORD_CHARACTERS}


def _chunks(documents: Iterable[str]) -> Iterator[str]:
    """Lines, several at a time: the library needs some fifty times the memory of each text that it is given."""
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
    wanted = coverage * counts.total()
    alphabet: set[str] = set()
    covered = 0
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if covered >= wanted:
            break
        alphabet.add(character)
        covered += count
    return alphabet


def _train(words: dict[str, int], size: int, continuations: list[str], min_frequency: int) -> list[str]:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        show_progress=False,
        special_tokens=[*SPECIAL_TOKENS, *continuations],  # Numbered in this order, before any word is looked at.
    )
    tokenizer.train_from_iterator(_repeated(words), trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def _repeated(words: dict[str, int]) -> Iterator[str]:
    """Text in which each word occurs as often as it was counted: the trainer takes no counts, only text."""
    chunk: list[str] = []
    characters = 0
    for word, count in words.items():
        most = max(1, _CHUNK_CHARACTERS // (len(word) + 1))
        while count:
            now = min(count, most)
            chunk.append(" ".join([word] * now))
            characters += (len(word) + 1) * now
            count -= now
            if characters >= _CHUNK_CHARACTERS:
                yield " ".join(chunk)
                chunk, characters = [], 0
    yield " ".join(chunk)
