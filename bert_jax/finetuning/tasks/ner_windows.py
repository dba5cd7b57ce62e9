"""What the encoder reads of sentences whose words are to be tagged: windows, in which each word is predicted once.

A word is cut into pieces by itself; its first piece carries its tag. A sentence is read whole, between [CLS] and [SEP];
one that is too long is read in overlapping windows, and each of its words is predicted in that window in which it has
the most context on its poorer side. With document context, as in BERT's paper, what room there is beside a sentence is
filled with the words of the same document before and behind it, as many on either side as far as there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from bert_jax.finetuning.inputs.conll import OUTSIDE, TaggedSentence
from bert_jax.text.sequences import EncodedSequence
from bert_jax.text.tokenization import WordPieceTokenizer

_SPECIAL_TOKENS = 2  # [CLS] and [SEP]
_BATCH = 65_536  # words tokenized at once


@dataclass(frozen=True)
class TagWindow:
    """A sequence, and (sentence, word, position) of each word that is predicted in it.

    Sentences and words are counted from 0; `position` is that of the word's first piece in `sequence.input_ids`.
    """

    sequence: EncodedSequence
    words: tuple[tuple[int, int, int], ...]


def encode_windows(
    tokenizer: WordPieceTokenizer,
    sentences: Sequence[TaggedSentence],
    max_seq_len: int,
    *,
    document_context: bool = False,
) -> list[TagWindow]:
    """The windows of all sentences, in their order.

    Every word that has a piece is predicted in exactly one window. (A word of control characters alone has none.)

    Args:
      tokenizer: words are given to it one by one.
      sentences: as `ner.read_conll` gives them: those of a document one after the other.
      max_seq_len: the most tokens of a window, with [CLS] and [SEP]; 3 or more. A word of more pieces than a window
        takes loses its last ones.
      document_context: whether windows are filled with other sentences of the document.
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
    """A tag for every word of every sentence: the predicted one, and O for a word that has no piece.

    Args:
      sentences: those that were encoded.
      windows: of `encode_windows`.
      predicted: for each window the tags of its `words`, in their order.
    """
    tags = [[OUTSIDE] * len(sentence.words) for sentence in sentences]
    for window, names in zip(windows, predicted, strict=True):
        for (sentence, word, _), name in zip(window.words, names, strict=True):
            tags[sentence][word] = name
    return tags


def _pieces(
    tokenizer: WordPieceTokenizer, sentences: Sequence[TaggedSentence], limit: int
) -> dict[str, tuple[int, ...]]:
    words = list(dict.fromkeys(word for sentence in sentences for word in sentence.words))
    encoded: dict[str, tuple[int, ...]] = {}
    for start in range(0, len(words), _BATCH):
        batch = words[start : start + _BATCH]
        for word, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
            encoded[word] = tuple(ids[:limit])
    return encoded


def _parts(ends: np.ndarray, first: int, last: int, room: int) -> list[tuple[int, int]]:
    """Words [first, last) in parts that are predicted in a window each.

    As few windows as overlap by half or more, at even distances. Two of them part their words in the middle of what
    both hold: there a word has as much context in the one as in the other.
    """
    total = int(ends[last] - ends[first])
    if total <= room:
        return [(first, last)]
    count = 1 + -(-(total - room) // max(room // 2, 1))
    stride = (total - room) / (count - 1)
    cuts = [ends[first] + (room + stride) / 2 + stride * index for index in range(count - 1)]
    parts, start = [], first
    for word in range(first, last):
        full = ends[word + 1] - ends[start] > room  # as long words can have it
        if word > start and (full or (cuts and ends[word] >= cuts[0])):
            parts.append((start, word))
            start = word
        while cuts and ends[word] >= cuts[0]:
            cuts.pop(0)
    return [*parts, (start, last)]


def _widen(ends: np.ndarray, start: int, end: int, room: int) -> tuple[int, int]:
    """The words of the window around words [start, end): as much before as behind them, where there is as much."""
    spare = room - (ends[end] - ends[start])
    low = np.searchsorted(ends, ends[start] - spare // 2)  # whole words: the first that begins in there
    high = np.searchsorted(ends, ends[low] + room, side="right") - 1
    low = np.searchsorted(ends, ends[high] - room)  # what is left over behind goes before
    return int(low), int(high)


def _window(
    tokenizer: WordPieceTokenizer,
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
