"""Building blocks: parameters with named axes, LayerNorm, dropout, activations."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

Key = jax.Array

_DROPOUT_LEVELS = 1 << 16


@dataclass(frozen=True)
class ParameterInfo:
    """Rules of a parameter, decided where it is made and read by the optimizer and by FSDP.

    Attributes:
      logical_axes: a name for each dimension, or None; `parallel.sharding` maps names to mesh axes.
      weight_decay: False for biases, LayerNorms and layer mixes. LAMB scales the step of the others alone.
      compute_cast: True if FSDP casts it to the type of the computation before the all-gather.
    """

    logical_axes: tuple[str | None, ...]
    weight_decay: bool = True
    compute_cast: bool = False


def parameter(value: jax.Array, *axes: str | None, weight_decay: bool = True, compute_cast: bool = False) -> nnx.Param:
    """Makes a parameter with its `ParameterInfo`; `axes` names each dimension."""
    assert len(axes) == value.ndim, (axes, value.shape)
    return nnx.Param(value, info=ParameterInfo(axes, weight_decay, compute_cast))


def bias(shape: tuple[int, ...], *axes: str | None) -> nnx.Param:
    """Makes a parameter of zeros, fp32, without weight decay."""
    return parameter(jnp.zeros(shape, jnp.float32), *axes, weight_decay=False)


def truncated_normal(key: Key, shape: tuple[int, ...], stddev: float) -> jax.Array:
    """Draws from BERT's initializer, fp32: a normal of `stddev`, truncated at two standard deviations."""
    return stddev * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)


rematerialized: Any = functools.partial(jax.checkpoint, prevent_cse=False)
"""Rematerializes the wrapped function in the backward pass; only its inputs are saved.

For cheap work: in a Transformer the elementwise ops between products, whose results are many times their inputs.
"""


def project(equation: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes `jnp.einsum(equation, x, kernel)` in the type of x [B, L, ...], with B and L merged to one axis.

    `equation` names the merged axis first. With two axes, XLA:CPU transposes the operands of the kernel's gradient and
    multiplies at half speed.
    """
    product = jnp.einsum(equation, x.reshape(-1, *x.shape[2:]), kernel.astype(x.dtype))
    return product.reshape(*x.shape[:2], *product.shape[1:])


def dense(equation: str, x: jax.Array, kernel: nnx.Param, bias: nnx.Param) -> jax.Array:
    """Computes `project` plus bias. Casts of the kernel to the type of x are not saved for the backward pass."""

    @rematerialized
    def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return project(equation, x, kernel)

    return product(x, kernel[...]) + bias[...].astype(x.dtype)


def dropout_mask(shape: tuple[int, ...], rate: float, keys: Key | None) -> jax.Array | None:
    """Draws a mask bool [B, ...], False with probability `rate`; None without keys or for a rate of 0.

    Each row has its own key, [B]: the mask does not depend on which rows are computed together, and is the same on
    every mesh. One 32-bit draw serves two neighbours on the last axis. A 16-bit threshold realizes `rate` to 8e-6.
    """
    if keys is None or rate == 0.0:
        return None
    *leading, last = shape
    pairs = _random_words(keys, (*leading[1:], -(-last // 2)))
    bits = jax.lax.bitcast_convert_type(pairs, jnp.uint16).reshape(*leading, -1)[..., :last]
    return bits < _keep_levels(rate)


def _random_words(keys: Key, shape: tuple[int, ...]) -> jax.Array:
    """Draws uint32 [B, *shape] from keys [B]: hashes each element's index with the two words of its row's key.

    Takes a third of the operations of `jax.random.bits`, whose Threefry is stronger than dropout needs and only makes
    the keys. Not for other uses: no two words of a row are equal.
    """
    words = jax.random.key_data(keys)[:, -2:].reshape(-1, 2, *(1 for _ in shape))
    number = jnp.zeros((1, *shape), jnp.uint32)
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        number += stride * jax.lax.broadcasted_iota(jnp.uint32, number.shape, axis + 1)
    return _scramble(_scramble(number + words[:, 0]) ^ words[:, 1])


def _scramble(x: jax.Array) -> jax.Array:
    """Mixes uint32 bijectively, each bit depending on all: `lowbias32` of https://github.com/skeeto/hash-prospector."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _keep_levels(rate: float) -> int:
    return _DROPOUT_LEVELS - round(rate * _DROPOUT_LEVELS)


def drop(x: jax.Array, keep: jax.Array | None, rate: float) -> jax.Array:
    """Zeroes x where not `keep` and scales the rest by the realized rate; returns x without a mask.

    Multiplies in fp32: rounded to bfloat16, the scale for a rate of 0.1 would be 0.16% too small.
    """
    if keep is None:
        return x
    scale = jnp.float32(_DROPOUT_LEVELS / _keep_levels(rate))
    return jnp.where(keep, (x.astype(jnp.float32) * scale).astype(x.dtype), jnp.zeros((), x.dtype))


def dropout(x: jax.Array, rate: float, keys: Key | None) -> jax.Array:
    """Zeroes elements of x [B, ...] with probability `rate` and scales up the others; without keys returns x."""
    return drop(x, checkpoint_name(dropout_mask(x.shape, rate, keys), "dropout_mask"), rate)


def row_keys(key: Key, rows: jax.Array) -> Key:
    """Derives one key per row, [B], from the row numbers int32 [B] alone."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def split_keys(keys: Key | None, count: int) -> Key | tuple[None, ...]:
    """Splits keys [B] to [count, B]; without keys returns `count` Nones."""
    return (None,) * count if keys is None else jax.vmap(lambda key: jax.random.split(key, count), out_axes=1)(keys)


@jax.custom_jvp
def _erfc(x: jax.Array) -> jax.Array:
    """Returns `jax.lax.erfc(x)`, whose derivative works inside of `jax.shard_map` and costs one exponential.

    The derivative in jax 0.12.0 is a `polynomial` primitive of x and of constant coefficients. `lax.polynomial` binds
    them without a cast to the varying manual axes of x, so the trace ends in "Primitive polynomial requires varying
    manual axes to match". `jnp.argmax` once had the same defect: https://github.com/jax-ml/jax/issues/28334. The
    derivative below is that of jax 0.10 and 0.11. It can go once `lax.polynomial` casts its coefficients, which jax
    0.12.0 and 0.12.0.1 do not.
    """
    return jax.lax.erfc(x)


@_erfc.defjvp
def _erfc_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    return _erfc(x), -2.0 / math.sqrt(math.pi) * (tangent * jnp.exp(-jnp.square(x)))


def activation(name: str, x: jax.Array) -> jax.Array:
    """Applies the activation that `hidden_act` names to x."""
    if name == "relu":
        return jax.nn.relu(x)
    if name == "gelu":
        return 0.5 * x * _erfc(-x * math.sqrt(0.5))
    return jax.nn.gelu(x, approximate=True)


class LayerNorm(nnx.Module):
    """LayerNorm over the last axis in fp32, with the two-pass variance that an eps of 1e-12 needs."""

    def __init__(self, size: int, eps: float, *, stack: tuple[int, ...] = ()):
        names = ("layers",) * len(stack)
        self.scale = parameter(jnp.ones((*stack, size), jnp.float32), *names, "embed", weight_decay=False)
        self.bias = bias((*stack, size), *names, "embed")
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., D] to [..., D] in the type of x."""

        @rematerialized
        def normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
            x32 = x.astype(jnp.float32)
            centered = x32 - x32.mean(axis=-1, keepdims=True)
            variance = jnp.square(centered).mean(axis=-1, keepdims=True)
            return centered * jax.lax.rsqrt(variance + self.eps) * scale

        return (normalize(x, self.scale[...]) + self.bias[...]).astype(x.dtype)
