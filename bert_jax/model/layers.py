"""The small parts: parameters with named axes, LayerNorm, dropout, activations."""

import jax
import jax.numpy as jnp
from flax import nnx

Key = jax.Array

_DROPOUT_LEVELS = 1 << 16


def parameter(value: jax.Array, *axes: str | None) -> nnx.Param:
    """A parameter whose dimensions carry logical names; what they map to on a mesh is not the model's business."""
    assert len(axes) == value.ndim, (axes, value.shape)
    return nnx.Param(value, logical_axes=axes)


def truncated_normal(key: Key, shape: tuple[int, ...], stddev: float) -> jax.Array:
    """BERT's initializer: a normal of `stddev` with what falls beyond two of them drawn again. fp32."""
    return stddev * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)


def dropout(x: jax.Array, rate: float, key: Key | None) -> jax.Array:
    """Zeroes elements with probability `rate` and scales up the others; no key, no dropout.

    One 32-bit draw serves two neighbours on the last axis: drawing bits is the larger part of dropout's time. A 16-bit
    threshold realises `rate` to 8e-6, and the scale is that of what is realised. Bits depend on the key and the
    element's global position alone (partitionable threefry), so every mesh drops the same elements.
    """
    if key is None or rate == 0.0:
        return x
    keep_levels = _DROPOUT_LEVELS - round(rate * _DROPOUT_LEVELS)
    *leading, last = x.shape
    pairs = jax.random.bits(key, (*leading, -(-last // 2)), jnp.uint32)
    bits = jax.lax.bitcast_convert_type(pairs, jnp.uint16).reshape(*leading, -1)[..., :last]
    scale = jnp.asarray(_DROPOUT_LEVELS / keep_levels, x.dtype)
    return jnp.where(bits < keep_levels, x * scale, jnp.zeros((), x.dtype))


def split_key(key: Key | None, count: int) -> tuple[Key | None, ...]:
    """`count` keys from one, or as many Nones from none."""
    return (None,) * count if key is None else tuple(jax.random.split(key, count))


def activation(name: str, x: jax.Array) -> jax.Array:
    """The function that `hidden_act` names, of `x`."""
    if name == "relu":
        return jax.nn.relu(x)
    return jax.nn.gelu(x, approximate=name in ("gelu_new", "gelu_pytorch_tanh"))


class LayerNorm(nnx.Module):
    """LayerNorm over the last axis in fp32, by the two-pass variance that an eps of 1e-12 needs."""

    def __init__(self, size: int, eps: float, *, stack: tuple[int, ...] = ()):
        names = ("layers",) * len(stack)
        self.scale = parameter(jnp.ones((*stack, size), jnp.float32), *names, "embed")
        self.bias = parameter(jnp.zeros((*stack, size), jnp.float32), *names, "embed")
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] to [..., D], in the type of `x`."""
        x32 = x.astype(jnp.float32)
        centered = x32 - x32.mean(axis=-1, keepdims=True)
        variance = jnp.square(centered).mean(axis=-1, keepdims=True)
        y = centered * jax.lax.rsqrt(variance + self.eps) * self.scale[...] + self.bias[...]
        return y.astype(x.dtype)
