"""The batch: the arrays that loaders and encoders hand to the model, the losses and the metrics."""

from collections.abc import Callable
from typing import Any, Generic, TypedDict, TypeVar, cast

import numpy as np

Array = TypeVar("Array")


class Batch(TypedDict, Generic[Array], total=False):
    """Arrays of B rows: `np.ndarray` on the host, `jax.Array` on devices. A batch has the fields that its use needs.

    A row has L tokens, up to P predictions and up to K sequences; K = 1 without packing. A training step reads
    [A, B / A, ...]: A microbatches. The type is a dict, and so a pytree, because `data` does not know JAX.

    Attributes:
      input_ids: int32 [B, L]: masked where a token is predicted from [MASK]; [PAD] after the last sequence.
      token_type_ids: int32 [B, L]: 1 for the second segment of a sequence, else 0.
      positions: int32 [B, L]: the position of each token in its sequence, from 0.
      sequence_ids: int32 [B, L]: the number of each token's sequence in its row, from 1; 0 for padding.
      cls_positions: int32 [B, K]: the token that each sequence is pooled from: its [CLS]. In fine-tuning a
        left-to-right model, whose first token attends only to itself, it is the last token.
      masked_positions: int32 [B, P]: the positions in the row that the masked-LM head predicts.
      masked_ids: int32 [B, P]: the token to predict at each of `masked_positions`.
      masked_weights: float32 [B, P]: 1 for a prediction, 0 for an unused slot.
      next_sentence_labels: int32 [B, K]: 1 if the second segment is random, 0 if it follows the first.
      next_sentence_weights: float32 [B, K]: 1 for a pair, 0 for a single segment and for an unused slot.
      unigram_nats: float32 [B, P], in evaluation: the loss of each target under the unigram baseline, in nats.
      weights: float32 [B], in fine-tuning: 0 for a padding row, else 1.
      labels: by the kind of the task's head. `classify`: int32 [B]. `regress`: float32 [B]. `span`: int32 [B, 2], first
        and last token. `tag`: int32 [B, L], -1 for a token without a tag. `choose`: int32 [B], 1 for the correct one of
        the adjacent rows of an example.
      stop: int32 [devices]: 1 on those of a process that received SIGTERM or SIGINT. The metric is its maximum, so that
        all processes stop at the same step.
    """

    input_ids: Array
    token_type_ids: Array
    positions: Array
    sequence_ids: Array
    cls_positions: Array
    masked_positions: Array
    masked_ids: Array
    masked_weights: Array
    next_sentence_labels: Array
    next_sentence_weights: Array
    unigram_nats: Array
    weights: Array
    labels: Array
    stop: Array


HostBatch = Batch[np.ndarray]


def map_arrays(function: Callable[..., Any], *batches: Batch[Any]) -> Batch[Any]:
    """Applies `function` to each field: to its arrays in all `batches`, which have the same fields."""
    fields = cast(tuple[dict[str, Any], ...], batches)
    mapped = {name: function(*(batch[name] for batch in fields)) for name in fields[0]}
    return cast(Batch[Any], mapped)


def pretraining_shapes(
    rows: int, seq_len: int, predictions: int, sequences: int
) -> Batch[tuple[tuple[int, ...], type]]:
    """Returns shape and dtype of each array of a pre-training batch, for B, L, P and K."""
    tokens, targets, pooled = (rows, seq_len), (rows, predictions), (rows, sequences)
    return {
        "input_ids": (tokens, np.int32), "token_type_ids": (tokens, np.int32), "positions": (tokens, np.int32),
        "sequence_ids": (tokens, np.int32),
        "masked_positions": (targets, np.int32), "masked_ids": (targets, np.int32),
        "masked_weights": (targets, np.float32),
        "cls_positions": (pooled, np.int32), "next_sentence_labels": (pooled, np.int32),
        "next_sentence_weights": (pooled, np.float32),
    }  # fmt: skip
