"""Tests task heads and their losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.batches import make_device_batch
from support.models import initialize

from bert_jax.batch import Batch, map_arrays
from bert_jax.finetuning.losses import task_objective
from bert_jax.model import BertConfig
from bert_jax.model.task_heads import BertForTask, BiLstm, TaskHead
from bert_jax.training.objectives import divide

MODEL = BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=12,
)  # fmt: skip
LENGTHS = [9, 5, 7, 9]


def make_batch(**targets: np.ndarray) -> Batch[jax.Array]:
    real = np.arange(9) < np.array(LENGTHS)[:, None]
    weights = jnp.array([1, 1, 1, 0], jnp.float32)
    return {
        **make_device_batch(vocab_size=50, sequence_ids=real),
        "weights": weights,
        **map_arrays(jnp.asarray, targets),
    }


def build(head: TaskHead) -> BertForTask:
    graph, parameters = initialize(MODEL, 1, build=BertForTask, head=head)
    return nnx.merge(graph, parameters)


def log_softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    shifted = x - x.max(axis=axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))


@pytest.mark.parametrize(
    ("kind", "size", "shape", "bilstm"),
    [
        ("classify", 3, (4, 3), 0),
        pytest.param("regress", 1, (4, 1), 0, marks=pytest.mark.long),
        pytest.param("choose", 2, (4, 1), 0, marks=pytest.mark.long),
        pytest.param("span", 2, (4, 9, 2), 0, marks=pytest.mark.long),
        ("tag", 5, (4, 9, 5), 0),
        ("classify", 3, (4, 3), 6),
        pytest.param("tag", 5, (4, 9, 5), 6, marks=pytest.mark.long),
        pytest.param("regress", 1, (4, 1), 6, marks=pytest.mark.long),
        pytest.param("choose", 2, (4, 1), 6, marks=pytest.mark.long),
        pytest.param("span", 2, (4, 9, 2), 6, marks=pytest.mark.long),
    ],
)
def test_outputs_have_their_shape_and_padding_does_not_matter(kind, size, shape, bilstm):
    model = build(TaskHead(kind, size, bilstm=bilstm))
    batch = make_batch()
    filled = {**batch, "input_ids": jnp.where(batch["sequence_ids"] > 0, batch["input_ids"], 7)}

    forward = jax.jit(model)
    outputs, again, dropped = forward(batch), forward(filled), forward(batch, jax.random.key(3))
    assert outputs.shape == shape
    assert outputs.dtype == jnp.float32
    assert (model.pooler is None) == (kind in ("span", "tag") or bool(bilstm))
    assert not np.allclose(dropped, outputs)
    if len(shape) == 3:
        real = np.asarray(batch["sequence_ids"]) > 0
        outputs, again = outputs[real], again[real]
    np.testing.assert_allclose(outputs, again, atol=1e-6)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_bilstm_is_that_of_torch(layers):
    torch = pytest.importorskip("torch")
    ours = BiLstm(8, 5, key=jax.random.key(0), layers=layers, dropout=0.5)
    theirs = torch.nn.LSTM(8, 5, num_layers=layers, bidirectional=True, batch_first=True)
    with torch.no_grad():
        layer = ours
        for number in range(layers):
            for suffix, lstm in ((f"l{number}", layer.forward), (f"l{number}_reverse", layer.backward)):
                of_input = np.asarray(lstm.input_kernel[...]).transpose(1, 2, 0).reshape(20, -1)
                of_state = np.asarray(lstm.state_kernel[...]).transpose(1, 2, 0).reshape(20, 5)
                getattr(theirs, f"weight_ih_{suffix}").copy_(torch.tensor(of_input))
                getattr(theirs, f"weight_hh_{suffix}").copy_(torch.tensor(of_state))
                getattr(theirs, f"bias_ih_{suffix}").copy_(torch.tensor(np.asarray(lstm.bias[...]).reshape(20)))
                getattr(theirs, f"bias_hh_{suffix}").zero_()
            layer = layer.above
    assert layer is None
    x = np.random.default_rng(0).normal(size=(3, 7, 8)).astype(np.float32)
    lengths = [7, 4, 1]
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.tensor(x), lengths, batch_first=True)
    states, (final, _) = theirs(packed)
    states, _ = torch.nn.utils.rnn.pad_packed_sequence(states, batch_first=True)
    is_real = np.arange(7) < np.array(lengths)[:, None]
    our_states, our_final = jax.jit(lambda x, is_real: ours(x, is_real))(x, is_real)
    np.testing.assert_allclose(np.asarray(our_states)[is_real], states.detach().numpy()[is_real], atol=1e-6)
    np.testing.assert_allclose(our_final, torch.cat([final[-2], final[-1]], dim=-1).detach().numpy(), atol=1e-6)


def test_a_bilstm_in_bfloat16_forgets_nothing_by_rounding():
    lstm = BiLstm(32, 32, key=jax.random.key(0))
    for direction in (lstm.forward, lstm.backward):
        direction.bias[...] = direction.bias[...].at[1].set(4.0)  # remembers, as a trained one does
    x = jax.random.normal(jax.random.key(1), (4, 512, 32), jnp.bfloat16)
    is_real = jnp.ones(x.shape[:2], bool)
    forward = jax.jit(lambda x: lstm(x, is_real))
    states, final = forward(x)
    expected, expected_final = forward(x.astype(jnp.float32))
    assert (states.dtype, final.dtype, expected.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    for found, wanted in ((states, expected), (final, expected_final)):
        assert jnp.abs(found - wanted).mean() < 0.01 * jnp.abs(wanted).mean()


def test_a_bilstm_begins_without_lapack():
    """Several decompositions at once wait for each other on CPU hosts with few cores, some of the time."""
    begin = jax.jit(lambda key: nnx.state(BiLstm(8, 5, key=key, layers=2)))
    assert "custom_call" not in begin.lower(jax.random.key(0)).as_text()


def test_dropout_is_between_the_layers_of_a_bilstm():
    x, is_real = jax.random.normal(jax.random.key(1), (2, 4, 8)), jnp.ones((2, 4), bool)
    keys = jax.random.split(jax.random.key(2), 2)
    for layers in (1, 2):
        bilstm = BiLstm(8, 5, key=jax.random.key(0), layers=layers, dropout=0.5)
        states = jax.jit(lambda keys, bilstm=bilstm: (bilstm(x, is_real, keys)[0], bilstm(x, is_real)[0]))
        assert np.array_equal(*states(keys)) == (layers == 1)


def means(head: TaskHead, outputs: np.ndarray, batch: dict[str, jax.Array]) -> dict[str, float]:
    objective = task_objective(head)
    sums = objective.sums(lambda batch, keys: jnp.asarray(outputs, jnp.float32), batch, None)
    return {name: float(value) for name, value in divide(sums, objective.denominators(batch)).items()}


def test_classification_and_regression():
    rng = np.random.default_rng(1)
    outputs, labels = rng.normal(size=(4, 3)), np.array([2, 0, 1, 1], np.int32)
    got = means(TaskHead("classify", 3), outputs, make_batch(labels=labels))
    assert got["loss"] == pytest.approx(-log_softmax(outputs)[np.arange(3), labels[:3]].mean(), rel=1e-6)
    assert got["accuracy"] == pytest.approx((outputs.argmax(-1) == labels)[:3].mean())
    scores = np.array([0.5, 3.0, 1.0, 99.0], np.float32)
    got = means(TaskHead("regress", 1), outputs[:, :1], make_batch(labels=scores))
    assert got == {"loss": pytest.approx(((outputs[:3, 0] - scores[:3]) ** 2).mean(), rel=1e-6)}


def test_choosing_among_neighbours():
    outputs = np.array([[1.0], [3.0], [2.0], [0.5]])
    batch = make_batch(labels=np.array([1, 0, 1, 0], np.int32), weights=np.array([1, 1, 1, 1], np.float32))
    got = means(TaskHead("choose", 2), outputs, batch)
    losses = [-log_softmax(np.array([1.0, 3.0]))[0], -log_softmax(np.array([2.0, 0.5]))[0]]
    assert got == {"loss": pytest.approx(np.mean(losses)), "accuracy": 0.5}
    batch["weights"] = jnp.array([1.0, 1.0, 0.0, 0.0])
    assert means(TaskHead("choose", 2), outputs, batch) == {"loss": pytest.approx(losses[0]), "accuracy": 0.0}


def test_spans_are_of_real_tokens():
    outputs = np.random.default_rng(2).normal(size=(4, 9, 2))
    outputs[1, 5:] += 50  # padding
    labels = np.array([[3, 4], [0, 0], [1, 6], [0, 0]], np.int32)
    losses = []
    for row, length in enumerate(LENGTHS[:3]):
        logits = log_softmax(outputs[row, :length], axis=0)
        losses.append(-(logits[labels[row, 0], 0] + logits[labels[row, 1], 1]) / 2)
    got = means(TaskHead("span", 2), outputs, make_batch(labels=labels))
    assert got["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_tags_are_of_labelled_tokens():
    outputs = np.random.default_rng(3).normal(size=(4, 9, 5))
    labels = np.full((4, 9), -1, np.int32)
    labels[0, [1, 3]], labels[1, 2], labels[3, 1] = [4, 0], 2, 3
    of = log_softmax(outputs)
    got = means(TaskHead("tag", 5), outputs, make_batch(labels=labels))
    assert got["loss"] == pytest.approx(-np.mean([of[0, 1, 4], of[0, 3, 0], of[1, 2, 2]]), rel=1e-6)
