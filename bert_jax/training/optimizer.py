"""The optimizers and the schedule of BERT pre-training, as optax transformations.

AdamW is the reference's (google-research/bert, `optimization.py`):

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  u = m / (sqrt(v) + eps) + weight_decay p,  p -= lr u

There is no bias correction unless it is chosen (optax.adamw cannot leave it out), LayerNorms and biases do not decay,
and gradients are clipped by their global norm first.

LAMB (You et al. 2020, arXiv:1904.00962) scales each tensor's step to the tensor's own size, p -= lr |p| / |u| u, as
NVIDIA's recipe has it: what does not decay (LayerNorms, biases) is not scaled, and bias correction is to be on. A
tensor is one of the paper's: of one layer, and query, key and value apart, however parameters are stacked here.
"""

import logging
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bert_jax.config import ConfigDict
from bert_jax.model.bert import Parameters

log = logging.getLogger(__name__)


def learning_rate_schedule(
    peak: float, warmup_steps: int, total_steps: int, *, decay_power: float = 1.0, start: int = 0
) -> optax.Schedule:
    """peak * step / W below W, then peak * (1 - step / T) ** power: the decay is measured from step 0, so at W it is
    under the peak already (`optax.join_schedules` would start it there). The first update has a rate of 0.

    The reference's power is 1, NVIDIA's for LAMB 0.5. Steps are counted from `start` on, which is not 0 where a phase
    restarts the schedule. The result is a pytree whose one leaf is the peak: what is compiled with it as an argument
    serves all peaks.
    """

    def schedule(peak: jax.Array, step: jax.Array) -> jax.Array:
        step = jnp.asarray(step - start)
        left = (
            total_steps - jnp.minimum(step, total_steps)
        ) / total_steps  # of integers: exact in fp32 to its last bit
        decayed = peak * (left if decay_power == 1.0 else left**decay_power)
        return jnp.where(step < warmup_steps, peak * step / max(1, warmup_steps), decayed)

    return jax.tree_util.Partial(schedule, np.float32(peak))


OPTIMIZERS = ("adamw", "lamb")


class AdamState(NamedTuple):
    """First and second moments, each like the parameters, and the updates made."""

    updates: jax.Array
    mu: Parameters
    nu: Parameters


def scale_by_adam(
    b1: float, b2: float, eps: float, *, bias_correction: bool, untrained: Collection[str] = ()
) -> optax.GradientTransformation:
    """Adam's direction with the reference's eps, outside the root, and bias correction as a choice.

    The direction of the parts of the model in `untrained` is 0, and their moments stay as they are.
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


def decay_mask(parameters: Parameters, untrained: Collection[str] = ()) -> Parameters:
    """True for what decays: by name, everything but biases and what belongs to a LayerNorm or a mix of layers.

    The parts of the model in `untrained` do not decay.
    """

    def decays(path: tuple[Any, ...], _: Any) -> bool:
        names = [entry.key for entry in path]
        is_kept = names[-1].endswith("bias") or any(name.endswith(("norm", "mix")) for name in names)
        return not is_kept and names[0] not in untrained

    return jax.tree_util.tree_map_with_path(decays, parameters)


_TENSOR_AXES = ("layers", "qkv")  # stack tensors that are the paper's own


def scale_by_trust_ratio(logical_axes: Parameters, untrained: Collection[str] = ()) -> optax.GradientTransformation:
    """LAMB's |p| / |u| for each tensor that decays, 1 where either norm is 0; all others are left as they are.

    Args:
      logical_axes: a tree like the parameters, of their axes' names.
      untrained: as of `decay_mask`.
    """

    def scaled(u: jax.Array, p: jax.Array, decays: bool, axes: tuple[str | None, ...]) -> jax.Array:
        if not decays:
            return u
        within = tuple(i for i, name in enumerate(axes) if name not in _TENSOR_AXES)
        norm_p, norm_u = (jnp.sqrt(jnp.sum(jnp.square(x), axis=within, keepdims=True)) for x in (p, u))
        is_defined = (norm_p > 0) & (norm_u > 0)
        return u * jnp.where(is_defined, norm_p / jnp.where(is_defined, norm_u, 1.0), 1.0)

    def update(updates: Parameters, state: Any, parameters: Any = None) -> tuple[Parameters, Any]:
        return jax.tree.map(scaled, updates, parameters, decay_mask(parameters, untrained), logical_axes), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def warn_of_uncorrected_lamb(sections: Iterable[ConfigDict]) -> None:
    """Logs one warning if an `optimizer` section is LAMB without bias correction, which the key's default leaves off.

    The key does not follow the name: a run that began without bias correction continues without it.
    """
    if any(section.name == "lamb" and not section.bias_correction for section in sections):
        log.warning(
            "optimizer.name=lamb with optimizer.bias_correction=False: the paper and NVIDIA's recipe correct the bias "
            "of the moments; set optimizer.bias_correction=True unless this is meant"
        )


def make_optimizer(
    config: ConfigDict, logical_axes: Parameters, *, untrained: Collection[str] = ()
) -> optax.GradientTransformation:
    """The transformation that turns gradients into a direction; the step scales it by minus the learning rate.

    Args:
      config: the `optimizer` section.
      logical_axes: a tree like the parameters, of their axes' names; see `abstract_parameters`.
      untrained: parts of the model that the loss does not depend on. They keep their values, as variables without a
        gradient do in the reference: weight decay alone would shrink them, and LAMB's trust ratio by the whole learning
        rate at every step. Their moments are in the state all the same, so that a phase may train them.
    """
    # Always four links, so that the state has one structure and a run may go on with other settings.
    return optax.chain(
        optax.clip_by_global_norm(config.grad_clip_norm) if config.grad_clip_norm else optax.identity(),
        scale_by_adam(config.b1, config.b2, config.eps, bias_correction=config.bias_correction, untrained=untrained),
        optax.add_decayed_weights(config.weight_decay, mask=lambda tree: decay_mask(tree, untrained)),
        scale_by_trust_ratio(logical_axes, untrained) if config.name == "lamb" else optax.identity(),
    )
