"""Encoded examples of a split, and their batches: which examples a step trains on, and how long its rows are.

Fine-tuning's texts are short compared with the 512 tokens that a model reads. A batch is padded to the smallest of some
fixed lengths that holds its longest sequence, so that one step is compiled per length. Sorting by length puts examples
of similar length into one batch.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_jax.batch import HostBatch, map_arrays
from bert_jax.config_keys import FinetuneConfig
from bert_jax.data.hashing import key_from
from bert_jax.model import BertConfig
from bert_jax.model.task_heads import TaskHead
from bert_jax.text.sequences import EncodedSequence, choose_lengths, pad_sequences, padded_length
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.tracking.throughput import StepWork, finetuning_flops


@dataclass(frozen=True)
class EncodedExamples:
    """Examples of a split, of one or more sequences each.

    Attributes:
      sequences: the encoder's inputs, [N]; every `group` adjacent ones are one example.
      labels: an array [N, ...]; for token labels a list of int32 [T], one label per token of a sequence; None if
        unlabelled. See `Batch.labels`.
      group: sequences per example.
      windows: for a task that splits long examples, what each sequence has of them.
    """

    sequences: Sequence[EncodedSequence]
    labels: np.ndarray | Sequence[np.ndarray] | None = None
    group: int = 1
    windows: Sequence[Any] = ()

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self.sequences) // self.group

    def lengths(self) -> np.ndarray:
        """Returns the tokens of each example's longest sequence, int64 [examples]."""
        tokens = np.array([len(sequence.input_ids) for sequence in self.sequences], np.int64)
        result: np.ndarray = tokens.reshape(-1, self.group).max(axis=1)
        return result

    def batch(
        self, examples: np.ndarray, seq_len: int, count: int, tokenizer: Tokenizer, *, last_position: bool = False
    ) -> HostBatch:
        """Returns the batch of `examples`, padded to `seq_len` tokens and to the rows of `count` examples.

        It has a row per sequence, `weights`, and `labels` if labelled. With `last_position` a sequence is pooled from
        its last token, for a left-to-right model, whose first token attends only to itself.
        """
        rows = count * self.group
        chosen = (np.asarray(examples)[:, None] * self.group + np.arange(self.group)).reshape(-1)
        batch = pad_sequences(
            [self.sequences[index] for index in chosen.tolist()], rows, seq_len, tokenizer.pad_id,
            last_position=last_position,
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


CPU_PROGRAM_FLOPS, PROGRAM_FLOPS = 3e11, 1e15
"""Model FLOPs that devices compute in the time in which the step is compiled for one more padded length.

Two CPU cores compile for two to three seconds, an accelerator's compiler for some ten. They are constants, and not
measured, so that a run has the same batches on every machine.
"""


@dataclass
class BatchOrder:
    """Maps a step to the examples of its batch: a pure function of (encoded examples, config, step).

    `flops` are the model FLOPs of a row in training, by its padded length, and `platform` is that of the devices. For
    `last_position` see `EncodedExamples.batch`.
    """

    encoded: EncodedExamples
    config: FinetuneConfig
    flops: Callable[[int], float]
    platform: str
    last_position: bool = False

    def __post_init__(self) -> None:
        self._lengths = self.encoded.lengths()
        self.steps_an_epoch = -(-len(self.encoded) // self.config.global_batch_size)
        self.total_steps = self.config.num_epochs * self.steps_an_epoch
        self._epochs: dict[int, list[np.ndarray]] = {}
        self._seen = 0, 0, 0  # steps, and their tokens and examples
        assert self.encoded.labels is not None
        parts = [key_from(*sequence.input_ids, sequence.first_length) for sequence in self.encoded.sequences]
        labels = [np.asarray(label).tolist() for label in self.encoded.labels]
        self.hash = f"{key_from(*parts, *labels):016x}"  # equal for equal training data

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """The padded lengths: the same for all seeds, so that the runs of a search share programs."""
        batches = epoch_of_batches(
            self.encoded, self.config.global_batch_size, 0, 0, window=self.config.data.sort_window
        )  # fmt: skip
        rows = self.config.num_epochs * self.config.global_batch_size * self.encoded.group
        return choose_lengths(
            [*(int(self._lengths[batch].max()) for batch in batches), int(self._lengths.max())],
            self.config.task.max_seq_len, lambda length: rows * self.flops(length),
            CPU_PROGRAM_FLOPS if self.platform == "cpu" else PROGRAM_FLOPS,
        )  # fmt: skip

    def examples(self, step: int) -> np.ndarray:
        """Returns the indices (int64) of the examples of the batch that follows `step` steps."""
        epoch, place = divmod(step, self.steps_an_epoch)
        epochs = self._epochs  # another thread may replace it
        if epoch not in epochs:
            batches = epoch_of_batches(
                self.encoded, self.config.global_batch_size, self.config.seed, epoch,
                window=self.config.data.sort_window,
            )  # fmt: skip
            self._epochs = epochs = {**dict(list(epochs.items())[-1:]), epoch: batches}
        return epochs[epoch][place]

    def seq_len(self, step: int) -> int:
        """Returns the padded length, in tokens, of that batch."""
        longest = int(self._lengths[self.examples(step)].max())
        return padded_length(longest, self.config.task.max_seq_len, self.lengths)

    def count_seen(self, step: int) -> dict[str, int]:
        """Returns `tokens_seen`, with padding, and `examples_seen` after `step` steps."""
        done, tokens, examples = self._seen if self._seen[0] <= step else (0, 0, 0)
        for number in range(done, step):
            tokens += self.config.global_batch_size * self.encoded.group * self.seq_len(number)
            examples += len(self.examples(number))
        self._seen = step, tokens, examples
        return {"tokens_seen": tokens, "examples_seen": examples}

    def batch(self, step: int, rows: np.ndarray, tokenizer: Tokenizer) -> HostBatch:
        """Returns the rows `rows` of that batch: the part of one process."""
        batch = self.encoded.batch(
            self.examples(step), self.seq_len(step), self.config.global_batch_size, tokenizer,
            last_position=self.last_position,
        )  # fmt: skip
        return map_arrays(lambda entry: entry[rows], batch)


def work_of_steps(model: BertConfig, head: TaskHead, order: BatchOrder) -> Callable[[int], StepWork]:
    """Maps a step to its work, which depends on the padded length of its batch."""

    def step_work(step: int) -> StepWork:
        examples, seq_len = order.examples(step - 1), order.seq_len(step - 1)
        rows = order.config.global_batch_size * order.encoded.group
        flops = rows * finetuning_flops(model, head, seq_len)
        return StepWork(float(len(examples)), float(rows * seq_len), flops)

    return step_work
