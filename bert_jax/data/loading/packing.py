"""Packs several short sequences into one row, which reduces padding.

No token is truncated or dropped: a row holds at most `max_sequences` complete sequences. Attention is limited to each
sequence, and each has its own positions, its own [CLS] and its own masks.

The packing is computed on the histogram of lengths, longest first: a sequence is added to the fullest row with room for
it (longest-pack-first; Krell et al. 2021, arXiv:2107.02027), or to a new row together with others of its length.
"""

from bisect import bisect_left, insort
from collections.abc import Callable

import numpy as np

from bert_jax.batch import HostBatch, map_arrays, pretraining_shapes
from bert_jax.data.hashing import random_bits


def pack_lengths(lengths: np.ndarray, seq_len: int, max_sequences: int) -> list[tuple[int, tuple[int, ...]]]:
    """Packs sequences of `lengths` [N]; returns (count, lengths in the row) for each kind of row."""
    full: list[tuple[int, tuple[int, ...]]] = []
    open_rows: dict[int, list[tuple[int, tuple[int, ...]]]] = {}  # by remaining room
    rooms: list[int] = []  # its keys, sorted

    def put(count: int, row: tuple[int, ...], room: int) -> None:
        if len(row) == max_sequences or not room:
            full.append((count, row))
        elif room in open_rows:
            open_rows[room].append((count, row))
        else:
            open_rows[room] = [(count, row)]
            insort(rooms, room)

    counts = np.bincount(lengths)
    present = np.nonzero(counts)[0][::-1]
    for length, left in zip(present.tolist(), counts[present].tolist(), strict=True):
        while left:
            at = bisect_left(rooms, length)
            if at == len(rooms):
                together = min(max_sequences, seq_len // length)
                if left >= together:
                    put(left // together, (length,) * together, seq_len - together * length)
                if rest := left % together:
                    put(1, (length,) * rest, seq_len - rest * length)
                break
            room = rooms[at]
            waiting = open_rows[room]
            count, row = waiting.pop()
            if count > left:
                waiting.append((count - left, row))
                count = left
            elif not waiting:
                del open_rows[room]
                rooms.pop(at)
            put(count, (*row, length), room - length)
            left -= count
    return full + [entry for room in rooms for entry in open_rows[room]]


def pack(lengths: np.ndarray, seq_len: int, max_sequences: int, key: int) -> np.ndarray:
    """Returns rows int64 [R, max_sequences] of indices into `lengths`, -1 for an empty slot.

    R and the lengths in each row depend only on the lengths; `key` selects which sequence of a length goes where.
    """
    counts = pack_lengths(lengths, seq_len, max_sequences)
    shuffled = np.argsort(random_bits(np.uint64(key), np.arange(len(lengths), dtype=np.uint64)), kind="stable")
    shuffled = shuffled[np.argsort(lengths[shuffled], kind="stable")]
    by_length, starts = np.unique(lengths[shuffled], return_index=True)
    following = dict(zip(by_length.tolist(), starts.tolist(), strict=True))
    rows = np.full((sum(count for count, _ in counts), max_sequences), -1, np.int64)
    first = 0
    for count, row in counts:
        for column, length in enumerate(row):
            begin = following[length]
            rows[first : first + count, column] = shuffled[begin : begin + count]
            following[length] = begin + count
        first += count
    return rows


def most_predictions(predictions: Callable[[np.ndarray], np.ndarray], seq_len: int, max_sequences: int) -> int:
    """Returns the maximum number of predictions in a row; `predictions` maps sequence lengths [n] to counts [n]."""
    each = np.concatenate([[0], predictions(np.arange(1, seq_len + 1))])
    most = np.zeros(seq_len + 1, np.int64)  # by available room
    for _ in range(min(max_sequences, seq_len)):
        most = np.array([(each[: room + 1] + most[room::-1]).max() for room in range(seq_len + 1)])
    return int(most[-1])


def pack_batch(sequences: HostBatch, is_used: np.ndarray, seq_len: int, predictions: int, pad_id: int) -> HostBatch:
    """Converts a batch with one sequence a row, [N, ...], to a packed batch, [R, ...].

    Args:
      sequences: the batch layout with K = 1: the sequences of the first row, then those of the second, and so on.
      is_used: bool [R, K], the slots with a sequence; they precede the empty slots of their row.
      seq_len: L of the result; the lengths of a row sum to at most L.
      predictions: P of the result; must be sufficient for each row.
      pad_id: the id of [PAD].
    """
    count, per_row = is_used.shape
    row_of, slot_of = np.nonzero(is_used)
    is_real = sequences["sequence_ids"] > 0
    lengths = np.count_nonzero(is_real, axis=1)
    placed = np.zeros(is_used.shape, np.int64)
    placed[is_used] = lengths
    starts = (np.cumsum(placed, axis=1) - placed)[is_used]

    shapes = pretraining_shapes(count, seq_len, predictions, per_row)
    packed: HostBatch = map_arrays(lambda shape_and_dtype: np.zeros(*shape_and_dtype), shapes)
    packed["input_ids"].fill(pad_id)
    # A row's tokens are those of its sequences in order: both masks select the same tokens in the same order.
    target = np.arange(seq_len) < placed.sum(axis=1)[:, None]
    for name in ("input_ids", "token_type_ids", "positions"):
        packed[name][target] = sequences[name][is_real]
    packed["sequence_ids"][target] = np.repeat(slot_of.astype(np.int32) + 1, lengths)

    is_predicted = sequences["masked_weights"] > 0
    counts = np.count_nonzero(is_predicted, axis=1)
    target = np.arange(predictions) < np.bincount(row_of, counts, count)[:, None]
    packed["masked_positions"][target] = sequences["masked_positions"][is_predicted] + np.repeat(starts, counts)
    packed["masked_ids"][target] = sequences["masked_ids"][is_predicted]
    packed["masked_weights"][target] = sequences["masked_weights"][is_predicted]

    packed["cls_positions"][is_used] = starts
    packed["next_sentence_labels"][is_used] = sequences["next_sentence_labels"][:, 0]
    packed["next_sentence_weights"][is_used] = sequences["next_sentence_weights"][:, 0]
    return packed
