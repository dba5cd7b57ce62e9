"""Batched forward passes of a model over encoded examples, with one program per padded length and size of batches.

Fine-tuning's scores, `predict`, `features`, `fill-mask` and `bert_jax.load` run their models here.
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

from bert_jax.batch import Batch, map_arrays
from bert_jax.config_keys import MeshKeys
from bert_jax.errors import InputError
from bert_jax.finetuning.batches import EncodedExamples
from bert_jax.model import abstract_parameters
from bert_jax.model.bert import Parameters
from bert_jax.parallel.mesh import batch_mesh_axes, make_mesh, put_batch, rows_here
from bert_jax.parallel.sharding import make_forward_step, parameter_shardings
from bert_jax.text.sequences import LENGTHS, EncodedSequence, padded_length
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.checkpoints import Checkpoint

Forward = Callable[[Any, Batch[jax.Array]], jax.Array]
"""Maps a model and a batch to outputs [B, ...], or [B, L, ...] per token. Equal programs are shared by its identity."""


def run_model(model: Any, batch: Batch[jax.Array]) -> jax.Array:
    """Returns what the model returns."""
    result: jax.Array = model(batch)
    return result


def check_segments(segments: int, sequences: Sequence[EncodedSequence], where: str = "") -> None:
    """Raises InputError, which begins with `where`, for a pair if the model has one segment."""
    if segments < 2 and any(sequence.first_length < len(sequence.input_ids) for sequence in sequences):
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
        for.
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
