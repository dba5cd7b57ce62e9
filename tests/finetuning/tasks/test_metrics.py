"""Metrics, against scikit-learn; correlations are SciPy's."""

import warnings

import numpy as np
import pytest

from bert_jax.finetuning.tasks import text as metrics


def random_classes(seed: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    count = rng.integers(1, 40)
    labels = rng.integers(0, classes, count)
    return labels, np.where(rng.random(count) < 0.5, labels, rng.integers(0, classes, count))


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_classification_is_scikit_learns(classes: int):
    sklearn = pytest.importorskip("sklearn.metrics")
    for seed in range(30):
        y, p = random_classes(seed, classes)
        assert metrics.accuracy(y, p) == pytest.approx(sklearn.accuracy_score(y, p), abs=1e-12)
        with warnings.catch_warnings(action="ignore"):
            if classes == 2:
                expected = sklearn.matthews_corrcoef(y, p)
                assert metrics.METRICS["matthews"](y, p) == pytest.approx(expected, abs=1e-12)
                for label in (0, 1):
                    expected = sklearn.f1_score(y, p, pos_label=label, zero_division=0)
                    assert metrics.f1(y, p, label) == pytest.approx(expected, abs=1e-12)
            macro = sklearn.f1_score(y, p, average="macro", zero_division=0)
            assert metrics.f1_macro(y, p) == pytest.approx(macro, abs=1e-12)


def test_by_hand():
    labels, predictions = [1, 1, 0, 0], [1, 0, 1, 0]
    assert metrics.compute_metrics(["accuracy", "f1"], labels, predictions) == {"accuracy": 0.5, "f1": 0.5}
    scores = metrics.compute_metrics(["pearson", "spearman", "matthews"], [1, 2, 3, 4], [1, 4, 9, 16])
    assert scores == {"pearson": pytest.approx(0.984, abs=1e-3), "spearman": 1.0, "matthews": scores["pearson"]}


@pytest.mark.parametrize("name", ["matthews", "pearson", "spearman"])
def test_correlations_without_an_answer_are_zero(name: str):
    metric = metrics.METRICS[name]
    for constant in ([0, 0, 0], [1.5], [0.1, 0.1, 0.1]):
        assert metric(constant, constant) == 0.0
    # Their mean is not quite 0.1 in floating point: what is left over is no answer.
    assert metric([0.1, 0.1, 0.1], [0.1, 0.3, 0.7]) == metric([0.1, 0.3, 0.7], [0.1, 0.1, 0.1]) == 0.0
