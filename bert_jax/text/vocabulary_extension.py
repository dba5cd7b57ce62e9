"""Extends a WordPiece vocabulary with the words of a domain: `bert-jax vocab --extend`.

An extension keeps every id of the old vocabulary: new words are appended, or replace `[unusedN]` pieces. A checkpoint
of the old vocabulary can therefore be trained with the new one; the rows of new words are made from those of their old
pieces, see `training/initialization.py`.

Candidates are the whole words that the old vocabulary splits, ranked by the tokens that each would save: its count
times (its pieces - 1). Pieces that continue a word are not proposed: WordPiece takes the longest match, so that a new
continuation would split words differently that the model knows, while a new whole word changes only itself and the
words that it begins. AVocaDo (Hong et al. 2021, arXiv:2110.13434) and exBERT (Tai et al. 2020) add pieces of a
vocabulary that is trained on the domain instead.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from bert_jax.errors import InputError
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.vocabulary_training import count_words

log = logging.getLogger(__name__)

UNUSED = re.compile(r"\[unused\d+\]")
"""Pieces without a use, which released vocabularies have for the words of their users."""


@dataclass(frozen=True)
class Extension:
    """New words of a vocabulary, N of them.

    Attributes:
      ids: their ids in the new vocabulary.
      pieces: the ids of the old pieces of each; that of [UNK] alone for a word that the old vocabulary cannot split.
    """

    ids: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ExtendedVocabulary:
    """The tokenizer of an extended vocabulary, its new words, best first, and the tokens of the input with both."""

    tokenizer: Tokenizer
    words: tuple[str, ...]
    tokens_before: int
    tokens_after: int


def extend_by_documents(
    documents: Iterable[str], tokenizer: Tokenizer, *, number: int, min_count: int,
    replace_unused: bool = False,
) -> ExtendedVocabulary:  # fmt: skip
    """Extends the vocabulary of `tokenizer` with the words of documents, which are streamed once.

    The result depends only on the text, not on the order of the documents. For the other arguments and errors see
    `propose_words` and `extend_vocabulary`.
    """
    counts = count_words(documents, tokenizers.Tokenizer.from_str(json.dumps(tokenizer.content)))
    words = propose_words(counts, tokenizer, number=number, min_count=min_count)
    extended = extend_vocabulary(tokenizer, words, replace_unused=replace_unused)
    before, after = (_count_tokens(counts, one) for one in (tokenizer, extended))
    return ExtendedVocabulary(extended, tuple(words), before, after)


def _count_tokens(counts: Mapping[str, int], tokenizer: Tokenizer) -> int:
    encoded = tokenizer.encode_batch(list(counts))
    return sum(count * len(ids) for count, ids in zip(counts.values(), encoded, strict=True))


def check_wordpiece(tokenizer: Tokenizer, source: str) -> None:
    """Raises InputError, with the tokenizer's `source`, for one that is not WordPiece."""
    if tokenizer.kind != "wordpiece":
        raise InputError(
            f"{source}: is a vocabulary of {tokenizer.title}, and only WordPiece can be extended; continue with its "
            "pieces"
        )


def propose_words(counts: Mapping[str, int], tokenizer: Tokenizer, *, number: int, min_count: int) -> list[str]:
    """Returns at most `number` words that would save the most tokens, best first; ties are in alphabetical order.

    Words need a letter, so that numbers are not proposed, and pieces: a word that is [UNK] has nothing to start from.

    Args:
      counts: the words of the input, see `count_words`.
      tokenizer: the tokenizer of the old vocabulary.
      number: the maximum number of words.
      min_count: words that occur less often are not proposed.

    Raises InputError if there is no such word.
    """
    words = [
        word for word, count in counts.items()
        if count >= min_count and len(word) > 1 and any(letter.isalpha() for letter in word)
    ]  # fmt: skip
    saved = {
        word: counts[word] * (len(ids) - 1)
        for word, ids in zip(words, tokenizer.encode_batch(words), strict=True)
        if len(ids) > 1 and tokenizer.unk_id not in ids
    }
    if not saved:
        raise InputError(
            f"min_count={min_count}: none of the {len(counts):,} distinct words of --input occurs so often and is "
            "split by the vocabulary; lower --min_count, or give more text"
        )
    if len(saved) < number:
        log.warning("Only %d words are split and occur at least %d times, not --add=%d", len(saved), min_count, number)
    return sorted(saved, key=lambda word: (-saved[word], word))[:number]


def extend_vocabulary(tokenizer: Tokenizer, words: Sequence[str], *, replace_unused: bool = False) -> Tokenizer:
    """Returns the tokenizer with `words` after its pieces; with `replace_unused`, first in place of `[unusedN]`.

    All other rules of the tokenizer stay. Raises InputError for a word that is a piece already.
    """
    pieces, rest = list(tokenizer.vocab), list(words)
    if replace_unused:
        slots = [index for index, piece in enumerate(pieces) if UNUSED.fullmatch(piece)]
        for slot, word in zip(slots, words, strict=False):
            pieces[slot] = word
        rest = rest[len(slots) :]
    if "" in pieces:
        raise InputError("the vocabulary has ids without a piece; only one without gaps can be extended")
    vocab = {piece: index for index, piece in enumerate([*pieces, *rest])}
    if len(vocab) < len(pieces) + len(rest):
        raise InputError(f"{next(word for word in words if word in tokenizer.vocab)!r} is a piece already")
    model = {**tokenizer.content["model"], "vocab": vocab}
    added = [token for token in tokenizer.content["added_tokens"] if token["content"] in vocab]
    return Tokenizer({**tokenizer.content, "model": model, "added_tokens": added}, tokenizer.special_tokens)


def find_extension(old: Tokenizer, new: Tokenizer) -> Extension | None:
    """Returns the new words of a vocabulary that extends `old`; None for a vocabulary that does not.

    An equal vocabulary of any kind extends `old`, without new words. Any other is WordPiece, normalizes text as `old`
    does, and has the same piece for every id of `old`, except `[unusedN]`.
    """
    if new.sha256 == old.sha256:
        return Extension((), ())
    if {old.kind, new.kind} != {"wordpiece"} or new.vocab_size < old.vocab_size:
        return None
    if _rules(old) != _rules(new):
        return None
    replaced = [index for index, piece in enumerate(old.vocab) if piece != new.vocab[index]]
    if not all(UNUSED.fullmatch(old.vocab[index]) for index in replaced):
        return None
    known = {piece: index for index, piece in enumerate(old.vocab)}
    ids = (*replaced, *range(old.vocab_size, new.vocab_size))
    mark = new.content["model"]["continuing_subword_prefix"]
    return Extension(ids, tuple(tuple(_split(new.vocab[index], known, mark) or [old.unk_id]) for index in ids))


def _rules(tokenizer: Tokenizer) -> tuple[Any, ...]:
    """Returns what decides which words of a text are split; the reference's and the library's rules are one."""
    if tokenizer.follows_bert:
        return tokenizer.lowercase, tokenizer.strip_accents, tokenizer.is_pretokenized
    return tuple(tokenizer.content[part] for part in ("normalizer", "pre_tokenizer"))


def _split(piece: str, known: Mapping[str, int], mark: str) -> list[int]:
    """Splits a piece into the longest matching old ones, as WordPiece does; empty without a match.

    Pieces that continue a word begin with `mark`.
    """
    prefix = mark if piece.startswith(mark) and piece != mark else ""
    rest = piece.removeprefix(prefix)
    found: list[int] = []
    while rest:
        end = next((end for end in range(len(rest), 0, -1) if prefix + rest[:end] in known), 0)
        if not end:
            return []
        found.append(known[prefix + rest[:end]])
        rest, prefix = rest[end:], mark
    return found
