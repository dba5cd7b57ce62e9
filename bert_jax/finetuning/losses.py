"""Fine-tuning losses of the paper for each kind of head, as sums over rows, and the weights of classes in them."""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.errors import InputError
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


# --- Weights of classes -----------------------------------------------------------------------------------------------

BALANCED = "balanced"
_KEY = "task.class_weights"
_SHOWN_LABELS = 20  # maximum in an error
_LEAST, _MOST = 1e-6, 1e6  # products with losses and gradients stay in the range of float32


def check_class_weights(setting: str, labels: Sequence[str]) -> None:
    """Raises InputError if `setting` is not valid for a task with these labels, none if it does not classify."""
    if setting and not labels:
        raise InputError(
            f"{_KEY}={setting:.80}: the task has no classes, and its loss no class weights; expected an empty value"
        )
    if setting and setting != BALANCED:
        _weights_by_label(setting, labels)


def class_weights(
    setting: str, labels: Sequence[str], examples: np.ndarray | Sequence[np.ndarray]
) -> tuple[float, ...]:
    """Returns the weight of each class, by its number; () for an empty setting.

    "balanced" gives class c the weight n / (k * n_c), as scikit-learn does: n examples, n_c of them of class c, and k
    classes that occur. A class that does not occur has 1.

    Args:
      setting: "", "balanced", or a dict as text: weights by label. Labels that it lacks have the weight 1.
      labels: the label names by class number.
      examples: class numbers of the training split, [N], or of its tokens, [T] by sequence, -1 for none.

    Raises:
      InputError: an unknown label, an invalid weight, or only weights of 0 for the classes that occur.
    """
    check_class_weights(setting, labels)
    if not setting:
        return ()
    numbers = np.concatenate([np.ravel(example) for example in examples])
    counts = np.bincount(numbers[numbers >= 0], minlength=len(labels))
    if setting == BALANCED:
        occurring = np.count_nonzero(counts)
        return tuple(float(counts.sum() / (occurring * count)) if count else 1.0 for count in counts)
    given = _weights_by_label(setting, labels)
    weights = tuple(float(given.get(label, 1.0)) for label in labels)
    if not any(weight and count for weight, count in zip(weights, counts, strict=True)):
        raise InputError(f"{_KEY}={setting:.80}: every class of task.train has the weight 0; give one a weight of 1.0")
    return weights


def _weights_by_label(setting: str, labels: Sequence[str]) -> Mapping[str, float]:
    try:
        given = ast.literal_eval(setting)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        given = None
    if not isinstance(given, dict) or not given:
        raise InputError(f"{_KEY}={setting:.80}: expected {BALANCED}, or weights by label such as {_example(labels)}")
    for label, weight in given.items():
        if label not in labels:
            raise InputError(f"{_KEY}: unknown label {label!r}; expected one of {_listed(labels)}")
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not (weight == 0 or _LEAST <= weight <= _MOST):
            raise InputError(
                f"{_KEY}: weight of {label!r}: expected 0 or a number from {_LEAST} to {_MOST}, got {weight!r:.40}"
            )
    return given


def _example(labels: Sequence[str]) -> str:
    return repr({label: float(number + 1) for number, label in enumerate(labels[:2])})


def _listed(labels: Sequence[str]) -> str:
    shown = ", ".join(repr(label) for label in labels[:_SHOWN_LABELS])
    return shown + (f" and {len(labels) - _SHOWN_LABELS} others" if len(labels) > _SHOWN_LABELS else "")
