import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax import objectives


def test_cross_entropy_against_plain_numpy():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((3, 5, 11)).astype(np.float32)
    labels = rng.integers(0, 11, (3, 5))
    weights = rng.integers(0, 2, (3, 5)).astype(np.float32)
    loss, correct = objectives.weighted_cross_entropy(jnp.asarray(logits), jnp.asarray(labels), jnp.asarray(weights))
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = sum(-np.log(probabilities[i, j, labels[i, j]]) * weights[i, j] for i in range(3) for j in range(5))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert correct == sum(weights[i, j] for i in range(3) for j in range(5) if logits[i, j].argmax() == labels[i, j])


def test_the_first_of_equal_logits_is_what_is_predicted():
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 3, (200, 4)).astype(np.float32)
    logits[:5] = -np.inf
    labels = rng.integers(0, 4, 200)
    _, correct = objectives.weighted_cross_entropy(jnp.asarray(logits), jnp.asarray(labels), jnp.ones(200))
    assert correct == (logits.argmax(-1) == labels).sum()


def test_a_weightless_target_counts_for_nothing_whatever_it_is():
    logits = jnp.array([[1.0, 2.0, -jnp.inf], [0.0, 0.0, -jnp.inf]])
    loss, correct = objectives.weighted_cross_entropy(logits, jnp.array([1, 2]), jnp.array([1.0, 0.0]))
    np.testing.assert_allclose(loss, np.log(1 + np.exp(-1.0)), rtol=1e-6)
    assert correct == 1


def test_a_batch_without_pairs_or_predictions_has_a_loss_of_zero():
    batch = {"masked_weights": jnp.zeros((2, 3)), "next_sentence_weights": jnp.zeros((2, 1))}
    sums = {name: jnp.zeros(()) for name in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy")}
    means = objectives.divide(sums, objectives.denominators(batch))
    assert all(value == 0 for value in means.values())


def test_each_mean_is_over_its_own_count():
    batch = {
        "masked_ids": jnp.zeros((2, 3), int), "masked_weights": jnp.array([[1.0, 1, 1], [1, 0, 0]]),
        "next_sentence_labels": jnp.array([[1], [0]]), "next_sentence_weights": jnp.ones((2, 1)),
    }  # fmt: skip
    sums = objectives.pretraining_sums(jnp.zeros((2, 3, 5)), jnp.array([[[0.0, 1]], [[1, 0]]]), batch)
    means = {name: float(value) for name, value in objectives.divide(sums, objectives.denominators(batch)).items()}
    assert means["mlm_accuracy"] == means["nsp_accuracy"] == 1.0  # at a tie the first class is taken
    assert abs(means["mlm_loss"] - 1.6094379) < 1e-5
    assert abs(means["nsp_loss"] - 0.3132617) < 1e-5


@pytest.mark.parametrize("nsp", [True, False])
def test_a_head_that_is_not_trained_has_no_metrics(nsp: bool):
    batch = {
        "masked_ids": jnp.array([[1]]), "masked_weights": jnp.ones((1, 1)),
        "next_sentence_labels": jnp.array([[0]]), "next_sentence_weights": jnp.ones((1, 1)),
    }  # fmt: skip
    objective = objectives.pretraining(nsp=nsp)
    sums = objective.sums(lambda batch, keys: (jnp.zeros((1, 1, 3)), jnp.zeros((1, 1, 2))), batch, None)
    wanted = {"mlm_loss", "mlm_accuracy"} | ({"nsp_loss", "nsp_accuracy"} if nsp else set())
    assert set(sums) == set(objective.denominators(batch)) == wanted
