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
