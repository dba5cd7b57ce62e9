"""Weights of the classes in the training loss: `task.class_weights`."""

import ast
from collections.abc import Mapping, Sequence

import numpy as np

from bert_jax.errors import InputError

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
        _by_label(setting, labels)


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
    given = _by_label(setting, labels)
    weights = tuple(float(given.get(label, 1.0)) for label in labels)
    if not any(weight and count for weight, count in zip(weights, counts, strict=True)):
        raise InputError(f"{_KEY}={setting:.80}: every class of task.train has the weight 0; give one a weight of 1.0")
    return weights


def _by_label(setting: str, labels: Sequence[str]) -> Mapping[str, float]:
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
