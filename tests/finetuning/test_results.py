"""Metrics, against scikit-learn and SciPy."""

import warnings

import numpy as np
import pytest

from bert_jax.finetuning import results as metrics


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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert metrics.matthews(y, p) == pytest.approx(sklearn.matthews_corrcoef(y, p), abs=1e-12)
            if classes == 2:
                for label in (0, 1):
                    expected = sklearn.f1_score(y, p, pos_label=label, zero_division=0)
                    assert metrics.f1(y, p, label) == pytest.approx(expected, abs=1e-12)
            macro = sklearn.f1_score(y, p, average="macro", zero_division=0)
            assert metrics.f1_macro(y, p) == pytest.approx(macro, abs=1e-12)


@pytest.mark.parametrize("ties", [True, False])
def test_correlations_are_scipys(ties: bool):
    stats = pytest.importorskip("scipy.stats")
    for seed in range(60):
        rng = np.random.default_rng(seed)
        y, p = rng.integers(0, 6, (2, 30)) / 5 if ties else rng.normal(size=(2, rng.integers(3, 50)), scale=1e6)
        assert metrics.pearson(y, p) == pytest.approx(stats.pearsonr(y, p)[0], abs=1e-9)
        assert metrics.spearman(y, p) == pytest.approx(stats.spearmanr(y, p)[0], abs=1e-9)


def test_by_hand():
    assert metrics.f1([1, 1, 0, 0], [1, 0, 1, 0]) == 0.5
    assert metrics.matthews([1, 1, 0, 0], [1, 1, 0, 0]) == 1.0
    assert metrics.matthews([1, 1, 0, 0], [0, 0, 1, 1]) == -1.0
    assert metrics.spearman([1, 2, 3, 4], [1, 4, 9, 16]) == pytest.approx(1.0)
    assert metrics.spearman([1, 1, 2], [3, 5, 4]) == pytest.approx(0.0)  # the ranks of the ties are 1.5 and 1.5
    assert metrics.compute_metrics(["accuracy", "f1"], [1, 0], [1, 1]) == {"accuracy": 0.5, "f1": pytest.approx(2 / 3)}


@pytest.mark.parametrize("name", sorted(metrics.METRICS))
def test_what_has_no_answer_is_zero(name: str):
    metric = metrics.METRICS[name]
    assert metric([], []) == 0.0
    assert metric([0, 1, 0, 1], [2, 2, 2, 2]) == 0.0
    if name not in ("accuracy", "f1_macro"):
        assert metric([0, 0, 0], [0, 0, 0]) == 0.0
    if name in ("pearson", "spearman"):
        assert metric([1.5], [1.5]) == 0.0
        # Their mean is not quite 0.1 in floating point: what is left over is no answer.
        assert metric([0.1, 0.1, 0.1], [0.1, 0.3, 0.7]) == 0.0
        assert metric([0.1, 0.3, 0.7], [0.1, 0.1, 0.1]) == 0.0
