import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import helpers
from support.devices import one_device  # noqa: F401

from bert_jax.config import PretrainConfig
from bert_jax.config_keys import ObjectiveKeys
from bert_jax.model.bert import VocabularyProjection
from bert_jax.training import evaluation, objectives, pretrain
from bert_jax.training.pretrain import Training

weighted_cross_entropy = jax.jit(objectives.weighted_cross_entropy)
PAPER = objectives.pretraining(nsp=True)


def test_cross_entropy_against_plain_numpy():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((3, 5, 11)).astype(np.float32)
    labels = rng.integers(0, 11, (3, 5))
    weights = rng.integers(0, 2, (3, 5)).astype(np.float32)
    loss, correct = weighted_cross_entropy(logits, labels, weights)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = sum(-np.log(probabilities[i, j, labels[i, j]]) * weights[i, j] for i in range(3) for j in range(5))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert correct == sum(weights[i, j] for i in range(3) for j in range(5) if logits[i, j].argmax() == labels[i, j])


def test_the_first_of_equal_logits_is_what_is_predicted():
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 3, (200, 4)).astype(np.float32)
    logits[:5] = -np.inf
    labels = rng.integers(0, 4, 200)
    _, correct = weighted_cross_entropy(logits, labels, np.ones(200, np.float32))
    assert correct == (logits.argmax(-1) == labels).sum()


def test_target_of_weight_0_does_not_count():
    logits = np.array([[1.0, 2.0, -np.inf], [0.0, 0.0, -np.inf]], np.float32)
    loss, correct = weighted_cross_entropy(logits, np.array([1, 2]), np.array([1, 0], np.float32))
    np.testing.assert_allclose(loss, np.log(1 + np.exp(-1.0)), rtol=1e-6)
    assert correct == 1


@jax.jit
def means_of(sums, batch):
    return objectives.divide(sums, PAPER.denominators(batch))


def test_a_batch_without_pairs_or_predictions_has_a_loss_of_zero():
    batch = {"masked_weights": np.zeros((2, 3)), "next_sentence_weights": np.zeros((2, 1))}
    sums = {name: np.zeros(()) for name in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy")}
    means = means_of(sums, batch)
    assert all(value == 0 for value in means.values())


def test_each_mean_is_over_its_own_count():
    batch = {
        "masked_ids": np.zeros((2, 3), np.int32), "masked_weights": np.array([[1, 1, 1], [1, 0, 0]], np.float32),
        "next_sentence_labels": np.array([[1], [0]]), "next_sentence_weights": np.ones((2, 1), np.float32),
    }  # fmt: skip
    nsp_logits = np.array([[[0, 1]], [[1, 0]]], np.float32)
    zeros = VocabularyProjection(jnp.zeros((2, 3, 4)), jnp.zeros((5, 4)), jnp.zeros(5), 5)
    model = lambda batch, keys, mlm_output: (mlm_output(zeros), nsp_logits)  # noqa: E731
    sums = jax.jit(lambda batch: PAPER.sums(model, batch, None))(batch)
    means = {name: float(value) for name, value in means_of(sums, batch).items()}
    assert means["mlm_accuracy"] == means["nsp_accuracy"] == 1.0  # at a tie the first class is taken
    assert abs(means["mlm_loss"] - 1.6094379) < 1e-5
    assert abs(means["nsp_loss"] - 0.3132617) < 1e-5


@pytest.mark.parametrize("nsp", [True, False])
def test_a_head_that_is_not_trained_has_no_metrics(nsp: bool):
    batch = {
        "masked_ids": np.array([[1]]), "masked_weights": np.ones((1, 1)),
        "next_sentence_labels": np.array([[0]]), "next_sentence_weights": np.ones((1, 1)),
    }  # fmt: skip
    objective = objectives.pretraining(nsp=nsp)
    zeros = VocabularyProjection(jnp.zeros((1, 1, 4)), jnp.zeros((3, 4)), jnp.zeros(3), 3)
    model = lambda batch, keys, mlm_output: (mlm_output(zeros), np.zeros((1, 1, 2)))  # noqa: E731
    sums = jax.eval_shape(lambda: objective.sums(model, batch, None))
    wanted = {"mlm_loss", "mlm_accuracy"} | ({"nsp_loss", "nsp_accuracy"} if nsp else set())
    assert set(sums) == set(objective.denominators(batch)) == wanted


def test_counts_of_a_large_batch_are_exact():
    """A sum in bfloat16, with 8 bits, stops at 256."""
    rows = 1 << 19
    counts = jax.jit(PAPER.denominators)({
        "masked_weights": jnp.ones((rows, 20)), "next_sentence_weights": jnp.ones((rows, 1)),
    })  # fmt: skip
    assert counts["mlm_loss"] == counts["mlm_accuracy"] == 20 * rows
    assert counts["nsp_loss"] == counts["nsp_accuracy"] == rows
    assert {count.dtype for count in counts.values()} == {jnp.dtype("float32")}


@pytest.mark.parametrize("logits_bytes", [512 << 20, 4 * 24 * 1024])
def test_sums_of_many_rows_in_bfloat16_are_those_of_few(logits_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(objectives, "LOGITS_BYTES", logits_bytes)
    rng = np.random.default_rng(0)
    few, times = 8, 4096
    hidden = rng.standard_normal((few, 1, 16)).astype(jnp.bfloat16)
    words = rng.standard_normal((24, 16)).astype(np.float32)
    labels = rng.integers(0, 24, (few, 1)).astype(np.int32)

    @jax.jit
    def sums(hidden, labels):
        projection = VocabularyProjection(hidden, words, jnp.zeros(24), 24)
        return objectives.projected_cross_entropy(projection, labels, jnp.ones(labels.shape))

    small = sums(hidden, labels)
    large = sums(np.tile(hidden, (times, 1, 1)), np.tile(labels, (times, 1)))
    assert {value.dtype for value in large} == {jnp.dtype("float32")}
    np.testing.assert_allclose(large, times * np.array(small), rtol=1e-5)


class WeightedKeys(ObjectiveKeys):
    weight_of_nsp: float = 1.0


class Weighted(PretrainConfig):
    objective: WeightedKeys = WeightedKeys()


def test_weight_of_an_objective_is_the_same_in_training_and_evaluation(
    dataset_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    paper = objectives.make_objective

    def weighted(config: Weighted) -> objectives.Objective:
        return dataclasses.replace(paper(config), weights={"mlm_loss": 1.0, "nsp_loss": config.objective.weight_of_nsp})

    for module in (pretrain, evaluation):
        monkeypatch.setattr(module, "make_objective", weighted)
    config = helpers.small_config(
        dataset_dir, kind=Weighted, gradient_accumulation=2, optimizer__learning_rate=1e-3,
        optimizer__warmup_steps=0, objective__weight_of_nsp=0.5,
    )  # fmt: skip
    training = Training(config)
    state = training.initial_state()
    evaluated = training.evaluate(state)
    assert evaluated["loss"] == pytest.approx(evaluated["mlm_loss"] + 0.5 * evaluated["nsp_loss"], rel=1e-6)
    _, batch = next(training.batches())
    _, metrics = jax.device_get(training.step(state, batch))
    assert metrics["loss"] == pytest.approx(metrics["mlm_loss"] + 0.5 * metrics["nsp_loss"], rel=1e-6)
