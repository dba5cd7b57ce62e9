"""Order of batches in fine-tuning: which examples a step trains on, and how long its rows are."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bert_jax.batch import HostBatch, map_arrays
from bert_jax.config_keys import FinetuneConfig
from bert_jax.data.hashing import key_from
from bert_jax.errors import InputError
from bert_jax.finetuning.inputs.batching import EncodedExamples, epoch_of_batches
from bert_jax.model import BertConfig
from bert_jax.model.task_heads import TaskHead
from bert_jax.text.sequences import LENGTHS, choose_lengths, padded_length
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.tracking.flops import finetuning_flops
from bert_jax.tracking.throughput import StepWork

CPU_PROGRAM_FLOPS, PROGRAM_FLOPS = 3e11, 1e15
"""Model FLOPs that devices compute in the time in which the step is compiled for one more padded length.

Two CPU cores compile for two to three seconds, an accelerator's compiler for some ten. They are constants, and not
measured, so that a run has the same batches on every machine.
"""


@dataclass
class BatchOrder:
    """Maps a step to the examples of its batch: a pure function of (encoded examples, config, step).

    `flops` are the model FLOPs of a row in training, by its padded length, and `platform` is that of the devices.
    """

    encoded: EncodedExamples
    config: FinetuneConfig
    flops: Callable[[int], float]
    platform: str

    def __post_init__(self) -> None:
        if not len(self.encoded):
            raise InputError("task.train: expected at least 1 training example, got 0")
        self._lengths = self.encoded.lengths()
        self.steps_an_epoch = -(-len(self.encoded) // self.config.global_batch_size)
        self.total_steps = self.config.num_epochs * self.steps_an_epoch
        self._epochs: dict[int, list[np.ndarray]] = {}
        self._seen = 0, 0, 0  # steps, and their tokens and examples
        parts = [key_from(*sequence.input_ids, sequence.first_length) for sequence in self.encoded.sequences]
        labels = (
            [np.asarray(label).tolist() for label in self.encoded.labels] if self.encoded.labels is not None else []
        )
        self.hash = f"{key_from(*parts, *labels):016x}"  # equal for equal training data

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """The padded lengths: the same for all seeds, so that the runs of a search share programs."""
        if not self.config.data.choose_lengths:
            return LENGTHS
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
        batch = self.encoded.batch(self.examples(step), self.seq_len(step), self.config.global_batch_size, tokenizer)
        return map_arrays(lambda entry: entry[rows], batch)


def work_of_steps(model: BertConfig, head: TaskHead, order: BatchOrder) -> Callable[[int], StepWork]:
    """Maps a step to its work, which depends on the padded length of its batch."""

    def step_work(step: int) -> StepWork:
        examples, seq_len = order.examples(step - 1), order.seq_len(step - 1)
        rows = order.config.global_batch_size * order.encoded.group
        flops = rows * finetuning_flops(model, head, seq_len)
        return StepWork(float(len(examples)), float(rows * seq_len), flops)

    return step_work
