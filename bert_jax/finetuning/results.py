"""Scores of a fine-tuning run: metrics, and `result.json`.

Metrics equal those of scikit-learn and SciPy. Where those are undefined - no example, a single class, constant scores -
the metric is 0.0.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from numpy.typing import ArrayLike

from bert_jax.files.atomic import read_json
from bert_jax.finetuning.task import Split, Task

RESULT_FILE = "result.json"
RESULT_VERSION = 1
PREDICTIONS = "predictions"

# --- Metrics ----------------------------------------------------------------------------------------------------------


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


def compute_metrics(names: Iterable[str], labels: Sequence[float], predictions: ArrayLike) -> dict[str, float]:
    """Computes the metrics with the given names in METRICS, each in [-1, 1] and not in percent.

    `labels` and `predictions` are [N] class numbers, or scores.
    """
    return {name: METRICS[name](labels, predictions) for name in names}


def _both(labels: ArrayLike, predictions: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(labels), np.asarray(predictions)


def _ranks(values: np.ndarray) -> np.ndarray:
    _, numbers, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[numbers]


# --- Results ----------------------------------------------------------------------------------------------------------


def describe_result(
    task: Task, splits: Sequence[Split], step: int, scores: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Returns the contents of `result.json`.

    Keys: `format_version`, `task`, `main_metric`, `step`, `scores` by split, and `rows`: for each scored split the
    numbers `scored` and `left_out` (skipped).
    """
    rows = {
        split.name: {"scored": len(split.examples), "left_out": split.left_out}
        for split in splits if split.name in scores
    }  # fmt: skip
    return {
        "format_version": RESULT_VERSION, "task": task.name, "main_metric": task.metrics[0], "step": step,
        "scores": dict(scores), "rows": rows,
    }  # fmt: skip


def read_result(path: epath.Path) -> dict[str, Any]:
    """Reads `result.json` at `path`. Raises InputError for a damaged file or a newer version."""
    return read_json(path, RESULT_VERSION)
