"""Classification and regression metrics, equal to those of scikit-learn and SciPy.

Where those are undefined - no example, a single class, constant scores - the metric is 0.0.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike


def accuracy(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Returns the share of correct predictions. Both are [N]."""
    y, p = _both(labels, predictions)
    return float(np.mean(y == p)) if len(y) else 0.0


def f1(labels: ArrayLike, predictions: ArrayLike, positive: int = 1) -> float:
    """Returns the F1 of the positive class: 2 TP / (2 TP + FP + FN). Both are [N]."""
    y, p = _both(labels, predictions)
    positives = int(np.sum(y == positive) + np.sum(p == positive))
    return 2 * int(np.sum((y == positive) & (p == positive))) / positives if positives else 0.0


def f1_macro(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Returns the mean F1 of the classes that occur as labels or predictions. Both are [N]."""
    y, p = _both(labels, predictions)
    classes = np.union1d(y, p)
    return sum(f1(y, p, one) for one in classes) / len(classes) if len(classes) else 0.0


def matthews(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Returns Matthews' correlation for any number of classes (Gorodkin's R_K); both are [N] integers."""
    y, p = _both(labels, predictions)
    classes, numbers = np.unique(np.concatenate([y, p]), return_inverse=True)
    confusion = np.zeros((len(classes), len(classes)))
    np.add.at(confusion, (numbers[: len(y)], numbers[len(y) :]), 1)
    true, predicted, total = confusion.sum(1), confusion.sum(0), confusion.sum()
    covariance = np.trace(confusion) * total - true @ predicted
    spread = (total**2 - true @ true) * (total**2 - predicted @ predicted)
    return float(covariance / np.sqrt(spread)) if spread > 0 else 0.0


def pearson(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Returns Pearson's correlation; both are [N] numbers."""
    y, p = _both(labels, predictions)
    if len(y) < 2 or np.all(y == y[0]) or np.all(p == p[0]):
        return 0.0
    y, p = y - np.mean(y, dtype=np.float64), p - np.mean(p, dtype=np.float64)
    spread = np.linalg.norm(y) * np.linalg.norm(p)
    return float(np.clip(y @ p / spread, -1.0, 1.0)) if spread > 0 else 0.0


def spearman(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Returns Spearman's correlation: Pearson's of the ranks, with ties averaged; both are [N] numbers."""
    y, p = _both(labels, predictions)
    return pearson(_ranks(y), _ranks(p))


METRICS: dict[str, Callable[[ArrayLike, ArrayLike], float]] = {
    "accuracy": accuracy, "f1": f1, "f1_macro": f1_macro, "matthews": matthews, "pearson": pearson,
    "spearman": spearman,
}  # fmt: skip
"""Metrics by name; each takes labels, then predictions."""


def compute(
    names: Iterable[str], labels: Sequence[float], predictions: ArrayLike, *, positive: int = 1
) -> dict[str, float]:
    """Computes the named metrics, each in [-1, 1] and not in percent.

    Args:
      names: keys of METRICS.
      labels: [N] class numbers, or scores.
      predictions: [N], the same.
      positive: the positive class of `f1`.
    """
    return {
        name: f1(labels, predictions, positive) if name == "f1" else METRICS[name](labels, predictions)
        for name in names
    }


def _both(labels: ArrayLike, predictions: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    y, p = np.asarray(labels), np.asarray(predictions)
    if y.shape != p.shape or y.ndim != 1:
        raise ValueError(f"labels {y.shape} and predictions {p.shape}: expected both of shape [N]")
    return y, p


def _ranks(values: np.ndarray) -> np.ndarray:
    _, numbers, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[numbers]
