"""Optimizers and learning rate schedule of BERT pre-training, as optax transformations.

AdamW is the reference's (google-research/bert, `optimization.py`):

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  u = m / (sqrt(v) + eps) + weight_decay p,  p -= lr u

Bias correction is optional and off by default (optax.adamw always applies it), LayerNorms and biases do not decay, and
gradients are clipped by their global norm first.

LAMB (You et al. 2020, arXiv:1904.00962) scales the step of each tensor by the tensor's norm, p -= lr |p| / |u| u.
As in NVIDIA's recipe, tensors without decay (LayerNorms, biases) are not scaled, and bias correction should be on. The
tensors are those of the paper: one per layer, with query, key and value separate, although parameters are stacked here.
"""

import functools
import logging
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bert_jax.config import ConfigDict
from bert_jax.model.bert import Parameters
from bert_jax.model.layers import ParameterInfo

log = logging.getLogger(__name__)


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
    return jax.tree_util.Partial(functools.partial(_learning_rate, decay_power), np.float32(peak), *counts)


def _learning_rate(
    decay_power: float, peak: jax.Array, warmup_steps: jax.Array, total_steps: jax.Array, start: jax.Array,
    step: jax.Array,
) -> jax.Array:  # fmt: skip
    step = jnp.asarray(step - start)
    left = (total_steps - jnp.minimum(step, total_steps)) / total_steps  # a ratio of integers: fp32 rounds it once
    decayed = peak * (left if decay_power == 1.0 else left**decay_power)
    return jnp.where(step < warmup_steps, peak * step / jnp.maximum(1, warmup_steps), decayed)


OPTIMIZERS = ("adamw", "lamb")


class AdamState(NamedTuple):
    """Number of updates, and first and second moments with the structure of the parameters."""

    updates: jax.Array
    mu: Parameters
    nu: Parameters


def scale_by_adam(
    b1: float, b2: float, eps: float, *, bias_correction: bool, untrained: Collection[str] = ()
) -> optax.GradientTransformation:
    """Computes Adam's direction with the reference's eps, outside the root, and optional bias correction.

    Parts of the model in `untrained` have a direction of 0, and their moments do not change.
    """

    def init(parameters: Parameters) -> AdamState:
        def zeros() -> Parameters:
            return jax.tree.map(jnp.zeros_like, parameters)

        return AdamState(jnp.zeros((), jnp.int32), zeros(), zeros())

    def update(gradients: Parameters, state: AdamState, parameters: Any = None) -> tuple[Parameters, AdamState]:
        updates = state.updates + 1
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, gradients)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), state.nu, gradients)
        correct_m, correct_v = (1 - b1**updates, 1 - b2**updates) if bias_correction else (1.0, 1.0)
        direction = jax.tree.map(lambda m, v: (m / correct_m) / (jnp.sqrt(v / correct_v) + eps), mu, nu)
        for part in untrained:
            mu, nu = {**mu, part: state.mu[part]}, {**nu, part: state.nu[part]}
            direction = {**direction, part: jax.tree.map(jnp.zeros_like, direction[part])}
        return direction, AdamState(updates, mu, nu)

    return optax.GradientTransformation(init, update)


def decay_mask(info: Parameters, untrained: Collection[str] = ()) -> Parameters:
    """Marks the parameters that decay with True, by their `ParameterInfo`; parts in `untrained` do not decay."""
    return {
        part: jax.tree.map(lambda one, trained=part not in untrained: trained and one.weight_decay, tree)
        for part, tree in info.items()
    }


_TENSOR_AXES = ("layers", "qkv")  # axes that stack separate tensors of the paper


def scale_by_trust_ratio(info: Parameters, untrained: Collection[str] = ()) -> optax.GradientTransformation:
    """Scales updates by LAMB's |p| / |u| for each tensor that decays, by 1 if either norm is 0; others are unchanged.

    Takes the arguments of `decay_mask`.
    """

    def scaled(u: jax.Array, p: jax.Array, decays: bool, info: ParameterInfo) -> jax.Array:
        if not decays:
            return u
        within = tuple(i for i, name in enumerate(info.logical_axes) if name not in _TENSOR_AXES)
        norm_p, norm_u = (jnp.sqrt(jnp.sum(jnp.square(x), axis=within, keepdims=True)) for x in (p, u))
        is_defined = (norm_p > 0) & (norm_u > 0)
        return u * jnp.where(is_defined, norm_p / jnp.where(is_defined, norm_u, 1.0), 1.0)

    def update(updates: Parameters, state: Any, parameters: Any = None) -> tuple[Parameters, Any]:
        return jax.tree.map(scaled, updates, parameters, decay_mask(info, untrained), info), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def warn_of_uncorrected_lamb(sections: Iterable[ConfigDict]) -> None:
    """Logs one warning if an `optimizer` section is LAMB without bias correction, which is off by default.

    The default does not depend on the name: a run that started without bias correction resumes without it.
    """
    if any(section.name == "lamb" and not section.bias_correction for section in sections):
        log.warning(
            "optimizer.name=lamb with optimizer.bias_correction=False: the paper and NVIDIA's recipe correct the bias "
            "of the moments; set optimizer.bias_correction=True unless this is meant"
        )


def make_optimizer(
    config: ConfigDict, info: Parameters, *, untrained: Collection[str] = ()
) -> optax.GradientTransformation:
    """Makes the transformation of gradients to a direction; the step scales it by minus the learning rate.

    Args:
      config: the `optimizer` section.
      info: the `ParameterInfo` of each parameter, in a tree like the parameters; see `abstract_parameters`.
      untrained: parts of the model that the loss does not depend on. They keep their values, as variables without a
        gradient do in the reference: weight decay alone would shrink them, with LAMB's trust ratio by the full learning
        rate at every step. Their moments are in the state, so that a later phase may train them.
    """
    # Always four links: the state has one structure, and a run may resume with other settings.
    return optax.chain(
        optax.clip_by_global_norm(config.grad_clip_norm) if config.grad_clip_norm else optax.identity(),
        scale_by_adam(config.b1, config.b2, config.eps, bias_correction=config.bias_correction, untrained=untrained),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask(info, untrained)),
        scale_by_trust_ratio(info, untrained) if config.name == "lamb" else optax.identity(),
    )
