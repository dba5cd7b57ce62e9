"""Metrics of classification and regression, with the values that scikit-learn and SciPy give.

Where those have no answer - no example, one class alone, constant scores - the metric is 0.0.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike


def accuracy(labels: ArrayLike, predictions: ArrayLike) -> float:
    """The share of predictions that are right. Both are [N]."""
    y, p = _both(labels, predictions)
    return float(np.mean(y == p)) if len(y) else 0.0


def f1(labels: ArrayLike, predictions: ArrayLike, positive: int = 1) -> float:
    """F1 of the positive class: 2 TP / (2 TP + FP + FN). Both are [N]."""
    y, p = _both(labels, predictions)
    positives = int(np.sum(y == positive) + np.sum(p == positive))
    return 2 * int(np.sum((y == positive) & (p == positive))) / positives if positives else 0.0


def f1_macro(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Mean of the F1 of each class that is a label or a prediction. Both are [N]."""
    y, p = _both(labels, predictions)
    classes = np.union1d(y, p)
    return sum(f1(y, p, one) for one in classes) / len(classes) if len(classes) else 0.0


def matthews(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Matthews' correlation of any number of classes (Gorodkin's R_K); both are [N] whole numbers."""
    y, p = _both(labels, predictions)
    classes, numbers = np.unique(np.concatenate([y, p]), return_inverse=True)
    confusion = np.zeros((len(classes), len(classes)))
    np.add.at(confusion, (numbers[: len(y)], numbers[len(y) :]), 1)
    true, predicted, total = confusion.sum(1), confusion.sum(0), confusion.sum()
    covariance = np.trace(confusion) * total - true @ predicted
    spread = (total**2 - true @ true) * (total**2 - predicted @ predicted)
    return float(covariance / np.sqrt(spread)) if spread > 0 else 0.0


def pearson(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Pearson's correlation; both are [N] numbers."""
    y, p = _both(labels, predictions)
    if len(y) < 2 or np.all(y == y[0]) or np.all(p == p[0]):
        return 0.0
    y, p = y - np.mean(y, dtype=np.float64), p - np.mean(p, dtype=np.float64)
    spread = np.linalg.norm(y) * np.linalg.norm(p)
    return float(np.clip(y @ p / spread, -1.0, 1.0)) if spread > 0 else 0.0


def spearman(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Spearman's correlation: Pearson's of ranks, of which equal values have their mean; both are [N] numbers."""
    y, p = _both(labels, predictions)
    return pearson(_ranks(y), _ranks(p))


METRICS: dict[str, Callable[[ArrayLike, ArrayLike], float]] = {
    "accuracy": accuracy, "f1": f1, "f1_macro": f1_macro, "matthews": matthews, "pearson": pearson,
    "spearman": spearman,
}  # fmt: skip
"""By the names that tasks have for them; each takes labels, then predictions."""


def compute(
    names: Iterable[str], labels: Sequence[float], predictions: ArrayLike, *, positive: int = 1
) -> dict[str, float]:
    """The named metrics, each in [-1, 1] and not in percent.

    Args:
      names: of METRICS.
      labels: [N] numbers of classes, or scores.
      predictions: [N], the same.
      positive: the class that `f1` is of.
    """
    return {
        name: f1(labels, predictions, positive) if name == "f1" else METRICS[name](labels, predictions)
        for name in names
    }


def _both(labels: ArrayLike, predictions: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    y, p = np.asarray(labels), np.asarray(predictions)
    if y.shape != p.shape or y.ndim != 1:
        raise ValueError(f"labels are {y.shape} and predictions {p.shape}: both have to be [N]")
    return y, p


def _ranks(values: np.ndarray) -> np.ndarray:
    _, numbers, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[numbers]
