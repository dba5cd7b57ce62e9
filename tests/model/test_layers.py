"""The building blocks of the model: dropout, activations and LayerNorm."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from bert_jax.model import workarounds
from bert_jax.model.layers import LayerNorm, activation, bias, dense, drop, dropout, dropout_mask, parameter, row_keys


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("size", [64, 33])
def test_dropout_realises_its_rate_and_keeps_the_mean(rate, size):
    x = jnp.ones((500, size))
    y = np.asarray(dropout(x, rate, jax.random.split(jax.random.key(0), 500)))
    deviations = 4 * np.sqrt(rate * (1 - rate) / y.size)
    assert np.mean(y == 0) == pytest.approx(rate, abs=deviations)
    assert y.mean() == pytest.approx(1.0, abs=deviations / (1 - rate))
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / (1 - rate))}


def test_dropout_in_bfloat16_keeps_the_mean_and_nothing_for_the_backward_pass():
    x = jax.random.normal(jax.random.key(0), (64, 512), jnp.bfloat16)
    y, backward = jax.vjp(lambda x: drop(x, jnp.ones(x.shape, bool), 0.1), x)
    assert y.dtype == jnp.bfloat16
    ratio = np.abs(np.asarray(y, np.float64)).sum() / np.abs(np.asarray(x, np.float64)).sum()
    assert ratio == pytest.approx(1 / 0.9, rel=1e-4)
    floats = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(backward) if leaf.dtype != bool]
    assert all(np.ptp(leaf) == 0 for leaf in floats)  # constants, of which a compiled step keeps nothing


def test_dropout_in_fp32_is_one_product():
    x = jax.random.normal(jax.random.key(0), (8, 64))
    keep = dropout_mask(x.shape, 0.1, jax.random.split(jax.random.key(1), 8))
    np.testing.assert_array_equal(
        drop(x, keep, 0.1), np.where(keep, np.asarray(x) * np.float32(1 / 0.9), np.float32(0))
    )


def test_dropped_elements_are_uncorrelated():
    rows, length, size, rate = 64, 48, 100, 0.1
    keys = row_keys(jax.random.key(0), jnp.arange(rows))
    kept = np.asarray(dropout_mask((rows, length, size), rate, keys)).astype(np.float64)
    centred = kept - kept.mean()

    def deviations_from_independence(one: np.ndarray, other: np.ndarray) -> float:
        return abs((one * other).mean()) * math.sqrt(one.size) / (rate * (1 - rate))

    flat = centred.reshape(rows, -1)
    lags = [1, 2, 3, 4, 7, 8, 16, 31, 32, size - 1, size, size + 1, 2 * size, 8 * size, 16 * size]
    pairs = [(flat[:, lag:], flat[:, :-lag]) for lag in lags] + [(flat[lag:], flat[:-lag]) for lag in range(1, 33)]
    later = dropout_mask(kept.shape, rate, row_keys(jax.random.key(1), jnp.arange(rows)))
    pairs.append((centred, np.asarray(later) - kept.mean()))
    assert max(deviations_from_independence(*pair) for pair in pairs) < 4.5
    for axis in range(3):  # no row, position or unit is dropped more often than others
        others = tuple(one for one in range(3) if one != axis)
        counted = np.prod([kept.shape[one] for one in others])
        means = (kept.mean(axis=others) - (1 - rate)) * math.sqrt(counted / (rate * (1 - rate)))
        assert abs(means).max() < 4.5
        assert 0.6 < means.var() < 1.6


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gelu", lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2)))),
        ("gelu_new", lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
        ("gelu_pytorch_tanh", lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
        ("relu", lambda x: max(x, 0.0)),
    ],
)
def test_activations(name, expected):
    x = np.linspace(-4, 4, 81, dtype=np.float32)
    np.testing.assert_allclose(activation(name, jnp.asarray(x)), [expected(v) for v in x.tolist()], atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dense_saves_its_operands_as_they_are(dtype: jnp.dtype):
    """A copy in another shape or type would be saved beside the array that another operation saves."""
    x, weights = jnp.ones((2, 8, 4, 16), dtype), jnp.ones((4, 16, 32))

    def apply(x: jax.Array, weights: jax.Array) -> jax.Array:
        return dense("tnh,nhd->td", x, parameter(weights, "heads", "head", "embed"), bias((32,), "embed"))

    saved = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(jax.vjp(apply, x, weights)[1])}
    assert {one for one in saved if len(one[0]) > 1} == {(x.shape, x.dtype), (weights.shape, weights.dtype)}


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
def test_activations_have_gradients_in_shard_map(name: str):
    x = jnp.linspace(-6, 6, 1024, dtype=jnp.float32)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    gradient = jax.grad(lambda x: activation(name, x).sum())
    sharded = jax.jit(
        jax.shard_map(gradient, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))
    )
    np.testing.assert_array_equal(sharded(x), jax.jit(gradient)(x))


def test_gelu_has_the_exact_derivative():
    x = np.linspace(-6, 6, 241, dtype=np.float32)
    gradient = jax.grad(lambda x: activation("gelu", x).sum())(jnp.asarray(x))
    cdf = [(1 + math.erf(v / math.sqrt(2))) / 2 for v in x.tolist()]
    pdf = np.exp(-(x.astype(np.float64) ** 2) / 2) / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(gradient, cdf + x * pdf, atol=5e-7)


def test_gelu_of_bfloat16_keeps_its_left_tail():
    x = jnp.linspace(-5, 5, 1001, dtype=jnp.bfloat16)
    exact = [v / 2 * math.erfc(-v / math.sqrt(2)) for v in x.tolist()]
    np.testing.assert_allclose(activation("gelu", x).astype(jnp.float32), exact, rtol=2**-8, atol=5e-7)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gelu_costs_less_than_in_jax(dtype: jnp.dtype):
    def cost(gelu: Callable[[jax.Array], jax.Array]) -> float:
        x = jax.ShapeDtypeStruct((1024,), dtype)
        backward = jax.jit(lambda x, gradient: jax.vjp(gelu, x)[1](gradient))
        counted = backward.lower(x, x).compile().cost_analysis()
        return counted["flops"] + 15 * counted["transcendentals"]  # an erf is some 15 multiply-adds, an exp fewer

    assert cost(functools.partial(activation, "gelu")) < cost(functools.partial(jax.nn.gelu, approximate=False))


def test_layer_norm_keeps_its_precision_on_offset_inputs():
    norm = LayerNorm(256, 1e-12)
    x = 1e4 + np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    y = np.asarray(norm(jnp.asarray(x)))
    exact = x.astype(np.float64)
    exact = (exact - exact.mean(-1, keepdims=True)) / exact.std(-1, keepdims=True)
    np.testing.assert_allclose(y, exact, atol=2e-3)


def test_layer_norm_of_bfloat16_is_computed_in_fp32():
    x = jnp.asarray(20 + np.random.default_rng(0).standard_normal((8, 256)), jnp.bfloat16)
    norm = LayerNorm(256, 1e-12)
    np.testing.assert_array_equal(norm(x), norm(x.astype(jnp.float32)).astype(jnp.bfloat16))


# --- Workarounds against the plain operations that they stand for ------------------------------------------------


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape, np.float32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("rows", "size"), [((), (6,)), ((4,), (6,)), ((2, 3), (6,)), ((2, 3), (3, 2, 5)), ((3,), (9_000,))]
)
def test_add_bias_is_a_sum_with_its_gradients(rows, size, dtype):
    """The gradient of an fp32 bias is not rounded to the type of x."""
    x, bias, gradient = draw(*rows, *size).astype(dtype), draw(*size), draw(*rows, *size).astype(dtype)
    found, back = jax.vjp(jax.jit(workarounds.add_bias), x, bias)
    by_x, by_bias = jax.jit(back)(gradient)
    assert (found.dtype, by_x.dtype, by_bias.dtype) == (dtype, dtype, jnp.float32)
    np.testing.assert_array_equal(found, x + bias.astype(dtype))
    np.testing.assert_array_equal(by_x, gradient)
    expected = np.asarray(gradient, np.float64).reshape(-1, *size).sum(axis=0)
    np.testing.assert_allclose(by_bias, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "gradient", [draw(4, 6).astype(jnp.bfloat16), draw(4, 9_000)], ids=["bfloat16", "large"]
)  # fmt: skip
def test_only_a_cpu_adds_up_by_a_product(gradient):
    """Elsewhere the product would be one of rounded numbers, or slower than the sum."""

    def by_bias(gradient: jax.Array) -> jax.Array:
        return jax.vjp(workarounds.add_bias, gradient, gradient[0])[1](gradient)[1]

    texts = {
        platform: jax.jit(by_bias).trace(gradient).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "tpu", "cuda")
    }
    assert {platform for platform, text in texts.items() if "dot_general" in text} == {"cpu"}
