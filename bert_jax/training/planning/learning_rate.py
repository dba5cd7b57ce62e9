"""Schedule of the learning rate: linear warm-up, then polynomial decay."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax


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
