"""Building blocks: parameters with their rules, dense layers, activations, LayerNorm, the feed-forward block."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from bert_jax.model.bert_config import BertConfig
from bert_jax.model.workarounds import add_bias, erf, weight_einsum

Key = jax.Array

F = TypeVar("F", bound=Callable[..., Any])


def rematerialized(function: F) -> F:
    """Rematerializes the wrapped function in the backward pass; only its inputs are saved.

    For cheap work: in a Transformer the elementwise ops between products, whose results are many times their inputs.
    """
    return cast(F, jax.checkpoint(function, prevent_cse=False))


@dataclass(frozen=True)
class ParameterInfo:
    """Rules of a parameter, decided where it is made and read by the optimizer and by FSDP.

    Attributes:
      logical_axes: a name for each dimension, or None; `parallel.sharding` maps names to mesh axes.
      weight_decay: False for biases, LayerNorms and layer mixes. LAMB scales only steps of parameters that decay.
      compute_cast: True if FSDP casts it to the type of the computation before the all-gather.
    """

    logical_axes: tuple[str | None, ...]
    weight_decay: bool = True
    compute_cast: bool = False


def parameter(
    value: jax.Array, *axes: str | None, weight_decay: bool = True, compute_cast: bool = False
) -> nnx.Param[jax.Array]:
    """Makes a parameter with its `ParameterInfo`; `axes` names each dimension."""
    assert len(axes) == value.ndim, (axes, value.shape)
    return nnx.Param(value, info=ParameterInfo(axes, weight_decay, compute_cast))


def parameter_info(model: nnx.Module) -> dict[str, Any]:
    """Returns the `ParameterInfo` of each parameter, in a tree like the parameters."""
    is_variable = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
    info = jax.tree.map(lambda variable: variable.get_metadata("info"), nnx.state(model), is_leaf=is_variable)
    return nnx.to_pure_dict(info)


def bias(shape: tuple[int, ...], *axes: str | None) -> nnx.Param[jax.Array]:
    """Makes a parameter of zeros, fp32, without weight decay."""
    return parameter(jnp.zeros(shape, jnp.float32), *axes, weight_decay=False)


def truncated_normal(key: Key, shape: tuple[int, ...], stddev: float) -> jax.Array:
    """Draws from BERT's initializer, fp32: a normal of `stddev`, truncated at two standard deviations."""
    return stddev * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)


def dense(
    equation: str, x: jax.Array, kernel: nnx.Param[jax.Array], bias: nnx.Param[jax.Array] | None,
    part: int | None = None,
) -> jax.Array:  # fmt: skip
    """Computes `weight_einsum` plus bias, with a part of axis 1 of the kernel and of axis 0 of the bias if it is given.

    For the backward pass x and the kernel are saved as they are: a kernel in the type of x, its part, or x in another
    shape would take memory of its own beside the x that an attention kernel saves.
    """

    @rematerialized
    def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return weight_einsum(equation, x, kernel if part is None else kernel[:, part])

    y = product(x, kernel[...])
    return y if bias is None else add_bias(y, bias[...] if part is None else bias[part])


def activation(name: str, x: jax.Array) -> jax.Array:
    """Applies the activation that `hidden_act` names to x."""
    if name == "relu":
        return jax.nn.relu(x)
    if name == "gelu":
        x32 = x.astype(jnp.float32)  # in bfloat16, 1 + erf would lose the small values of the left tail
        return (0.5 * x32 * (1.0 + erf(x32 * math.sqrt(0.5)))).astype(x.dtype)
    return jax.nn.gelu(x, approximate=True)


class LayerNorm(nnx.Module):
    """LayerNorm over the last axis in fp32, with the two-pass variance that an eps of 1e-12 needs."""

    def __init__(self, size: int, eps: float, *, use_bias: bool = True, stack: tuple[int, ...] = ()):
        names = ("layers",) * len(stack)
        self.scale = parameter(jnp.ones((*stack, size), jnp.float32), *names, "embed", weight_decay=False)
        self.bias = bias((*stack, size), *names, "embed") if use_bias else None
        self.eps = eps

    @jax.named_scope("layer_norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., D] to [..., D] in the type of x."""

        @rematerialized
        def normalize(x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
            x32 = x.astype(jnp.float32)
            centered = x32 - x32.mean(axis=-1, keepdims=True)
            variance = jnp.square(centered).mean(axis=-1, keepdims=True)
            y = centered * jax.lax.rsqrt(variance + self.eps) * scale
            return (y if bias is None else y + bias).astype(x.dtype)

        scale = checkpoint_name(self.scale[...], "norm_scale")
        return normalize(x, scale, None if self.bias is None else self.bias[...])


class FeedForward(nnx.Module):
    """Feed-forward block: dense(F), activation, dense(D). A gated one multiplies the activation by another dense(F)."""

    def __init__(self, config: BertConfig, *, key: Key, stack: tuple[int, ...]):
        up, down = jax.random.split(key)
        size, inner = config.hidden_size, config.intermediate_size
        parts, names = ((2,), ("gate",)) if config.gated_mlp else ((), ())
        self.up_kernel = parameter(
            truncated_normal(up, (*stack, size, *parts, inner), config.initializer_range),
            "layers", "embed", *names, "mlp", compute_cast=True,
        )  # fmt: skip
        self.up_bias = bias((*stack, *parts, inner), "layers", *names, "mlp") if config.mlp_bias else None
        self.down_kernel = parameter(
            truncated_normal(down, (*stack, inner, size), config.output_range), "layers", "mlp", "embed",
            compute_cast=True,
        )  # fmt: skip
        self.down_bias = bias((*stack, size), "layers", "embed") if config.mlp_bias else None
        self.hidden_act = config.hidden_act
        self.is_gated = config.gated_mlp
        self.dropout_rate = config.mlp_dropout

    @jax.named_scope("feed_forward")
    def __call__(self, x: jax.Array, keys: Key | None = None) -> jax.Array:
        """Maps [B, L, D] to [B, L, D]. One key per row [B], also used after the block, turns dropout on."""
        project = partial(dense, "td,df->tf", x, self.up_kernel, self.up_bias)
        inner, *gates = [
            checkpoint_name(project(part), "feed_forward") for part in (range(2) if self.is_gated else [None])
        ]
        keep = None
        if keys is not None and self.dropout_rate:
            within = jax.vmap(jax.random.fold_in, (0, None))(keys, 1)
            keep = checkpoint_name(dropout_mask(inner.shape, self.dropout_rate, within), "dropout_mask")

        @rematerialized
        def activate_and_project(
            inner: jax.Array, gates: list[jax.Array], keep: jax.Array | None, kernel: jax.Array
        ) -> jax.Array:
            inner = activation(self.hidden_act, inner)
            for gate in gates:
                inner *= gate
            return weight_einsum("tf,fd->td", drop(inner, keep, self.dropout_rate), kernel)

        y: jax.Array = activate_and_project(inner, gates, keep, self.down_kernel[...])
        return y if self.down_bias is None else add_bias(y, self.down_bias[...])


@jax.named_scope("dropout")
def dropout_mask(shape: tuple[int, ...], rate: float, keys: Key | None) -> jax.Array | None:
    """Draws a mask bool [B, ...], False with probability `rate`; None without keys or for a rate of 0.

    Each row has its own key, [B]: the mask does not depend on which rows are computed together, and is the same on
    every mesh. An element's bits are a hash of its index and the two words of its row's key, with a third of the
    operations of `jax.random.bits`, whose Threefry is stronger than dropout needs and only makes the keys.
    """
    if keys is None or rate == 0:
        return None
    words = key_words(keys).reshape(-1, 2, *(1 for _ in shape[1:]))
    number = jnp.zeros((1, *shape[1:]), jnp.uint32)
    for axis in range(1, len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        number += stride * jax.lax.broadcasted_iota(jnp.uint32, number.shape, axis)
    return is_kept(number, words[:, 0], words[:, 1], rate)


def key_words(keys: Key) -> jax.Array:
    """Returns the two words of each row's key, uint32 [B, 2], for `is_kept`."""
    return jax.random.key_data(keys)[:, -2:]


def is_kept(number: jax.Array, first: jax.Array, second: jax.Array, rate: float) -> jax.Array:
    """Returns whether dropout keeps the element of an index, uint32, in the row whose key has the two words.

    The hash is `lowbias32` of https://github.com/skeeto/hash-prospector, with a word of the key before each of its two
    products. Of its 32 bits 31 are compared: TPUs have no comparison of unsigned numbers.
    """
    x = number + first
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D) ^ second
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return jnp.less(((x ^ (x >> 16)) >> 1).astype(jnp.int32), min(2**31 - 1, round((1 - rate) * 2**31)))


def drop(x: jax.Array, keep: jax.Array | None, rate: float) -> jax.Array:
    """Zeroes x where not `keep` and divides the rest by 1 - `rate`; returns x without a mask.

    Multiplies in fp32: rounded to bfloat16, the scale for a rate of 0.1 would be 0.16% too small.
    """
    if keep is None:
        return x
    return jnp.where(keep, (x.astype(jnp.float32) * (1 / (1 - rate))).astype(x.dtype), jnp.zeros((), x.dtype))


def dropout(x: jax.Array, rate: float, keys: Key | None) -> jax.Array:
    """Zeroes elements of x [B, ...] with probability `rate` and scales up the others; without keys returns x."""
    return drop(x, checkpoint_name(dropout_mask(x.shape, rate, keys), "dropout_mask"), rate)


def row_keys(key: Key, rows: jax.Array) -> Key:
    """Derives one key per row, [B], from the row numbers int32 [B] alone."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def keys_per_row(key: Key | None, rows: int) -> Key | None:
    """Returns keys [B] for a key, and keys [B] or None as they are."""
    return key if key is None or key.ndim else row_keys(key, jnp.arange(rows))


def split_keys(keys: Key | None, count: int) -> Key | tuple[None, ...]:
    """Splits keys [B] to [count, B]; without keys returns `count` Nones."""
    return (None,) * count if keys is None else jax.vmap(lambda key: jax.random.split(key, count), out_axes=1)(keys)
