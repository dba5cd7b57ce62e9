"""Encoded examples: the batches of a training split, and forward passes of a model over all examples of a split.

Fine-tuning's texts are short compared with the 512 tokens that a model reads. A batch is padded to the smallest of some
fixed lengths that holds its longest sequence, so that one step is compiled per length. Sorting by length puts examples
of similar length into one batch. Scores, `predict`, `features`, `fill-mask` and `bert_jax.load` run their models here.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from bert_jax.batch import Batch, HostBatch, map_arrays
from bert_jax.config_keys import FinetuneConfig, MeshKeys
from bert_jax.data.hashing import key_from
from bert_jax.errors import BertJaxError, InputError
from bert_jax.model import abstract_parameters
from bert_jax.model.bert import Parameters
from bert_jax.parallel.mesh import batch_mesh_axes, make_mesh, put_batch, rows_here
from bert_jax.parallel.sharding import make_forward_step, parameter_shardings
from bert_jax.text.sequences import LENGTHS, EncodedSequence, choose_lengths, pad_sequences, padded_length
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.tracking.throughput import StepWork
from bert_jax.training.checkpoints import Checkpoint


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
        return tokens.reshape(-1, self.group).max(axis=1)

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
        self._rows = self.config.global_batch_size * self.encoded.group
        self._epochs: dict[int, list[np.ndarray]] = {}
        self._seen = 0, 0, 0  # steps, and their tokens and examples
        assert self.encoded.labels is not None
        parts = [key_from(*sequence.input_ids, sequence.first_length) for sequence in self.encoded.sequences]
        labels = [np.asarray(label).tolist() for label in self.encoded.labels]
        self.hash = f"{key_from(*parts, *labels):016x}"  # equal for equal training data

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """The padded lengths: the same for all seeds, so that the runs of a search share programs."""
        rows = self.config.num_epochs * self._rows
        return choose_lengths(
            [*(int(self._lengths[batch].max()) for batch in self._epoch(0, 0)), int(self._lengths.max())],
            self.config.task.max_seq_len, lambda length: rows * self.flops(length),
            CPU_PROGRAM_FLOPS if self.platform == "cpu" else PROGRAM_FLOPS,
        )  # fmt: skip

    def examples(self, step: int) -> np.ndarray:
        """Returns the indices (int64) of the examples of the batch that follows `step` steps."""
        epoch, place = divmod(step, self.steps_an_epoch)
        epochs = self._epochs  # another thread may replace it
        if epoch not in epochs:
            self._epochs = epochs = {**dict(list(epochs.items())[-1:]), epoch: self._epoch(self.config.seed, epoch)}
        return epochs[epoch][place]

    def _epoch(self, seed: int, epoch: int) -> list[np.ndarray]:
        return epoch_of_batches(
            self.encoded, self.config.global_batch_size, seed, epoch, window=self.config.data.sort_window
        )  # fmt: skip

    def seq_len(self, step: int) -> int:
        """Returns the padded length, in tokens, of that batch."""
        longest = int(self._lengths[self.examples(step)].max())
        return padded_length(longest, self.config.task.max_seq_len, self.lengths)

    def count_seen(self, step: int) -> dict[str, int]:
        """Returns `tokens_seen`, with padding, and `examples_seen` after `step` steps."""
        done, tokens, examples = self._seen if self._seen[0] <= step else (0, 0, 0)
        for number in range(done, step):
            tokens += self._rows * self.seq_len(number)
            examples += len(self.examples(number))
        self._seen = step, tokens, examples
        return {"tokens_seen": tokens, "examples_seen": examples}

    def work(self, step: int) -> StepWork:
        """Returns the work of a step, which depends on the padded length of its batch."""
        examples, seq_len = self.examples(step - 1), self.seq_len(step - 1)
        return StepWork(float(len(examples)), float(self._rows * seq_len), self._rows * self.flops(seq_len))

    def batch(self, step: int, rows: np.ndarray, tokenizer: Tokenizer) -> HostBatch:
        """Returns the rows `rows` of that batch: the part of one process."""
        batch = self.encoded.batch(
            self.examples(step), self.seq_len(step), self.config.global_batch_size, tokenizer,
            last_position=self.last_position,
        )  # fmt: skip
        return map_arrays(lambda entry: entry[rows], batch)


# --- Forward passes ---------------------------------------------------------------------------------------------------


Forward = Callable[[Any, Batch[jax.Array]], jax.Array]
"""Maps a model and a batch to outputs [B, ...], or [B, L, ...] per token. Equal programs are shared by its identity."""


def run_model(model: Any, batch: Batch[jax.Array]) -> jax.Array:
    """Returns what the model returns."""
    return model(batch)


def check_segments(segments: int, sequences: Sequence[EncodedSequence], where: str = "") -> None:
    """Raises InputError, which begins with `where`, for a pair if the model has one segment."""
    if segments == 1 and any(sequence.first_length < len(sequence.input_ids) for sequence in sequences):
        raise InputError(
            f"{where}got a pair, but the model has no second segment (type_vocab_size=1); give single texts"
        )


@dataclass(frozen=True)
class Predictor:
    """Runs a model on examples sorted by length, and returns the outputs of each example in the original order.

    Attributes:
      mesh: the devices, which divide `batch_size` examples.
      graph: the model without its parameters.
      shardings: those of the parameters.
      tokenizer: pads the batches.
      batch_size: examples per batch.
      max_seq_len: maximum tokens of a sequence.
      forward: computes the outputs.
      lengths: batches are padded to one of these, or else of `LENGTHS`.
      segments: the segments that the model has embeddings of.
      last_position: sequences are pooled from their last token; see `EncodedExamples.batch`.
    """

    mesh: Mesh
    graph: nnx.GraphDef[Any]
    shardings: Parameters
    tokenizer: Tokenizer
    batch_size: int
    max_seq_len: int
    forward: Forward = run_model
    lengths: Sequence[int] = LENGTHS
    segments: int = 2
    last_position: bool = False

    @functools.cached_property
    def _step(self) -> Callable[[Parameters, Batch[Any]], Any]:
        outputs = PartitionSpec(batch_mesh_axes(self.mesh))
        return make_forward_step(self.mesh, self.graph, self.shardings, self.forward, outputs)

    def batches(self, examples: EncodedExamples) -> int:
        """Returns the number of batches that `outputs` runs."""
        return -(-len(examples) // self._size_for(examples))

    def _size_for(self, examples: EncodedExamples) -> int:
        """Returns the size of batches: of few examples the next power of two, so that few programs are compiled."""
        few = 1 << max(0, len(examples) - 1).bit_length()
        return min(self.batch_size, -(-few // self.mesh.size) * self.mesh.size)

    def outputs(
        self, parameters: Parameters, examples: EncodedExamples, on_batch: Callable[[], Any] = lambda: None
    ) -> list[np.ndarray]:
        """Returns the outputs [...] of each example, [group] for `group` sequences, or [T, ...] for T tokens.

        Few examples are computed in a smaller batch. Raises InputError for a pair that the model has no second segment
        for, and BertJaxError for outputs that are not finite.
        """
        check_segments(self.segments, examples.sequences)
        outputs: list[Any] = [None] * len(examples)
        lengths, group = examples.lengths(), examples.group
        size = self._size_for(examples)
        rows = size * group
        here = rows_here(self.mesh, rows)
        by_length = np.argsort(lengths, kind="stable")
        for chosen in (by_length[start : start + size] for start in range(0, len(by_length), size)):
            seq_len = padded_length(int(lengths[chosen].max()), self.max_seq_len, self.lengths)
            batch = examples.batch(chosen, seq_len, size, self.tokenizer, last_position=self.last_position)
            batch.pop("labels", None)
            placed = put_batch(self.mesh, map_arrays(lambda entry: entry[here], batch), batch_size=rows)
            with jax.set_mesh(self.mesh):
                batch_outputs = jax.device_get(self._step(parameters, placed))
            for place, example in enumerate(chosen.tolist()):
                if batch_outputs.ndim > 2:
                    outputs[example] = batch_outputs[place, : lengths[example]]
                elif group > 1:
                    outputs[example] = batch_outputs[place * group : (place + 1) * group, 0]
                else:
                    outputs[example] = batch_outputs[place]
            on_batch()
        if not all(np.isfinite(output).all() for output in outputs):
            raise BertJaxError("the model's outputs are not finite: its parameters diverged or are damaged")
        return outputs


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint's parameters on devices, and what runs its model on them."""

    parameters: Parameters
    predictor: Predictor

    def outputs(self, examples: EncodedExamples, on_batch: Callable[[], Any] = lambda: None) -> list[np.ndarray]:
        """Returns the outputs of each example; see `Predictor.outputs`."""
        return self.predictor.outputs(self.parameters, examples, on_batch)


def load_model(
    found: Checkpoint, *, batch_size: int, max_seq_len: int, dtype: jnp.dtype | type = jnp.float32,
    devices: Sequence[jax.Device] | None = None, forward: Forward = run_model, **settings: Any,
) -> LoadedModel:  # fmt: skip
    """Loads the parameters of a checkpoint and replicates them on devices.

    Args:
      found: the checkpoint.
      batch_size: examples per batch, rounded up to a multiple of the number of devices.
      max_seq_len: maximum tokens of a sequence.
      dtype: the computation dtype.
      devices: the devices to run on; all by default.
      forward: computes the outputs.
      settings: model settings for `abstract_parameters`; by default pre-training with the present heads.
    """
    mesh = make_mesh(MeshKeys(), devices)
    graph, _, axes = abstract_parameters(found.bert_config, dtype=dtype, **(settings or {"heads": found.heads}))
    shardings = parameter_shardings(mesh, axes)
    parameters = found.load_parameters(shardings, **settings)
    predictor = Predictor(
        mesh, graph, shardings, found.tokenizer, -(-batch_size // mesh.size) * mesh.size, max_seq_len, forward,
        segments=found.bert_config.type_vocab_size, last_position=found.bert_config.is_decoder,
    )  # fmt: skip
    return LoadedModel(parameters, predictor)
