"""Batched inference of a fine-tuned model: the outputs of each example."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from bert_jax.finetuning.inputs.batching import Rows, in_order, padded_length
from bert_jax.model.bert import Parameters
from bert_jax.parallel.host_batches import put_batch, rows_here
from bert_jax.parallel.sharding import batch_mesh_axes, make_forward_step
from bert_jax.text.tokenization import WordPieceTokenizer


def make_predict_step(
    mesh: Mesh, graph: nnx.GraphDef, shardings: Parameters
) -> Callable[[Parameters, Mapping[str, Any]], jax.Array]:
    """Returns the jitted `(parameters, batch) -> outputs` of a batch [1, B, ...]; outputs are replicated."""
    sharded = PartitionSpec(batch_mesh_axes(mesh))
    return make_forward_step(mesh, graph, shardings, lambda model, rows: model(rows), sharded)


class Predictor:
    """Runs the model on rows sorted by length, and returns the outputs of each example in the original order."""

    def __init__(
        self, mesh: Mesh, graph: nnx.GraphDef, shardings: Parameters, tokenizer: WordPieceTokenizer, *,
        batch_size: int, max_seq_len: int,
    ):  # fmt: skip
        """Builds the predict step. The devices divide `batch_size` examples; rows have at most `max_seq_len` tokens."""
        self._mesh, self._tokenizer = mesh, tokenizer
        self._step = make_predict_step(mesh, graph, shardings)
        self._batch_size, self._max_seq_len = batch_size, max_seq_len

    def run(self, parameters: Parameters, rows: Rows, on_batch: Callable[[], Any] = lambda: None) -> list[np.ndarray]:
        """Returns fp32 outputs by example: [outputs], [group] for `group` rows, or [T, outputs] for T tokens."""
        outputs: list[Any] = [None] * len(rows)
        lengths = rows.lengths()
        total = self._batch_size * rows.group
        here = rows_here(self._mesh, total)
        for examples in in_order(rows, self._batch_size):
            seq_len = padded_length(int(lengths[examples].max()), self._max_seq_len)
            batch = rows.lay_out(examples, seq_len, self._batch_size, self._tokenizer)
            batch.pop("labels", None)
            placed = put_batch(
                self._mesh, {name: entry[here] for name, entry in batch.items()}, batch_size=total
            )  # fmt: skip
            batch_outputs = jax.device_get(self._step(parameters, placed))
            is_per_token = batch_outputs.ndim == 3
            for place, example in enumerate(examples.tolist()):
                if is_per_token:
                    outputs[example] = batch_outputs[place, : lengths[example]]
                elif rows.group > 1:
                    outputs[example] = batch_outputs[place * rows.group : (place + 1) * rows.group, 0]
                else:
                    outputs[example] = batch_outputs[place]
            on_batch()
        return outputs
