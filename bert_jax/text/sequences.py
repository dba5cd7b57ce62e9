"""Encoder input of one or two texts: encoding, truncation, and padding to few lengths."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bert_jax.batch import HostBatch
from bert_jax.text.tokenizer import Tokenizer

LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Padded lengths in tokens; beyond the last, its multiples. One program is compiled per length."""

_TEXTS_AT_ONCE = 4_096  # per call of the tokenizer


@dataclass(frozen=True)
class EncodedSequence:
    """Token ids [CLS] A [SEP] or [CLS] A [SEP] B [SEP]; the first `first_length` of `input_ids` have token type 0."""

    input_ids: tuple[int, ...]
    first_length: int


def truncate_pair(a: Sequence[int], b: Sequence[int], limit: int) -> tuple[Sequence[int], Sequence[int]]:
    """Truncates a pair to `limit` tokens in total, one by one from the end of the longer text (tie: from `b`).

    Equals `_truncate_seq_pair` in the reference's `run_classifier.py` (google-research/bert).
    """
    lengths = [len(a), len(b)]
    while sum(lengths) > limit:
        lengths[lengths[0] <= lengths[1]] -= 1
    return a[: lengths[0]], b[: lengths[1]]


def encode_sequence(
    tokenizer: Tokenizer, a: Sequence[int], b: Sequence[int] | None, max_seq_len: int
) -> EncodedSequence:
    """Adds special tokens to one or two texts, truncated to at most `max_seq_len` tokens (at least 3)."""
    if b is None:
        ids = (tokenizer.cls_id, *a[: max_seq_len - 2], tokenizer.sep_id)
        return EncodedSequence(ids, len(ids))
    a, b = truncate_pair(a, b, max_seq_len - 3)
    first = (tokenizer.cls_id, *a, tokenizer.sep_id)
    return EncodedSequence((*first, *b, tokenizer.sep_id), len(first))


def encode_pairs(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str | None]], max_seq_len: int
) -> list[EncodedSequence]:
    """Encodes (A, B) texts as [CLS] A [SEP] or [CLS] A [SEP] B [SEP], truncated to `max_seq_len` tokens (at least 3).

    A literal "[SEP]" in a text is tokenized as ordinary text.
    """
    encoded = []
    for start in range(0, len(pairs), _TEXTS_AT_ONCE):
        some = pairs[start : start + _TEXTS_AT_ONCE]
        first = tokenizer.encode_batch([a for a, _ in some])
        second = iter(tokenizer.encode_batch([b for _, b in some if b is not None]))
        for ids, (_, b) in zip(first, some, strict=True):
            encoded.append(encode_sequence(tokenizer, ids, None if b is None else next(second), max_seq_len))
    return encoded


def padded_length(length: int, max_seq_len: int, lengths: Sequence[int] = LENGTHS) -> int:
    """Returns the smallest of `lengths`, or else of `LENGTHS`, that holds `length` tokens, at most `max_seq_len`."""
    beyond = -(-length // LENGTHS[-1]) * LENGTHS[-1]
    fitting = next(known for known in (*lengths, *LENGTHS, beyond) if known >= length)
    return min(fitting, max_seq_len)


_MULTIPLES = ((128, 8), (256, 16), (512, 32))
"""Up to a length, the number of tokens that a chosen padded length is a multiple of; beyond, it is 128."""


def choose_lengths(
    batches: Sequence[int], max_seq_len: int, work: Callable[[int], float], program_work: float
) -> tuple[int, ...]:  # fmt: skip
    """Chooses padded lengths that take the least work in all: that of padded batches, and of compiling their programs.

    Args:
      batches: tokens of the longest sequence of each batch.
      max_seq_len: maximum tokens of a sequence.
      work: the work of a batch by its padded length, such as FLOPs.
      program_work: the work that compiling a program takes the time of.

    Returns:
      Lengths in ascending order, of which the last holds the longest sequence.
    """

    def pad(length: int) -> int:
        multiple = next((multiple for limit, multiple in _MULTIPLES if length <= limit), 128)
        return min(-(-length // multiple) * multiple, max_seq_len)

    counted = Counter(map(pad, batches))
    candidates = sorted(counted)
    counts = [counted[length] for length in candidates]
    # The least work of the batches up to each candidate, with a program of that candidate's length, and its lengths.
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for end, length in enumerate(candidates, 1):
        best.append(
            min(
                (before + program_work + sum(counts[start:end]) * work(length), (*chosen, length))
                for start, (before, chosen) in enumerate(best)
            )
        )
    return best[-1][1]


def pad_sequences(
    sequences: Sequence[EncodedSequence], rows: int, seq_len: int, pad_id: int, *, last_position: bool = False
) -> HostBatch:
    """Returns the inputs of the model without `masked_positions`: `sequences`, then padding up to `rows` [B].

    With `last_position` sequences are pooled from their last token. A padding row has one token: it needs a token to
    attend to.
    """
    input_ids = np.full((rows, seq_len), pad_id, np.int32)
    token_type_ids, sequence_ids = np.zeros((2, rows, seq_len), np.int32)
    cls_positions = np.zeros((rows, 1), np.int32)
    for row, sequence in enumerate(sequences):
        length = len(sequence.input_ids)
        input_ids[row, :length] = sequence.input_ids
        token_type_ids[row, sequence.first_length : length] = 1
        sequence_ids[row, :length] = 1
        cls_positions[row] = length - 1 if last_position else 0
    sequence_ids[len(sequences) :, 0] = 1
    return {
        "input_ids": input_ids, "token_type_ids": token_type_ids,
        "positions": np.broadcast_to(np.arange(seq_len, dtype=np.int32), input_ids.shape),
        "sequence_ids": sequence_ids, "cls_positions": cls_positions,
    }  # fmt: skip
