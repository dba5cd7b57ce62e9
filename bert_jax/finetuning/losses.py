"""What fine-tuning minimises, for each kind of head: the paper's losses, as sums over rows."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.model.task_heads import TaskHead
from bert_jax.training.objectives import Objective, Sums, weighted_cross_entropy

Batch = Mapping[str, jax.Array]


def task_objective(head: TaskHead) -> Objective:
    """The loss of a head, in nats (of `regress`, the square of the error), and its accuracy where it has one.

    Beside what the model reads a batch has `weights` fp32 [B], 0 for rows that fill it up, and `labels`: int32 [B] of
    `classify`; fp32 [B] of `regress`; of `choose` int32 [B], 1 for the row that is right of the `size` neighbours that
    are an example; of `span` int32 [B, 2], first and last token; of `tag` int32 [B, L], -1 for tokens without one.
    """
    sums = {"classify": _classify, "regress": _regress, "choose": _choose, "span": _span, "tag": _tag}[head.kind]

    def of_rows(model: Any, batch: Batch, keys: jax.Array | None) -> Sums:
        return sums(head, model(batch, keys), batch)

    def denominators(batch: Batch) -> Sums:
        if head.kind == "tag":
            count = _tag_weights(batch).sum()
        else:
            count = batch["weights"].sum() / (head.size if head.kind == "choose" else 1)
        return {"loss": count} if head.kind == "regress" else {"loss": count, "accuracy": count}

    return Objective(of_rows, denominators, ("loss",))


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
    logits = jnp.where(batch["sequence_ids"][..., None] > 0, outputs, -jnp.inf)  # no answer lies in padding
    ends = [weighted_cross_entropy(logits[..., i], batch["labels"][:, i], batch["weights"])[0] for i in range(2)]
    is_right = (logits.argmax(axis=1) == batch["labels"]).all(axis=-1)
    return {"loss": (ends[0] + ends[1]) / 2, "accuracy": (batch["weights"] * is_right).sum()}


def _tag(head: TaskHead, outputs: jax.Array, batch: Batch) -> Sums:
    loss, correct = weighted_cross_entropy(outputs, jnp.maximum(batch["labels"], 0), _tag_weights(batch))
    return {"loss": loss, "accuracy": correct}


def _tag_weights(batch: Batch) -> jax.Array:
    """fp32 [..., B, L]: 1 for tokens that are tagged in rows that count."""
    return batch["weights"][..., None] * (batch["labels"] >= 0)
