"""Workarounds against the plain operations that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model import workarounds


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


def logits_and_gradients(x: jax.Array, words: jax.Array, weights: jax.Array) -> list[jax.Array]:
    logits, back = jax.vjp(workarounds.vocabulary_product, x, words)
    return [logits, *back(weights)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_logits_are_not_rounded(rows, dtype):
    """In bfloat16 their gradient is, as each operand of a product; the gradient of the words is not."""
    x, words, weights = draw(rows, 32).astype(dtype), draw(100, 32), draw(rows, 100)
    found = jax.jit(logits_and_gradients)(x, words, weights)
    assert [array.dtype for array in found] == [jnp.float32, dtype, jnp.float32]
    exact, matrix, gradient = (np.asarray(array.astype(dtype), np.float64) for array in (x, words, weights))
    expected = [exact @ matrix.T, gradient @ matrix, gradient.T @ exact]
    for array, other in zip(found, expected, strict=True):
        tolerance = 2.0**-8 if array.dtype == jnp.bfloat16 else 1e-6
        np.testing.assert_allclose(np.asarray(array, np.float64), other, rtol=tolerance, atol=1e-5)


def test_only_a_cpu_rounds_the_gradient_of_logits():
    """Elsewhere the precision of products is that of the platform."""
    x, words, weights = jnp.ones((8, 32), jnp.bfloat16), draw(100, 32), draw(8, 100)
    texts = {
        platform: jax.jit(logits_and_gradients).trace(x, words, weights).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "tpu", "cuda")
    }
    assert {platform for platform, text in texts.items() if "(tensor<8x100xf32>) -> tensor<8x100xbf16>" in text} == {
        "cpu"
    }
