"""Encoded rows of a split, and batches padded to the length of their longest row.

Fine-tuning's texts are short compared with the 512 tokens that a model reads. A batch is padded to the smallest of some
fixed lengths that holds its longest row, so that one step is compiled per length. Sorting by length puts rows of
similar length into one batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bert_jax.data.hashing import key_from
from bert_jax.text.sequences import EncodedSequence
from bert_jax.text.tokenization import WordPieceTokenizer

LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Padded lengths in tokens; beyond the last, its multiples."""

_WINDOW_BEFORE = 64


@dataclass(frozen=True)
class Encoding:
    """The tokenizer and the maximum tokens of rows.

    `last_position`: pool a sequence from its last token, for a left-to-right model, whose first token attends only to
    itself.
    """

    tokenizer: WordPieceTokenizer
    max_seq_len: int
    last_position: bool = False


@dataclass(frozen=True)
class Rows:
    """Rows of a split; every `group` adjacent rows are one example.

    Attributes:
      sequences: the encoder's inputs, one per row.
      labels: an array [N, ...] of N rows; for token labels a list of int32 [T], one label per token of a row; None if
        unlabelled.
      group: rows per example.
      last_position: pool a sequence from its last token instead of its first.
    """

    sequences: Sequence[EncodedSequence]
    labels: np.ndarray | Sequence[np.ndarray] | None
    group: int = 1
    last_position: bool = False

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self.sequences) // self.group

    def lengths(self) -> np.ndarray:
        """Returns the tokens of each example's longest row, int64 [examples]."""
        tokens = np.array([len(sequence.input_ids) for sequence in self.sequences], np.int64)
        return tokens.reshape(-1, self.group).max(axis=1)

    def pad_batch(
        self, examples: np.ndarray, seq_len: int, count: int, tokenizer: WordPieceTokenizer
    ) -> dict[str, np.ndarray]:
        """Builds the batch of `examples`, padded to the rows of `count` examples, for the model and its objective.

        Returns `input_ids, token_type_ids, positions, sequence_ids` int32 [B, L], `cls_positions` int32 [B, 1],
        `weights` fp32 [B], 0 for padding rows, and `labels` if labelled; B is count * group.
        """
        total = count * self.group
        input_ids = np.full((total, seq_len), tokenizer.pad_id, np.int32)
        token_type_ids, sequence_ids = np.zeros((2, total, seq_len), np.int32)
        cls_positions, weights = np.zeros((total, 1), np.int32), np.zeros(total, np.float32)
        chosen = (np.asarray(examples)[:, None] * self.group + np.arange(self.group)).reshape(-1)
        for row, index in enumerate(chosen.tolist()):
            sequence = self.sequences[index]
            length = len(sequence.input_ids)
            input_ids[row, :length] = sequence.input_ids
            token_type_ids[row, sequence.first_length : length] = 1
            sequence_ids[row, :length] = 1
            cls_positions[row] = length - 1 if self.last_position else 0
        sequence_ids[len(chosen) :, 0] = 1  # a padding row needs a token to attend to
        weights[: len(chosen)] = 1
        positions = np.broadcast_to(np.arange(seq_len, dtype=np.int32), input_ids.shape)
        batch = {
            "input_ids": input_ids, "token_type_ids": token_type_ids, "positions": positions,
            "sequence_ids": sequence_ids, "cls_positions": cls_positions, "weights": weights,
        }  # fmt: skip
        if self.labels is not None:
            batch["labels"] = self._labels(chosen, total, seq_len)
        return batch

    def _labels(self, chosen: np.ndarray, total: int, seq_len: int) -> np.ndarray:
        if isinstance(self.labels, np.ndarray):
            labels = np.zeros((total, *self.labels.shape[1:]), self.labels.dtype)
            labels[: len(chosen)] = self.labels[chosen]
            return labels
        assert self.labels is not None
        token_labels = np.full((total, seq_len), -1, np.int32)
        for row, index in enumerate(chosen.tolist()):
            token_labels[row, : len(self.labels[index])] = self.labels[index]
        return token_labels


def padded_length(length: int, max_seq_len: int) -> int:
    """Returns the smallest of `LENGTHS` that holds `length` tokens, at most `max_seq_len`."""
    fitting = next((known for known in LENGTHS if known >= length), -(-length // LENGTHS[-1]) * LENGTHS[-1])
    return min(fitting, max_seq_len)


def in_order(rows: Rows, batch_size: int) -> Iterator[np.ndarray]:
    """Yields all examples once, sorted by length: int64 [n], n = `batch_size` or, in the last batch, fewer."""
    order = np.argsort(rows.lengths(), kind="stable")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def epoch_of_batches(rows: Rows, batch_size: int, seed: int, epoch: int, *, window: int | None) -> list[np.ndarray]:
    """Returns the examples of each batch of an epoch, int64 [batch_size]: a pure function of its arguments.

    Each example is in one batch. The last batch may be smaller. Shuffled examples are split into windows of `window`
    batches, and each window is sorted by length. The batches of a window follow in random order. A window is a random
    sample, though a batch is not, so that a few steps see all lengths and the labels that correlate with them.

    Args:
      rows: the examples.
      batch_size: examples per batch.
      seed: the run's seed.
      epoch: numbered from 0.
      window: in batches; 1 sorts nothing. None is the order of runs that started before `data.sort_window`: windows of
        64 batches, whose batches are shuffled over the complete epoch.
    """
    rng = np.random.Generator(np.random.Philox(key=key_from(seed, epoch)))
    order, lengths = rng.permutation(len(rows)), rows.lengths()
    batches: list[np.ndarray] = []
    rest = len(rows) % batch_size  # not sorted, so that the lengths of the small last batch are not biased
    size = (window or _WINDOW_BEFORE) * batch_size
    for start in range(0, len(rows) - rest, size):
        examples = order[start : min(start + size, len(rows) - rest)]
        examples = examples[np.argsort(lengths[examples], kind="stable")]
        window_batches = np.split(examples, len(examples) // batch_size)
        batches += window_batches if window is None else _shuffled(window_batches, rng)
    if window is None:
        batches = _shuffled(batches, rng)
    return batches + ([order[len(rows) - rest :]] if rest else [])


def _shuffled(batches: list[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    return [batches[index] for index in rng.permutation(len(batches))]
