"""The encoded rows of a split, and batches of them whose length is that of what is in them.

Fine-tuning's texts are short beside the 512 tokens that a model reads. A batch is as long as the next of a few lengths
that holds its longest row: a step is compiled for each of these, and for no other. Where rows are sorted by length,
neighbours of a like length share a batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bert_jax.data.hashing import key_from
from bert_jax.text.sequences import EncodedSequence
from bert_jax.text.tokenization import WordPieceTokenizer

LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""What rows are padded to; beyond, multiples of the last."""

_WINDOW_BEFORE = 64


@dataclass(frozen=True)
class Encoding:
    """How texts become rows: by which tokenizer, of how many tokens at the most.

    `last_position`: whether a sequence is pooled from its last token, as of a left-to-right model, whose first token
    sees nothing but itself.
    """

    tokenizer: WordPieceTokenizer
    max_seq_len: int
    last_position: bool = False


@dataclass(frozen=True)
class Rows:
    """Rows of a split, `group` neighbours of which are one example.

    Attributes:
      sequences: what the encoder reads, a row each.
      labels: an array whose first axis is the rows', or None where there are none. [N, ...], or for labels of tokens a
        list of int32 [T], one for each of a row's tokens.
      group: rows of an example.
      last_position: whether a sequence is pooled from its last token and not from its first.
    """

    sequences: Sequence[EncodedSequence]
    labels: np.ndarray | Sequence[np.ndarray] | None
    group: int = 1
    last_position: bool = False

    def __len__(self) -> int:
        """Examples."""
        return len(self.sequences) // self.group

    def lengths(self) -> np.ndarray:
        """int64 [examples]: tokens of the longest row of each."""
        tokens = np.array([len(sequence.input_ids) for sequence in self.sequences], np.int64)
        return tokens.reshape(-1, self.group).max(axis=1)

    def lay_out(
        self, examples: np.ndarray, seq_len: int, count: int, tokenizer: WordPieceTokenizer
    ) -> dict[str, np.ndarray]:
        """The rows of `examples`, filled up to those of `count` examples, as the model and its objective read them.

        Returns `input_ids, token_type_ids, positions, sequence_ids` int32 [B, L], `cls_positions` int32 [B, 1],
        `weights` fp32 [B], 0 where it is filled up, and `labels` where there are any; B is count * group.
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
        sequence_ids[len(chosen) :, 0] = 1  # a row of nothing but padding has nothing to attend to
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
        of_tokens = np.full((total, seq_len), -1, np.int32)
        for row, index in enumerate(chosen.tolist()):
            of_tokens[row, : len(self.labels[index])] = self.labels[index]
        return of_tokens


def padded_length(length: int, max_seq_len: int) -> int:
    """The shortest of `LENGTHS` that holds `length` tokens; `max_seq_len` where they are beyond it."""
    fitting = next((known for known in LENGTHS if known >= length), -(-length // LENGTHS[-1]) * LENGTHS[-1])
    return min(fitting, max_seq_len)


def in_order(rows: Rows, batch_size: int) -> Iterator[np.ndarray]:
    """All examples once, by length: int64 [n] of `batch_size` examples or, the last, fewer."""
    order = np.argsort(rows.lengths(), kind="stable")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def epoch_of_batches(rows: Rows, batch_size: int, seed: int, epoch: int, *, window: int | None) -> list[np.ndarray]:
    """Returns the examples of each batch of an epoch, int64 [batch_size]: a pure function of its arguments.

    Each example is in one batch. The last batch may be smaller. Shuffled examples are cut into windows of `window`
    batches, and each window is sorted by length. Batches of a window follow one another in a random order: each window
    is a random sample, though a batch is none. So few steps see all lengths, and the labels that go with them.

    Args:
      rows: the examples.
      batch_size: examples.
      seed: of the run.
      epoch: from 0.
      window: batches; 1 sorts nothing. None is the order of runs that began before `data.sort_window`: windows of 64
        batches, whose batches are shuffled over the whole epoch.
    """
    rng = np.random.Generator(np.random.Philox(key=key_from(seed, epoch)))
    order, lengths = rng.permutation(len(rows)), rows.lengths()
    batches: list[np.ndarray] = []
    rest = len(rows) % batch_size  # not sorted, so that the small batch is of no odd length
    size = (window or _WINDOW_BEFORE) * batch_size
    for start in range(0, len(rows) - rest, size):
        examples = order[start : min(start + size, len(rows) - rest)]
        examples = examples[np.argsort(lengths[examples], kind="stable")]
        of_window = np.split(examples, len(examples) // batch_size)
        batches += of_window if window is None else _shuffled(of_window, rng)
    if window is None:
        batches = _shuffled(batches, rng)
    return batches + ([order[len(rows) - rest :]] if rest else [])


def _shuffled(batches: list[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    return [batches[index] for index in rng.permutation(len(batches))]
