"""Encoded examples of a split, and the order of their batches.

Fine-tuning's texts are short compared with the 512 tokens that a model reads. A batch is padded to the smallest of some
fixed lengths that holds its longest sequence, so that one step is compiled per length. Sorting by length puts examples
of similar length into one batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bert_jax.batch import HostBatch
from bert_jax.data.hashing import key_from
from bert_jax.text.sequences import EncodedSequence, pad_sequences
from bert_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Encoding:
    """The tokenizer and the maximum tokens of a sequence.

    `last_position`: pool a sequence from its last token, for a left-to-right model, whose first token attends only to
    itself.
    """

    tokenizer: Tokenizer
    max_seq_len: int
    last_position: bool = False


@dataclass(frozen=True)
class EncodedExamples:
    """Examples of a split, of one or more sequences each.

    Attributes:
      sequences: the encoder's inputs, [N]; every `group` adjacent ones are one example.
      labels: an array [N, ...]; for token labels a list of int32 [T], one label per token of a sequence; None if
        unlabelled. See `Batch.labels`.
      group: sequences per example.
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
        """Returns the tokens of each example's longest sequence, int64 [examples]."""
        tokens = np.array([len(sequence.input_ids) for sequence in self.sequences], np.int64)
        result: np.ndarray = tokens.reshape(-1, self.group).max(axis=1)
        return result

    def batch(self, examples: np.ndarray, seq_len: int, count: int, tokenizer: Tokenizer) -> HostBatch:
        """Returns the batch of `examples`, padded to `seq_len` tokens and to the rows of `count` examples.

        It has a row per sequence, `weights`, and `labels` if labelled.
        """
        rows = count * self.group
        chosen = (np.asarray(examples)[:, None] * self.group + np.arange(self.group)).reshape(-1)
        batch = pad_sequences(
            [self.sequences[index] for index in chosen.tolist()], rows, seq_len, tokenizer.pad_id,
            last_position=self.last_position,
        )  # fmt: skip
        batch["weights"] = (np.arange(rows) < len(chosen)).astype(np.float32)
        if self.labels is not None:
            batch["labels"] = self._labels(chosen, rows, seq_len)
        return batch

    def _labels(self, chosen: np.ndarray, rows: int, seq_len: int) -> np.ndarray:
        if isinstance(self.labels, np.ndarray):
            labels = np.zeros((rows, *self.labels.shape[1:]), self.labels.dtype)
            labels[: len(chosen)] = self.labels[chosen]
            return labels
        assert self.labels is not None
        token_labels = np.full((rows, seq_len), -1, np.int32)
        for row, index in enumerate(chosen.tolist()):
            token_labels[row, : len(self.labels[index])] = self.labels[index]
        return token_labels


def in_order(examples: EncodedExamples, batch_size: int) -> Iterator[np.ndarray]:
    """Yields all examples once, sorted by length: int64 [n], n = `batch_size` or, in the last batch, fewer."""
    order = np.argsort(examples.lengths(), kind="stable")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def epoch_of_batches(
    examples: EncodedExamples, batch_size: int, seed: int, epoch: int, *, window: int
) -> list[np.ndarray]:
    """Returns the examples of each batch of an epoch, int64 [batch_size]: a pure function of its arguments.

    Each example is in one batch. The last batch may be smaller. Shuffled examples are split into windows of `window`
    batches, and each window is sorted by length. The batches of a window follow in random order. A window is a random
    sample, though a batch is not, so that a few steps see all lengths and the labels that correlate with them.

    Args:
      examples: the examples of a split.
      batch_size: examples per batch.
      seed: the run's seed.
      epoch: numbered from 0.
      window: in batches; 1 sorts nothing.
    """
    rng = np.random.Generator(np.random.Philox(key=key_from(seed, epoch)))
    order, lengths = rng.permutation(len(examples)), examples.lengths()
    batches: list[np.ndarray] = []
    rest = len(examples) % batch_size  # not sorted, so that the lengths of the small last batch are not biased
    size = window * batch_size
    for start in range(0, len(order) - rest, size):
        window_order = order[start : min(start + size, len(order) - rest)]
        window_order = window_order[np.argsort(lengths[window_order], kind="stable")]
        window_batches = np.split(window_order, len(window_order) // batch_size)
        batches += [window_batches[index] for index in rng.permutation(len(window_batches))]
    return batches + ([order[len(order) - rest :]] if rest else [])
