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
