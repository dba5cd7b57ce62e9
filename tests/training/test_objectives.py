import dataclasses
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import helpers, models
from support.batches import make_batch
from support.devices import one_device  # noqa: F401

from bert_jax.ahead_of_time.hlo import read_collectives
from bert_jax.config import PretrainConfig, load_config
from bert_jax.config_keys import MeshKeys, ObjectiveKeys
from bert_jax.data.loading.loader import next_token_targets
from bert_jax.model import abstract_parameters
from bert_jax.model.bert import VocabularyProjection
from bert_jax.parallel.mesh import make_mesh, put_batch
from bert_jax.training import evaluation, objectives, pretrain
from bert_jax.training.evaluation import make_eval_step
from bert_jax.training.objectives import projected_cross_entropy
from bert_jax.training.optimizer import learning_rate_schedule, make_optimizer
from bert_jax.training.pretrain import Training
from bert_jax.training.train_step import describe_state, make_train_step

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


# --- The loss in chunks of predictions: the values and gradients of the plain loss, with less memory -------------


ROWS, PREDICTIONS, SIZE, VOCABULARY, PADDED = 5, 7, 24, 90, 96


def make_case(dtype: jnp.dtype = jnp.float32, seed: int = 0):
    """Returns (hidden, word embeddings, bias), labels and weights; targets of weight 0 have labels of the padding."""
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.standard_normal((ROWS, PREDICTIONS, SIZE)), dtype)
    words = rng.standard_normal((PADDED, SIZE)).astype(np.float32)
    bias = rng.standard_normal(PADDED).astype(np.float32)
    labels = rng.integers(0, VOCABULARY, (ROWS, PREDICTIONS)).astype(np.int32)
    weights = (np.arange(PREDICTIONS) < rng.integers(0, PREDICTIONS + 1, (ROWS, 1))).astype(np.float32)
    predicted = (np.asarray(hidden, np.float32) @ words.T + bias)[..., :VOCABULARY].argmax(-1)
    labels[:, ::2] = predicted[:, ::2]  # some are right
    labels[weights == 0] = PADDED - 1
    return (hidden, jnp.asarray(words), jnp.asarray(bias)), labels, weights


def value_and_gradients(arrays, labels, weights):
    """Returns ((3 x loss, correct), gradients of 3 x loss); the factor is that of a mean's denominator."""

    @jax.jit
    def differentiate(arrays):
        def loss(arrays):
            result = projected_cross_entropy(VocabularyProjection(*arrays, VOCABULARY), labels, weights)
            return 3 * result[0], result[1]

        return jax.value_and_grad(loss, has_aux=True)(arrays)

    return differentiate(arrays)


def in_float64(arrays, labels, weights):
    """Port of loss and gradients to NumPy in float64."""
    hidden, words, bias = (np.asarray(x.astype(jnp.float32), np.float64) for x in arrays)
    hidden, labels, weights = hidden.reshape(-1, SIZE), labels.ravel(), weights.ravel().astype(np.float64)
    used = weights != 0
    hidden, targets, weights = hidden[used], labels[used], weights[used]
    logits = hidden @ words[:VOCABULARY].T + bias[:VOCABULARY]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    every = np.arange(len(targets))
    loss, correct = -(weights * np.log(p[every, targets])).sum(), (weights * (logits.argmax(-1) == targets)).sum()
    p[every, targets] -= 1
    gradient = 3 * weights[:, None] * p
    of_hidden, of_words, of_bias = np.zeros((used.size, SIZE)), np.zeros((PADDED, SIZE)), np.zeros(PADDED)
    of_hidden[used] = gradient @ words[:VOCABULARY]
    of_words[:VOCABULARY], of_bias[:VOCABULARY] = gradient.T @ hidden, gradient.sum(0)
    return (3 * loss, correct), (of_hidden.reshape(ROWS, PREDICTIONS, SIZE), of_words, of_bias)


def largest_difference(got, expected) -> float:
    """Returns the largest difference, relative to the largest value."""
    got, expected = (np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64) for x in (got, expected))
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.fixture
def chunks_of(monkeypatch: pytest.MonkeyPatch):
    """Returns a function that sets the most predictions whose logits are in memory, of a padded vocabulary."""
    return lambda predictions, padded=PADDED: monkeypatch.setattr(objectives, "LOGITS_BYTES", 4 * padded * predictions)


@pytest.mark.parametrize("predictions", [5, 34])
def test_chunks_have_the_loss_accuracy_and_gradients_of_the_plain_loss(predictions: int, chunks_of):
    case = make_case()
    plain, exact = value_and_gradients(*case), in_float64(*case)
    chunks_of(predictions)
    (loss, correct), gradients = value_and_gradients(*case)
    for (other_loss, other_correct), other_gradients in (plain, exact):
        np.testing.assert_allclose(loss, other_loss, rtol=1e-6)
        assert 0 < correct == other_correct < case[2].sum()
        for gradient, other in zip(gradients, other_gradients, strict=True):
            assert largest_difference(gradient, other) < 1e-6
    assert not np.any(gradients[1][VOCABULARY:])
    assert not np.any(gradients[2][VOCABULARY:])


def test_a_batch_of_weight_0_has_no_loss_and_no_gradient(chunks_of):
    arrays, labels, weights = make_case()
    for predictions in (ROWS * PREDICTIONS, 8):
        chunks_of(predictions)
        sums, gradients = value_and_gradients(arrays, labels, 0 * weights)
        for leaf in jax.tree.leaves((sums, gradients)):
            np.testing.assert_array_equal(leaf, 0)


def test_chunks_need_the_memory_of_one_chunk_of_logits(chunks_of):
    predictions, vocab_size = 8192, 4096
    shapes = ((1, predictions, SIZE), jnp.float32), ((vocab_size, SIZE), jnp.float32), ((vocab_size,), jnp.float32)
    arrays = tuple(jax.ShapeDtypeStruct(*one) for one in shapes)
    targets = [jax.ShapeDtypeStruct((1, predictions), kind) for kind in (jnp.int32, jnp.float32)]

    def temporary_bytes(chunk: int) -> int:
        def loss(arrays, labels, weights):
            return projected_cross_entropy(VocabularyProjection(*arrays, vocab_size), labels, weights)[0]

        chunks_of(chunk, vocab_size)
        return jax.jit(jax.grad(loss)).lower(arrays, *targets).compile().memory_analysis().temp_size_in_bytes

    logits = 4 * predictions * vocab_size
    assert temporary_bytes(predictions) > logits
    assert temporary_bytes(512) < logits // 4


# --- The training step ------------------------------------------------------------------------------------------------

MODEL = dataclasses.replace(
    models.SMALL, num_hidden_layers=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
)


class Step:
    """One step of training without a learning rate, and one of evaluation, of the same batch."""

    def __init__(self, *, left_to_right: bool = False, **mesh: int):
        sizes = {"data": 1, "fsdp": 1, "tensor": 1, **mesh}
        self.mesh = make_mesh(MeshKeys(**sizes), jax.devices()[: math.prod(sizes.values())])
        model = dataclasses.replace(MODEL, is_decoder=left_to_right)
        optimizer = make_optimizer(load_config("default").optimizer, abstract_parameters(model)[2])
        self.spec = describe_state(self.mesh, model, optimizer, seed=0, scan_layers=False)
        self.objective = objectives.pretraining(nsp=not left_to_right)
        schedule = learning_rate_schedule(1e-2, 2, 100)
        self.train = make_train_step(self.mesh, self.spec, optimizer, schedule, self.objective, seed=0)
        self.batch = make_batch(0, rows=16, length=16, predictions=10, vocab_size=200)
        if left_to_right:
            self.batch |= next_token_targets(self.batch["input_ids"], self.batch["sequence_ids"])

    def results(self):
        """Returns the metrics of training, the first moments, which are the gradients, and the sums of evaluation."""
        with jax.set_mesh(self.mesh):
            state = self.spec.make()
            evaluate = make_eval_step(self.mesh, self.spec.graph, self.spec.shardings.parameters, self.objective)
            nats = {"unigram_nats": np.ones(self.batch["masked_ids"].shape, np.float32)}
            sums = jax.device_get(evaluate(state.parameters, put_batch(self.mesh, self.batch | nats)))
            state, metrics = self.train(state, put_batch(self.mesh, self.batch))
            return jax.device_get((metrics, optax.tree.get(state.optimizer_state, "mu"), sums))

    def collectives_in_loops(self):
        """Returns (kind, elements) of the collectives inside of loops.

        Layers are unrolled: the loop over chunks is the only one that could have collectives.
        """
        batch = jax.eval_shape(lambda: put_batch(self.mesh, self.batch))
        with jax.set_mesh(self.mesh):
            text = self.train.lower(self.spec.abstract, batch).compile().as_text()
        found = read_collectives(text, self.mesh.size)
        return [(one.kind, one.bytes * one.instructions // one.count // 4) for one in found if one.loops]


@functools.cache
def plain_results(left_to_right: bool):
    return Step(left_to_right=left_to_right).results()


@pytest.mark.long
@pytest.mark.parametrize(("left_to_right", "mesh"), [(True, {}), (False, {"data": 2, "fsdp": 2, "tensor": 2})])
def test_training_and_evaluation_in_chunks_are_those_of_all_predictions_at_once(left_to_right, mesh, chunks_of):
    expected = plain_results(left_to_right)
    chunks_of(8, MODEL.padded_vocab_size)
    got = Step(left_to_right=left_to_right, **mesh).results()
    models.assert_close(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [{"data": 4, "fsdp": 2}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_the_loop_over_chunks_has_only_sums_over_tensor(mesh: dict[str, int], chunks_of):
    chunks_of(8, MODEL.padded_vocab_size)
    found = Step(**mesh).collectives_in_loops()
    if "tensor" not in mesh:
        assert not found
        return
    assert {kind for kind, _ in found} == {"all-reduce"}
    # A hidden state and at most eight numbers for each of a chunk's 8 predictions; not the table, of 200 * 32.
    assert 8 * 32 <= sum(elements for _, elements in found) <= 8 * (32 + 8)
