"""Fine-tuning losses of the paper for each kind of head, as sums over rows, and the weights of classes in them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.model.task_heads import TaskHead
from bert_jax.training.objectives import Objective, Sums, weighted_cross_entropy


def task_objective(head: TaskHead, class_weights: Sequence[float] = ()) -> Objective:
    """Returns the objective of a head: the loss in nats (`regress`: the squared error) and, but for it, the accuracy.

    It reads `Batch.weights` and `Batch.labels`. With `class_weights`, of `classify` and `tag`, the loss is the mean
    weighted by that of each label's class, as that of torch's `CrossEntropyLoss(weight=...)`; the accuracy is not.
    """
    sums = {"classify": _classify, "regress": _regress, "choose": _choose, "span": _span, "tag": _classify}[head.kind]

    def row_sums(model: Any, batch: Batch[jax.Array], keys: jax.Array | None) -> Sums:
        outputs = model(batch, keys)
        found = sums(head, outputs, batch)
        if class_weights:
            labels, weights = _labels_and_weights(head, batch)
            found["loss"] = weighted_cross_entropy(outputs, labels, _by_class(class_weights, labels, weights))[0]
        return found

    def denominators(batch: Batch[jax.Array]) -> Sums:
        if head.kind == "tag":
            count = _tag_weights(batch).sum()
        else:
            count = batch["weights"].sum() / (head.size if head.kind == "choose" else 1)
        if head.kind == "regress":
            return {"loss": count}
        weighted = _by_class(class_weights, *_labels_and_weights(head, batch)).sum() if class_weights else count
        return {"loss": weighted, "accuracy": count}

    return Objective(row_sums, denominators, {"loss": 1.0})


def _labels_and_weights(head: TaskHead, batch: Batch[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns class numbers, int32, and weights, fp32, of the rows of `classify` or of the tokens of `tag`."""
    if head.kind == "tag":
        return jnp.maximum(batch["labels"], 0), _tag_weights(batch)
    return batch["labels"], batch["weights"]


def _by_class(class_weights: Sequence[float], labels: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the product of `weights` and the weight of each label's class, fp32 [...]."""
    return weights * jnp.asarray(class_weights, jnp.float32)[labels]


def _classify(head: TaskHead, outputs: jax.Array, batch: Batch[jax.Array]) -> Sums:
    loss, correct = weighted_cross_entropy(outputs, *_labels_and_weights(head, batch))
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


def _tag_weights(batch: Batch[jax.Array]) -> jax.Array:
    """Returns fp32 [..., B, L]: 1 for tagged tokens of rows that are not padding."""
    return batch["weights"][..., None] * (batch["labels"] >= 0)


def balanced_weights(size: int, labels: np.ndarray | Sequence[np.ndarray]) -> tuple[float, ...]:
    """Returns the weight of each of `size` classes by its number: n / (k * n_c), as in scikit-learn's "balanced".

    Of n examples n_c are of class c, and k classes occur; one that does not occur has the weight 1. `labels` are class
    numbers of the training split, [N], or of its tokens, [T] by sequence, -1 for none.
    """
    numbers = np.concatenate([np.ravel(example) for example in labels])
    counts = np.bincount(numbers[numbers >= 0], minlength=size)
    occurring = np.count_nonzero(counts)
    return tuple(float(counts.sum() / (occurring * count)) if count else 1.0 for count in counts)
