"""The attention kernels for TPUs, in interpret mode, against the plain formula."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend import core
from support.batches import make_device_batch
from support.models import assert_close, initialize

from bert_jax.model import BertConfig, abstract_parameters, attention
from bert_jax.model.attention import attention_mask
from bert_jax.model.layers import dropout_mask
from bert_jax.model.pallas_attention import pallas_attention, splash_attention

kernel = functools.partial(pallas_attention, interpret=True)
splash = functools.partial(splash_attention, interpret=True)
LENGTH = 128
SMALL = BertConfig(
    vocab_size=100, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=LENGTH,
)  # fmt: skip


LOCAL = {
    "attention_probs_dropout_prob": 0.0, "position_embedding_type": "rotary", "global_attn_every_n_layers": 2,
    "local_attention": 64,
}  # fmt: skip


def padded(length: int = LENGTH) -> np.ndarray:
    return (np.arange(length) < np.array([[length - 57], [length]])).astype(np.int32)


def packed(length: int = LENGTH) -> np.ndarray:
    """Rows of three sequences and of two, of which one ends in padding."""
    ends = np.array([[5, length // 2 + 3, length - 9], [length // 2, length, length]])
    ids = 1 + (np.arange(length) >= ends[:, :1]) + (np.arange(length) >= ends[:, 1:2])
    return np.where(np.arange(length) < ends[:, 2:], ids, 0).astype(np.int32)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bert_jax.model.pallas_attention.pallas_attention", kernel)
    monkeypatch.setattr("bert_jax.model.pallas_attention.splash_attention", splash)


def plain_attention(qkv, sequence_ids, keys, *, dropout_rate, causal):
    q, k, v = (qkv[:, :, i] for i in range(3))
    return attention.plain_attention(q, k, v, attention_mask(sequence_ids, causal=causal), keys, dropout_rate)


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def context_and_gradient(attend, qkv, ids, keys, weights, dropout_rate=0.0, causal=False):
    context, backward = jax.vjp(lambda qkv: attend(qkv, ids, keys, dropout_rate=dropout_rate, causal=causal), qkv)
    return context, *jnp.moveaxis(backward(weights)[0], 2, 0)


def make_arrays(length: int, heads: int, head: int) -> tuple[np.ndarray, np.ndarray, jax.Array]:
    *qkv, weights = np.random.default_rng(0).standard_normal((4, 2, length, heads, head), np.float32)
    return np.stack(qkv, 2), weights, jax.random.split(jax.random.key(5), 2)


SHAPES = [
    (padded, 128, 4, 64),  # two steps of two heads
    (packed, 130, 3, 32),  # padded to two blocks of queries, three heads in a step
    (packed, 73, 2, 40),  # an odd length, whose last key has a random word of its own
    (packed, 384, 1, 128),
]


@pytest.mark.parametrize(
    ("shape", "rate", "causal"), [(0, 0.0, False), (1, 0.1, False), (1, 0.0, True), (2, 0.5, False), (3, 0.1, True)]
)
def test_kernel_equals_plain_attention(shape, rate, causal):
    rows, length, heads, head = SHAPES[shape]
    qkv, weights, keys = make_arrays(length, heads, head)
    expected = context_and_gradient(plain_attention, qkv, rows(length), keys, weights, rate, causal)
    found = context_and_gradient(kernel, qkv, rows(length), keys, weights, rate, causal)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    ("length", "causal", "reach"), [(256, False, None), (300, True, None), (384, False, 64), (100, True, 40)]
)
def test_splash_equals_plain_attention(length, causal, reach):
    qkv, weights, _ = make_arrays(length, 2, 64)
    ids, found = jnp.asarray(packed(length)), []
    for attend in (
        lambda qkv: attention.plain_attention(
            *(qkv[:, :, i] for i in range(3)), attention_mask(ids, causal=causal, reach=reach), None, 0.0
        ),
        lambda qkv: splash(qkv, ids, causal=causal, reach=reach),
    ):
        context, backward = jax.vjp(attend, jnp.asarray(qkv))
        found.append((context, *backward(jnp.asarray(weights))))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_kernel_draws_the_mask_of_plain_attention():
    """Values that are the rows of an identity matrix make the context the dropped probabilities themselves."""
    length, rate = 129, 0.3
    qkv, _, keys = make_arrays(length, 2, length)
    qkv[:, :, 2] = np.eye(length, dtype=np.float32)[:, None]
    context = kernel(qkv, np.ones((2, length), np.int32), keys, dropout_rate=rate, causal=False)
    np.testing.assert_array_equal(np.swapaxes(context, 1, 2) > 0, dropout_mask((2, 2, length, length), rate, keys))


def test_kernel_drops_nothing_without_keys():
    qkv, weights, _ = make_arrays(64, 2, 16)
    expected = context_and_gradient(plain_attention, qkv, packed(64), None, weights)
    found = context_and_gradient(kernel, qkv, packed(64), None, weights, 0.1)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_kernel_in_bfloat16_is_as_accurate_as_plain_attention():
    qkv, weights, keys = make_arrays(256, 2, 64)
    expected = context_and_gradient(plain_attention, qkv, packed(256), keys, weights, 0.1)
    errors = {}
    for side, attend in (("plain", plain_attention), ("kernel", kernel)):
        found = context_and_gradient(
            attend, qkv.astype(jnp.bfloat16), packed(256), keys, weights.astype(jnp.bfloat16), 0.1
        )
        errors[side] = [
            np.linalg.norm(np.asarray(a, np.float32) - b) / np.linalg.norm(b)
            for a, b in zip(found, expected, strict=True)
        ]
    for kernel_error, plain_error in zip(errors["kernel"], errors["plain"], strict=True):
        assert kernel_error < 1.1 * plain_error < 0.01


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("switches", "settings"),
    [
        ({}, {"attention": "pallas"}),
        (LOCAL, {"attention": "splash"}),
        pytest.param({"is_decoder": True}, {"attention": "pallas"}, marks=pytest.mark.long),
        pytest.param({}, {"attention": "pallas", "remat": "attention"}, marks=pytest.mark.long),
        pytest.param({}, {"attention": "pallas", "remat": "full"}, marks=pytest.mark.long),
        pytest.param(
            {**LOCAL, "is_decoder": True}, {"attention": "splash", "remat": "attention"}, marks=pytest.mark.long
        ),
    ],
)
def test_a_model_with_a_kernel_is_the_model(switches, settings):
    config = dataclasses.replace(SMALL, **switches)
    batch, (_, parameters) = make_device_batch(sequence_ids=packed()), initialize(config)

    def value_and_gradient(**settings):
        graph, _, _ = abstract_parameters(config, **settings)

        def loss(parameters, batch):
            logits, nsp = nnx.merge(graph, parameters)(batch, jax.random.key(3))
            return jax.nn.log_softmax(logits)[..., 7].mean() + nsp[..., 0].mean()

        return jax.jit(jax.value_and_grad(loss))(parameters, batch)

    expected, gradient = value_and_gradient()
    found, other = value_and_gradient(**settings)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert_close(other, gradient, rtol=1e-7, atol=1e-5)


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
@pytest.mark.parametrize(("chosen", "is_square"), [("xla", True), ("pallas", False)])
def test_kernel_has_no_array_of_length_by_length(chosen, is_square):
    config = dataclasses.replace(SMALL, hidden_size=64, max_position_embeddings=384)
    graph, parameters, _ = abstract_parameters(config, attention=chosen)
    batch = make_device_batch(sequence_ids=packed(384))

    def loss(parameters):
        return nnx.merge(graph, parameters)(batch)[0][..., 7].sum()

    shapes = shapes_in(jax.make_jaxpr(jax.grad(loss))(parameters).jaxpr)
    assert (2, 384, 64) in shapes
    assert any(shape.count(384) > 1 for shape in shapes) == is_square
