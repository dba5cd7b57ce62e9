"""Fine-tuning losses of the paper for each kind of head, as sums over rows."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.model.task_heads import TaskHead
from bert_jax.training.objectives import Objective, Sums, weighted_cross_entropy

Batch = Mapping[str, jax.Array]


def task_objective(head: TaskHead) -> Objective:
    """Returns the objective of a head: the loss in nats (`regress`: the squared error) and, but for it, the accuracy.

    Besides the model's inputs a batch has `weights` fp32 [B], 0 for padding rows, and `labels`. These are int32 [B] for
    `classify`, fp32 [B] for `regress`, int32 [B, 2] for `span` (first and last token) and int32 [B, L] for `tag`, with
    -1 for tokens without a tag. For `choose` they are int32 [B]: 1 for the correct one of the `size` adjacent rows of
    an example.
    """
    sums = {"classify": _classify, "regress": _regress, "choose": _choose, "span": _span, "tag": _tag}[head.kind]

    def row_sums(model: Any, batch: Batch, keys: jax.Array | None) -> Sums:
        return sums(head, model(batch, keys), batch)

    def denominators(batch: Batch) -> Sums:
        if head.kind == "tag":
            count = _tag_weights(batch).sum()
        else:
            count = batch["weights"].sum() / (head.size if head.kind == "choose" else 1)
        return {"loss": count} if head.kind == "regress" else {"loss": count, "accuracy": count}

    return Objective(row_sums, denominators, ("loss",))


def _classify(head: TaskHead, outputs: jax.Array, batch: Batch) -> Sums:
    loss, correct = weighted_cross_entropy(outputs, batch["labels"], batch["weights"])
    return {"loss": loss, "accuracy": correct}


def _regress(head: TaskHead, outputs: jax.Array, batch: Batch) -> Sums:
    return {"loss": (batch["weights"] * jnp.square(outputs[:, 0] - batch["labels"])).sum()}


def _choose(head: TaskHead, outputs: jax.Array, batch: Batch) -> Sums:
    scores, is_right, weights = (x.reshape(-1, head.size) for x in (outputs, batch["labels"], batch["weights"]))
    loss, correct = weighted_cross_entropy(scores, is_right.argmax(axis=-1), weights[:, 0])
    return {"loss": loss, "accuracy": correct}


def _span(head: TaskHead, outputs: jax.Array, batch: Batch) -> Sums:
    logits = jnp.where(batch["sequence_ids"][..., None] > 0, outputs, -jnp.inf)  # padding holds no answer
    ends = [weighted_cross_entropy(logits[..., i], batch["labels"][:, i], batch["weights"])[0] for i in range(2)]
    is_right = (logits.argmax(axis=1) == batch["labels"]).all(axis=-1)
    return {"loss": (ends[0] + ends[1]) / 2, "accuracy": (batch["weights"] * is_right).sum()}


def _tag(head: TaskHead, outputs: jax.Array, batch: Batch) -> Sums:
    loss, correct = weighted_cross_entropy(outputs, jnp.maximum(batch["labels"], 0), _tag_weights(batch))
    return {"loss": loss, "accuracy": correct}


def _tag_weights(batch: Batch) -> jax.Array:
    """Returns fp32 [..., B, L]: 1 for tagged tokens of rows that are not padding."""
    return batch["weights"][..., None] * (batch["labels"] >= 0)
