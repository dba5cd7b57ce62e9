"""Sliding windows over the sentences of a tagger, such that each word is predicted once.

Words are tokenized one by one; a word's first piece carries its tag. A sentence is one sequence between [CLS] and
[SEP]. A longer one is split into overlapping windows, and each of its words is predicted in the window where the
smaller of its two contexts (left and right) is largest. With document context, as in BERT's paper, the remaining space
is filled with words of the same document before and after the sentence, as many on either side as available.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from bert_jax.text.sequences import EncodedSequence
from bert_jax.text.tokenizer import Tokenizer

_SPECIAL_TOKENS = 2  # [CLS] and [SEP]
_BATCH = 65_536  # words tokenized at once


OUTSIDE = "O"


@dataclass(frozen=True)
class TaggedSentence:
    """Words and their BIO tags, or None for an untagged file; `document` numbers a file's documents from 0.

    `id` is that of a row with a text, or the number of the sentence in its file.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    document: int
    id: str


@dataclass(frozen=True)
class TagWindow:
    """A sequence, and (sentence, word, position) of each word predicted in it.

    Sentences and words are numbered from 0; `position` is the index of the word's first piece in `sequence.input_ids`.
    """

    sequence: EncodedSequence
    words: tuple[tuple[int, int, int], ...]


def encode_windows(
    tokenizer: Tokenizer,
    sentences: Sequence[TaggedSentence],
    max_seq_len: int,
    *,
    document_context: bool = False,
) -> list[TagWindow]:
    """Returns the windows of all sentences, in their order.

    Every word that has a piece is predicted in exactly one window. (A word of control characters only has none.)

    Args:
      tokenizer: tokenizes the words one by one.
      sentences: from a file; the sentences of a document are adjacent.
      max_seq_len: maximum tokens of a window, with [CLS] and [SEP]; at least 3. A word with more pieces than fit into a
        window is truncated.
      document_context: fill the windows with other sentences of the document.
    """
    room = max_seq_len - _SPECIAL_TOKENS
    pieces = _pieces(tokenizer, sentences, room)
    numbered = enumerate(sentences)
    windows: list[TagWindow] = []
    for _, group in groupby(numbered, key=lambda pair: pair[1].document if document_context else pair[0]):
        members = [number for number, _ in group]
        words = [(number, word) for number in members for word in range(len(sentences[number].words))]
        ids = [pieces[sentences[number].words[word]] for number, word in words]
        ends = np.cumsum([0, *(len(one) for one in ids)])  # of the pieces before each word, and of all
        first = 0
        for number in members:
            last = first + len(sentences[number].words)
            for start, end in _parts(ends, first, last, room):
                low, high = _widen(ends, start, end, room)
                windows.append(_window(tokenizer, words, ids, (low, high), (start, end)))
            first = last
    return [window for window in windows if window.words]


def collect_tags(
    sentences: Sequence[TaggedSentence], windows: Sequence[TagWindow], predicted: Sequence[Sequence[str]]
) -> list[list[str]]:
    """Returns a tag for every word of every sentence: the predicted one, or O for a word without a piece.

    Args:
      sentences: the encoded sentences.
      windows: from `encode_windows`.
      predicted: for each window the tags of its `words`, in their order.
    """
    tags = [[OUTSIDE] * len(sentence.words) for sentence in sentences]
    for window, names in zip(windows, predicted, strict=True):
        for (sentence, word, _), name in zip(window.words, names, strict=True):
            tags[sentence][word] = name
    return tags


def _pieces(tokenizer: Tokenizer, sentences: Sequence[TaggedSentence], limit: int) -> dict[str, tuple[int, ...]]:
    words = list(dict.fromkeys(word for sentence in sentences for word in sentence.words))
    encoded: dict[str, tuple[int, ...]] = {}
    for start in range(0, len(words), _BATCH):
        batch = words[start : start + _BATCH]
        for word, ids in zip(batch, tokenizer.encode_words(batch), strict=True):
            encoded[word] = tuple(ids[:limit])
    return encoded


def _parts(ends: np.ndarray, first: int, last: int, room: int) -> list[tuple[int, int]]:
    """Splits words [first, last) into parts, each predicted in its own window.

    Uses the fewest evenly spaced windows that overlap by at least half. Adjacent windows split their words in the
    middle of the overlap, where a word has equal context in both.
    """
    total = int(ends[last] - ends[first])
    if total <= room:
        return [(first, last)]
    count = 1 + -(-(total - room) // max(room // 2, 1))
    stride = (total - room) / (count - 1)
    cuts = [ends[first] + (room + stride) / 2 + stride * index for index in range(count - 1)]
    parts, start = [], first
    for word in range(first, last):
        full = ends[word + 1] - ends[start] > room  # possible with long words
        if word > start and (full or (cuts and ends[word] >= cuts[0])):
            parts.append((start, word))
            start = word
        while cuts and ends[word] >= cuts[0]:
            cuts.pop(0)
    return [*parts, (start, last)]


def _widen(ends: np.ndarray, start: int, end: int, room: int) -> tuple[int, int]:
    """Returns the words of the window around words [start, end): equal context on both sides, where available."""
    spare = room - (ends[end] - ends[start])
    low = np.searchsorted(ends, ends[start] - spare // 2)  # complete words: the first one that begins inside
    high = np.searchsorted(ends, ends[low] + room, side="right") - 1
    low = np.searchsorted(ends, ends[high] - room)  # space left after the words goes before them
    return int(low), int(high)


def _window(
    tokenizer: Tokenizer,
    words: Sequence[tuple[int, int]],
    ids: Sequence[tuple[int, ...]],
    held: tuple[int, int],
    predicted: tuple[int, int],
) -> TagWindow:
    input_ids = [tokenizer.cls_id]
    targets = []
    for index in range(*held):
        if ids[index] and predicted[0] <= index < predicted[1]:
            targets.append((*words[index], len(input_ids)))
        input_ids += ids[index]
    input_ids.append(tokenizer.sep_id)
    return TagWindow(EncodedSequence(tuple(input_ids), len(input_ids)), tuple(targets))
