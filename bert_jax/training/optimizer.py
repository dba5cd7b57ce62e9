"""Optimizers of BERT pre-training, as optax transformations.

AdamW is the reference's (google-research/bert, `optimization.py`):

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  u = m / (sqrt(v) + eps) + weight_decay p,  p -= lr u

Bias correction is optional and off by default (optax.adamw always applies it), LayerNorms and biases do not decay, and
gradients are clipped by their global norm first.

LAMB (You et al. 2020, arXiv:1904.00962) scales the step of each tensor by the tensor's norm, p -= lr |p| / |u| u.
As in NVIDIA's recipe, tensors without decay (LayerNorms, biases) are not scaled, and bias correction should be on. The
tensors are those of the paper: one per layer, with query, key and value separate, although parameters are stacked here.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bert_jax.config_keys import OptimizerKeys
from bert_jax.model.bert import Parameters
from bert_jax.model.layers import ParameterInfo


class AdamState(NamedTuple):
    """Number of updates, and first and second moments with the structure of the parameters."""

    updates: jax.Array
    mu: Parameters
    nu: Parameters


def clip_by_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """Clips gradients to a global norm of `limit`, as `optax.clip_by_global_norm` does but for rounding.

    The update can be given the norm as `grad_norm`. One factor for all elements is fused into the update of the
    moments, where XLA makes a division of each a pass of its own.
    """

    def update(g: Parameters, state: Any, p: Any = None, *, grad_norm: jax.Array | None = None, **_: Any) -> Any:
        grad_norm = optax.tree.norm(g) if grad_norm is None else grad_norm
        factor = jnp.where(grad_norm < limit, 1.0, limit / grad_norm)
        return jax.tree.map(lambda leaf: leaf * factor, g), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def scale_by_adam(b1: float, b2: float, eps: float, *, bias_correction: bool) -> optax.GradientTransformationExtraArgs:
    """Computes Adam's direction with the reference's eps, outside the root, and optional bias correction.

    Where the argument `is_finite` of the update is False, the state stays as it is.
    """

    def init(parameters: Parameters) -> AdamState:
        def zeros() -> Parameters:
            result: Parameters = jax.tree.map(jnp.zeros_like, parameters)
            return result

        return AdamState(jnp.zeros((), jnp.int32), zeros(), zeros())

    def update(
        gradients: Parameters, state: AdamState, parameters: Any = None, *, is_finite: jax.Array | bool = True, **_: Any
    ) -> tuple[Parameters, AdamState]:
        # Selected here, and not after the direction is made of them, so that XLA writes each moment once.
        updates = state.updates + jnp.asarray(is_finite, jnp.int32)
        mu = jax.tree.map(lambda m, g: jnp.where(is_finite, b1 * m + (1 - b1) * g, m), state.mu, gradients)
        nu = jax.tree.map(lambda v, g: jnp.where(is_finite, b2 * v + (1 - b2) * jnp.square(g), v), state.nu, gradients)
        correct_m, correct_v = (1 - b1**updates, 1 - b2**updates) if bias_correction else (1.0, 1.0)
        direction = jax.tree.map(lambda m, v: (m / correct_m) / (jnp.sqrt(v / correct_v) + eps), mu, nu)
        return direction, AdamState(updates, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def decay_mask(info: Parameters) -> Parameters:
    """Marks the parameters that decay with True, by their `ParameterInfo`."""
    result: Parameters = jax.tree.map(lambda one: one.weight_decay, info)
    return result


_TENSOR_AXES = ("layers", "qkv")  # axes that stack separate tensors of the paper


def scale_by_trust_ratio(info: Parameters) -> optax.GradientTransformation:
    """Scales updates by LAMB's |p| / |u| for each tensor that decays, by 1 if either norm is 0; others are unchanged.

    `info` is that of `make_optimizer`.
    """

    def scaled(u: jax.Array, p: jax.Array, info: ParameterInfo) -> jax.Array:
        if not info.weight_decay:
            return u
        within = tuple(i for i, name in enumerate(info.logical_axes) if name not in _TENSOR_AXES)
        norm_p, norm_u = (jnp.sqrt(jnp.sum(jnp.square(x), axis=within, keepdims=True)) for x in (p, u))
        is_defined = (norm_p > 0) & (norm_u > 0)
        return u * jnp.where(is_defined, norm_p / jnp.where(is_defined, norm_u, 1.0), 1.0)

    def update(updates: Parameters, state: Any, parameters: Any = None) -> tuple[Parameters, Any]:
        return jax.tree.map(scaled, updates, parameters, info), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def leave_untrained(
    optimizer: optax.GradientTransformationExtraArgs, parts: Collection[str]
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer: the direction of `parts` of the model is 0, and their moments do not change.

    Variables without a gradient keep their values in the reference, too. Weight decay alone would shrink them, with
    LAMB's trust ratio by the full learning rate at every step. Their moments stay in the state: a later phase may train
    them.
    """

    def has_parts(node: Any) -> bool:
        return isinstance(node, Mapping) and node.keys() >= set(parts)

    def keep(new: Any, old: Any) -> Any:
        return {**new, **{part: old[part] for part in parts}} if has_parts(new) else new

    def update(gradients: Parameters, state: Any, parameters: Any = None, **known: Any) -> tuple[Parameters, Any]:
        direction, updated = optimizer.update(gradients, state, parameters, **known)
        zeros = {part: jax.tree.map(jnp.zeros_like, direction[part]) for part in parts}
        return {**direction, **zeros}, jax.tree.map(keep, updated, state, is_leaf=has_parts)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def make_optimizer(config: OptimizerKeys, info: Parameters) -> optax.GradientTransformationExtraArgs:
    """Makes the transformation of gradients to a direction; the step scales it by minus the learning rate.

    Its update takes the global norm of the gradients as `grad_norm`. `config` is the `optimizer` section. `info` has
    the `ParameterInfo` of each parameter, in a tree like the parameters; see `abstract_parameters`.
    """
    # Always four links: AdamW and LAMB have one structure of their state, and a run may change between them.
    return optax.chain(
        clip_by_norm(config.grad_clip_norm) if config.grad_clip_norm else optax.identity(),
        scale_by_adam(config.b1, config.b2, config.eps, bias_correction=config.bias_correction),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask(info)),
        scale_by_trust_ratio(info) if config.name == "lamb" else optax.identity(),
    )


def learning_rate_schedule(
    peak: float, warmup_steps: int, total_steps: int, *, decay_power: float = 1.0, start: int = 0
) -> optax.Schedule:
    """Makes the schedule: peak * step / W below W = `warmup_steps`, then peak * (1 - step / T) ** power.

    T is `total_steps`. The decay counts from step 0, so at W it is already below the peak (`optax.join_schedules` would
    start it at W). The first update has a rate of 0. The reference's power is 1, NVIDIA's for LAMB is 0.5. Steps are
    counted from `start`, which is above 0 if a phase restarts the schedule. The result is a pytree whose leaves are the
    numbers but the power: a program that takes it as an argument serves schedules of any peak and length.
    """
    counts = (np.int32(count) for count in (warmup_steps, total_steps, start))
    return jax.tree_util.Partial(_rate_of_power(decay_power), np.float32(peak), *counts)


@functools.cache  # `jax.jit` compares the functions of two schedules by identity
def _rate_of_power(decay_power: float) -> Callable[..., jax.Array]:
    return functools.partial(_learning_rate, decay_power)


def _learning_rate(
    decay_power: float, peak: jax.Array, warmup_steps: jax.Array, total_steps: jax.Array, start: jax.Array,
    step: jax.Array,
) -> jax.Array:  # fmt: skip
    step = jnp.asarray(step - start)
    left = (total_steps - jnp.minimum(step, total_steps)) / total_steps  # a ratio of integers: fp32 rounds it once
    decayed = peak * (left if decay_power == 1.0 else left**decay_power)
    return jnp.where(step < warmup_steps, peak * step / jnp.maximum(1, warmup_steps), decayed)
