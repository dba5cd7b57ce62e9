"""Fine-tuning losses of the paper for each kind of head, as sums over rows."""

from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.batch import Batch
from bert_jax.model.task_heads import TaskHead
from bert_jax.training.objectives import Objective, Sums, weighted_cross_entropy


def task_objective(head: TaskHead) -> Objective:
    """Returns the objective of a head: the loss in nats (`regress`: the squared error) and, but for it, the accuracy.

    It reads `Batch.weights` and `Batch.labels`.
    """
    sums = {"classify": _classify, "regress": _regress, "choose": _choose, "span": _span, "tag": _tag}[head.kind]

    def row_sums(model: Any, batch: Batch[jax.Array], keys: jax.Array | None) -> Sums:
        return sums(head, model(batch, keys), batch)

    def denominators(batch: Batch[jax.Array]) -> Sums:
        if head.kind == "tag":
            count = _tag_weights(batch).sum()
        else:
            count = batch["weights"].sum() / (head.size if head.kind == "choose" else 1)
        return {"loss": count} if head.kind == "regress" else {"loss": count, "accuracy": count}

    return Objective(row_sums, denominators, {"loss": 1.0})


def _classify(head: TaskHead, outputs: jax.Array, batch: Batch[jax.Array]) -> Sums:
    loss, correct = weighted_cross_entropy(outputs, batch["labels"], batch["weights"])
    return {"loss": loss, "accuracy": correct}


def _regress(head: TaskHead, outputs: jax.Array, batch: Batch[jax.Array]) -> Sums:
    return {"loss": (batch["weights"] * jnp.square(outputs[:, 0] - batch["labels"])).sum()}


def _choose(head: TaskHead, outputs: jax.Array, batch: Batch[jax.Array]) -> Sums:
    scores, is_right, weights = (x.reshape(-1, head.size) for x in (outputs, batch["labels"], batch["weights"]))
    loss, correct = weighted_cross_entropy(scores, is_right.argmax(axis=-1), weights[:, 0])
    return {"loss": loss, "accuracy": correct}


def _span(head: TaskHead, outputs: jax.Array, batch: Batch[jax.Array]) -> Sums:
    logits = jnp.where(batch["sequence_ids"][..., None] > 0, outputs, -jnp.inf)  # padding holds no answer
    ends = [weighted_cross_entropy(logits[..., i], batch["labels"][:, i], batch["weights"])[0] for i in range(2)]
    is_right = (logits.argmax(axis=1) == batch["labels"]).all(axis=-1)
    return {"loss": (ends[0] + ends[1]) / 2, "accuracy": (batch["weights"] * is_right).sum()}


def _tag(head: TaskHead, outputs: jax.Array, batch: Batch[jax.Array]) -> Sums:
    loss, correct = weighted_cross_entropy(outputs, jnp.maximum(batch["labels"], 0), _tag_weights(batch))
    return {"loss": loss, "accuracy": correct}


def _tag_weights(batch: Batch[jax.Array]) -> jax.Array:
    """Returns fp32 [..., B, L]: 1 for tagged tokens of rows that are not padding."""
    return batch["weights"][..., None] * (batch["labels"] >= 0)
