"""The reference's optimizer and schedule (google-research/bert, `optimization.py`), as optax transformations.

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  p -= lr (m / (sqrt(v) + eps) + weight_decay p)

There is no bias correction (optax.adamw cannot leave it out), LayerNorms and biases do not decay, and gradients are
clipped by their global norm first.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bert_jax.config import ConfigDict
from bert_jax.model.bert import Parameters


def learning_rate_schedule(peak: float, warmup_steps: int, total_steps: int, *, start: int = 0) -> optax.Schedule:
    """peak * step / W below W, then peak * (1 - step / T): the decay is measured from step 0, so at W it is already
    under the peak, by W / T (`optax.join_schedules` would start it there). The first update has a rate of 0.

    Steps are counted from `start` on, which is not 0 where a phase restarts the schedule.
    """

    def schedule(step: jax.Array) -> jax.Array:
        step = jnp.asarray(step - start, jnp.float32)
        decayed = peak * (1 - jnp.minimum(step, total_steps) / total_steps)
        return jnp.where(step < warmup_steps, peak * step / max(1, warmup_steps), decayed)

    return schedule


class AdamState(NamedTuple):
    """First and second moments, each like the parameters, and the updates made."""

    updates: jax.Array
    mu: Parameters
    nu: Parameters


def scale_by_adam(b1: float, b2: float, eps: float, *, bias_correction: bool) -> optax.GradientTransformation:
    """Adam's direction with the reference's eps, outside the root, and bias correction as a choice."""

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
        return direction, AdamState(updates, mu, nu)

    return optax.GradientTransformation(init, update)


def decay_mask(parameters: Parameters) -> Parameters:
    """True for what decays: by name, everything but biases and what belongs to a LayerNorm."""

    def decays(path: tuple[Any, ...], _: Any) -> bool:
        names = [entry.key for entry in path]
        return not (names[-1].endswith("bias") or any(name.endswith("norm") for name in names))

    return jax.tree_util.tree_map_with_path(decays, parameters)


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """The transformation that turns gradients into a direction; the step scales it by minus the learning rate.

    `config` is the `optimizer` section.
    """
    transformations = [
        scale_by_adam(config.b1, config.b2, config.eps, bias_correction=config.bias_correction),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
    ]
    if config.grad_clip_norm:
        transformations.insert(0, optax.clip_by_global_norm(config.grad_clip_norm))
    return optax.chain(*transformations)
