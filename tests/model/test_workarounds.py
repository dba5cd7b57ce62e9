"""Workarounds against the plain operations that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bert_jax.model import workarounds


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape, np.float32))


def test_norm_is_that_of_optax():
    tree = {"scalar": draw(), "vector": draw(7), "kernel": draw(3, 5, 2)}
    np.testing.assert_allclose(jax.jit(workarounds.norm)(tree), optax.tree.norm(tree), rtol=1e-6)
    assert not np.isfinite(workarounds.norm({"large": jnp.full(2, 1e30)}))
    assert np.isnan(workarounds.norm({**tree, "bad": jnp.array([1.0, jnp.nan])}))


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6)])
def test_add_bias_is_a_sum_with_its_gradients(shape):
    x, bias, weights = draw(*shape), draw(6), draw(*shape)

    def loss(add):
        return lambda x, bias: jnp.sum(jnp.tanh(add(x, bias)) * weights)

    expected = jax.value_and_grad(loss(jnp.add), argnums=(0, 1))(x, bias)
    found = jax.jit(jax.value_and_grad(loss(workarounds.add_bias), argnums=(0, 1)))(x, bias)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "function", [lambda x: workarounds.norm([x]), lambda x: jax.vjp(workarounds.add_bias, x, x[0])[1](x)[1]],
    ids=["norm", "add_bias"],
)  # fmt: skip
def test_only_a_cpu_adds_up_by_a_product(function):
    """Elsewhere the product would be one of rounded numbers, or slower than the sum."""
    texts = {
        platform: jax.jit(function).trace(draw(4, 6)).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "tpu", "cuda")
    }
    assert {platform for platform, text in texts.items() if "dot_general" in text} == {"cpu"}


def product_and_gradients(equation: str, x: jax.Array, kernel: jax.Array, weights: jax.Array) -> list[jax.Array]:
    product, back = jax.vjp(lambda x, kernel: workarounds.weight_einsum(equation, x, kernel), x, kernel)
    return [product, *back(weights)]


@pytest.mark.parametrize("kernel_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize(
    ("equation", "inputs", "outputs"),
    [("td,df->tf", (32,), (48,)), ("td,dcnh->tcnh", (32,), (3, 2, 16)), ("tnh,nhd->td", (2, 16), (32,))],
)
def test_a_product_in_bfloat16_is_rounded_once(equation, inputs, outputs, tokens, kernel_dtype):
    """The gradient of a float32 kernel is not rounded at all; the number of tokens need not be a multiple of 8."""
    x, weights = (draw(2, tokens, *axes).astype(jnp.bfloat16) for axes in (inputs, outputs))
    kernel = draw(*inputs, *outputs).astype(kernel_dtype)
    found = jax.jit(product_and_gradients, static_argnums=0)(equation, x, kernel, weights)
    assert [array.dtype for array in found] == [jnp.bfloat16, jnp.bfloat16, kernel_dtype]
    exact = np.asarray(x, np.float64).reshape(2 * tokens, -1)
    matrix = np.asarray(kernel.astype(jnp.bfloat16), np.float64).reshape(exact.shape[1], -1)
    gradient = np.asarray(weights, np.float64).reshape(2 * tokens, -1)
    expected = [exact @ matrix, gradient @ matrix.T, exact.T @ gradient]
    for array, other in zip(found, expected, strict=True):
        tolerance = 2.0**-8 if array.dtype == jnp.bfloat16 else 1e-6
        np.testing.assert_allclose(
            np.asarray(array, np.float64), other.reshape(array.shape), rtol=tolerance, atol=1e-5
        )  # fmt: skip


def test_only_a_cpu_multiplies_bfloat16_to_float32():
    """Elsewhere the product is one operation, which rounds its own sums."""
    x, kernel = jnp.ones((2, 8, 32), jnp.bfloat16), draw(32, 48)

    def lowered(platform: str) -> list[str]:
        traced = jax.jit(product_and_gradients, static_argnums=0).trace(
            "td,df->tf", x, kernel, jnp.ones((2, 8, 48), jnp.bfloat16)
        )
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        return [line.rsplit("x", 1)[-1] for line in text.splitlines() if "dot_general" in line]

    assert {platform: set(lowered(platform)) for platform in ("cpu", "tpu", "cuda")} == {
        "cpu": {"f32>"}, "tpu": {"bf16>"}, "cuda": {"bf16>"}
    }  # fmt: skip
