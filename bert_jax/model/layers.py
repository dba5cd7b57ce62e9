"""Building blocks: parameters with their rules, dense layers, activations, LayerNorm, the feed-forward block."""

import math
from collections.abc import Callable
from dataclasses import dataclass
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


def dense(equation: str, x: jax.Array, kernel: nnx.Param[jax.Array], bias: nnx.Param[jax.Array]) -> jax.Array:
    """Computes `weight_einsum` plus bias.

    For the backward pass x and the kernel are saved as they are: a kernel in the type of x, or x in another shape,
    would take memory of its own beside the x that an attention kernel saves.
    """

    @rematerialized
    def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return weight_einsum(equation, x, kernel)

    return add_bias(product(x, kernel[...]), bias[...])


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

    def __init__(self, size: int, eps: float, *, stack: tuple[int, ...] = ()):
        names = ("layers",) * len(stack)
        self.scale = parameter(jnp.ones((*stack, size), jnp.float32), *names, "embed", weight_decay=False)
        self.bias = bias((*stack, size), *names, "embed")
        self.eps = eps

    @jax.named_scope("layer_norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., D] to [..., D] in the type of x."""

        @rematerialized
        def normalize(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
            x32 = x.astype(jnp.float32)
            centered = x32 - x32.mean(axis=-1, keepdims=True)
            variance = jnp.square(centered).mean(axis=-1, keepdims=True)
            return (centered * jax.lax.rsqrt(variance + self.eps) * scale + bias).astype(x.dtype)

        return normalize(x, checkpoint_name(self.scale[...], "norm_scale"), self.bias[...])


class FeedForward(nnx.Module):
    """Feed-forward block: dense(F), activation, dense(D)."""

    def __init__(self, config: BertConfig, *, key: Key, stack: tuple[int, ...]):
        up, down = jax.random.split(key)
        size, inner, std = config.hidden_size, config.intermediate_size, config.initializer_range
        self.up_kernel = parameter(
            truncated_normal(up, (*stack, size, inner), std), "layers", "embed", "mlp", compute_cast=True
        )
        self.up_bias = bias((*stack, inner), "layers", "mlp")
        self.down_kernel = parameter(
            truncated_normal(down, (*stack, inner, size), std), "layers", "mlp", "embed", compute_cast=True
        )
        self.down_bias = bias((*stack, size), "layers", "embed")
        self.hidden_act = config.hidden_act

    @jax.named_scope("feed_forward")
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, L, D] to [B, L, D]."""
        inner = checkpoint_name(dense("td,df->tf", x, self.up_kernel, self.up_bias), "feed_forward")

        @rematerialized
        def activate_and_project(inner: jax.Array, kernel: jax.Array) -> jax.Array:
            return weight_einsum("tf,fd->td", activation(self.hidden_act, inner), kernel)

        result: jax.Array = activate_and_project(inner, self.down_kernel[...]) + self.down_bias[...].astype(x.dtype)
        return result
