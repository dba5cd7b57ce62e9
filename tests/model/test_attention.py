"""Attention kernels against the plain formula; the TPU kernel runs in interpret mode."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx
from jax.extend import core
from support.batches import make_device_batch
from support.models import initialize

from bert_jax.model import BertConfig, abstract_parameters, encoder
from bert_jax.model.encoder import attention_mask
from bert_jax.model.fused_attention import splash_attention

LENGTH = 128
SMALL = BertConfig(
    vocab_size=100, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=LENGTH, attention_probs_dropout_prob=0.0,
)  # fmt: skip


def padded(length: int = LENGTH) -> np.ndarray:
    return (np.arange(length) < np.array([[length - 57], [length]])).astype(np.int32)


def packed(length: int = LENGTH) -> np.ndarray:
    """Rows of three sequences and of two, of which one ends in padding."""
    ends = np.array([[5, length // 2 + 3, length - 9], [length // 2, length, length]])
    ids = 1 + (np.arange(length) >= ends[:, :1]) + (np.arange(length) >= ends[:, 1:2])
    return np.where(np.arange(length) < ends[:, 2:], ids, 0).astype(np.int32)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encoder, "splash_attention", functools.partial(splash_attention, interpret=True))


def xla_attention(qkv, sequence_ids, causal):
    return encoder._attend(qkv, attention_mask(sequence_ids, causal=causal), None, 0.0)


@pytest.mark.parametrize("causal", [False, True], ids=["both_ways", "causal"])
@pytest.mark.parametrize(
    ("rows", "length", "heads", "head"),
    [(padded, 128, 3, 64), (packed, 128, 2, 32), (packed, 768, 1, 64)],  # one block of tokens, and two
)
def test_splash_is_attention(rows, length, heads, head, causal):
    *qkv, weights = np.random.default_rng(0).standard_normal((4, 2, length, heads, head), np.float32)
    qkv, ids = tuple(qkv), rows(length)

    @functools.partial(jax.jit, static_argnums=0)
    def value_and_gradient(attend, qkv, ids, weights):
        context, backward = jax.vjp(lambda qkv: attend(qkv, ids, causal=causal), qkv)
        return context, *backward(weights)[0]

    expected = value_and_gradient(xla_attention, qkv, ids, weights)
    found = value_and_gradient(functools.partial(splash_attention, interpret=True), qkv, ids, weights)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("causal", "settings"),
    [
        (False, {}),
        (True, {}),
        pytest.param(False, {"remat": "attention"}, marks=pytest.mark.long),
        pytest.param(False, {"remat": "full"}, marks=pytest.mark.long),
    ],
)
def test_a_model_with_splash_is_the_model(causal, settings):
    config = dataclasses.replace(SMALL, is_decoder=causal)
    batch, (_, parameters) = make_device_batch(sequence_ids=packed()), initialize(config)

    def value_and_gradient(**settings):
        graph, _, _ = abstract_parameters(config, **settings)

        def loss(parameters, batch):
            logits, nsp = nnx.merge(graph, parameters)(batch, jax.random.key(3))
            return jax.nn.log_softmax(logits)[..., 7].mean() + nsp[..., 0].mean()

        return jax.jit(jax.value_and_grad(loss))(parameters, batch)

    expected, gradient = value_and_gradient()
    found, other = value_and_gradient(attention="splash", **settings)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5, err_msg=jax.tree_util.keystr(path))


def shapes_in(jaxpr: core.Jaxpr) -> set[tuple[int, ...]]:
    """Returns the shapes of all arrays that a program computes, those inside of kernels excepted."""
    found = {variable.aval.shape for equation in jaxpr.eqns for variable in equation.outvars}
    for equation in jaxpr.eqns:
        if equation.primitive.name != "pallas_call":
            for inner in jax.tree.leaves(
                equation.params, is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr)
            ):
                if isinstance(inner, core.Jaxpr | core.ClosedJaxpr):
                    found |= shapes_in(getattr(inner, "jaxpr", inner))
    return found


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("chosen", "is_square"), [("xla", True), ("splash", False)])
def test_splash_has_no_array_of_length_by_length(chosen, is_square):
    config = dataclasses.replace(SMALL, hidden_size=64, max_position_embeddings=384)
    graph, parameters, _ = abstract_parameters(config, attention=chosen)
    batch = make_device_batch(sequence_ids=packed(384))

    def loss(parameters):
        return nnx.merge(graph, parameters)(batch)[0][..., 7].sum()

    shapes = shapes_in(jax.make_jaxpr(jax.grad(loss))(parameters).jaxpr)
    assert (2, 384, 64) in shapes
    assert any(shape.count(384) > 1 for shape in shapes) == is_square
