"""Optimizers of BERT pre-training, as optax transformations.

AdamW is the reference's (google-research/bert, `optimization.py`):

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  u = m / (sqrt(v) + eps) + weight_decay p,  p -= lr u

Bias correction is optional and off by default (optax.adamw always applies it), LayerNorms and biases do not decay, and
gradients are clipped by their global norm first.

LAMB (You et al. 2020, arXiv:1904.00962) scales the step of each tensor by the tensor's norm, p -= lr |p| / |u| u.
As in NVIDIA's recipe, tensors without decay (LayerNorms, biases) are not scaled, and bias correction should be on. The
tensors are those of the paper: one per layer, with query, key and value separate, although parameters are stacked here.

StableAdamW (Wortsman et al. 2023, arXiv:2304.13013) limits AdamW's step of each tensor, see `clip_updates`.

Muon (Jordan et al. 2024) orthogonalizes the momentum of each matrix of the encoder, see `orthogonalize`. The other
parameters have AdamW.
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from bert_jax.config_keys import OptimizerKeys
from bert_jax.errors import InputError
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


_TENSOR_AXES = ("layers", "qkv", "gate")  # axes that stack separate tensors, of BERT's paper or of a gated layer


def _own_axes(info: ParameterInfo) -> tuple[int, ...]:
    """Returns the axes of one of the paper's tensors in a parameter that may stack several."""
    return tuple(i for i, name in enumerate(info.logical_axes) if name not in _TENSOR_AXES)


def scale_by_adam(
    b1: float, b2: float, eps: float, *, bias_correction: bool, matrices: Parameters
) -> optax.GradientTransformationExtraArgs:
    """Computes Adam's direction with the reference's eps, outside the root, and optional bias correction.

    Where the argument `is_finite` of the update is False, the state stays as it is. `matrices` is a tree like the
    parameters: the `ParameterInfo` of those that Muon updates, which have no second moment, and False for the others.
    """

    def init(parameters: Parameters) -> AdamState:
        nu = jax.tree.map(lambda p, matrix: jnp.zeros(() if matrix else p.shape, p.dtype), parameters, matrices)
        return AdamState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, parameters), nu)

    def update(
        gradients: Parameters, state: AdamState, parameters: Any = None, *, is_finite: jax.Array | bool = True, **_: Any
    ) -> tuple[Parameters, AdamState]:
        # Selected here, and not after the direction is made of them, so that XLA writes each moment once.
        def moment(old: jax.Array, new: jax.Array, decay: float) -> jax.Array:
            return jnp.where(is_finite, decay * old + (1 - decay) * new, old)

        def first(m: jax.Array, g: jax.Array, matrix: Any) -> jax.Array:
            return moment(m, g, MUON_MOMENTUM if matrix else b1)

        def second(v: jax.Array, g: jax.Array, matrix: Any) -> jax.Array:
            return v if matrix else moment(v, jnp.square(g), b2)

        def direct(m: jax.Array, v: jax.Array, g: jax.Array, matrix: Any) -> jax.Array:
            if matrix:
                return orthogonalize(MUON_MOMENTUM * m + (1 - MUON_MOMENTUM) * g, matrix)
            return (m / correct_m) / (jnp.sqrt(v / correct_v) + eps)

        updates = state.updates + jnp.asarray(is_finite, jnp.int32)
        mu = jax.tree.map(first, state.mu, gradients, matrices)
        nu = jax.tree.map(second, state.nu, gradients, matrices)
        correct_m, correct_v = (1 - b1**updates, 1 - b2**updates) if bias_correction else (1.0, 1.0)
        return jax.tree.map(direct, mu, nu, gradients, matrices), AdamState(updates, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


MUON_MOMENTUM = 0.95
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def is_matrix(info: ParameterInfo) -> bool:
    """Returns whether Muon updates a parameter: the weights of the encoder's layers that map from or to `embed`."""
    return info.weight_decay and {"layers", "embed"} <= {*info.logical_axes}


def _newton_schulz(y: jax.Array) -> jax.Array:
    y /= jnp.maximum(jnp.linalg.norm(y, axis=(-2, -1), keepdims=True), 1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(5):
        gram = y @ jnp.matrix_transpose(y)
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y


@jax.named_scope("orthogonalize")
def orthogonalize(x: jax.Array, info: ParameterInfo) -> jax.Array:
    """Returns Muon's update of matrices: nearly their orthogonal factors, times 0.2 sqrt(max(rows, columns)).

    Five steps of Newton-Schulz with the quintic of Jordan et al. 2024 (kellerjordan.github.io/posts/muon) bring the
    singular values near 1. The factor, of Liu et al. 2025 (arXiv:2502.16982), gives the elements the root mean square
    of AdamW's updates. The rows of a matrix are the axis `embed`, its columns all others but those that stack matrices.
    Products are in fp32, with the device's default precision: on TPUs their operands are rounded to bfloat16.
    """
    rows = info.logical_axes.index("embed")
    columns = [axis for axis in _own_axes(info) if axis != rows]
    stacked = [axis for axis in range(x.ndim) if axis not in (rows, *columns)]
    order = (*stacked, rows, *columns)
    moved = x.transpose(order)
    y = moved.reshape(math.prod(moved.shape[: len(stacked)]), x.shape[rows], -1)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names:
        spec = PartitionSpec("data" if len(y) % mesh.shape["data"] == 0 else None)
        y = jax.shard_map(_newton_schulz, in_specs=spec, out_specs=spec)(y)
    else:
        y = _newton_schulz(y)
    return 0.2 * max(y.shape[-2:]) ** 0.5 * y.reshape(moved.shape).transpose(np.argsort(order))


def decay_mask(info: Parameters) -> Parameters:
    """Marks the parameters that decay with True, by their `ParameterInfo`."""
    return jax.tree.map(lambda one: one.weight_decay, info)


def scale_by_trust_ratio(info: Parameters) -> optax.GradientTransformation:
    """Scales updates by LAMB's |p| / |u| for each tensor that decays, by 1 if either norm is 0; others are unchanged.

    `info` is that of `make_optimizer`.
    """

    def scaled(u: jax.Array, p: jax.Array, info: ParameterInfo) -> jax.Array:
        if not info.weight_decay:
            return u
        norm_p, norm_u = (jnp.sqrt(jnp.sum(jnp.square(x), axis=_own_axes(info), keepdims=True)) for x in (p, u))
        is_defined = (norm_p > 0) & (norm_u > 0)
        return u * jnp.where(is_defined, norm_p / jnp.where(is_defined, norm_u, 1.0), 1.0)

    def update(updates: Parameters, state: Any, parameters: Any = None) -> tuple[Parameters, Any]:
        return jax.tree.map(scaled, updates, parameters, info), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def clip_updates(
    optimizer: optax.GradientTransformationExtraArgs, clip: optax.GradientTransformationExtraArgs, info: Parameters,
    b2: float, eps: float,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """Divides each tensor's direction, weight decay included, by max(1, RMS), which makes StableAdamW of AdamW.

    RMS is the root of the mean of g^2 / max(v, eps^2) over the tensor, with the clipped gradient g and the corrected
    second moment v after it (Wortsman et al. 2023, arXiv:2304.13013, algorithm 2). The word embeddings' padding counts
    in the mean. `optimizer` is a chain whose second link is that of `scale_by_adam`.
    """

    def update(gradients: Parameters, state: Any, parameters: Any = None, **known: Any) -> tuple[Parameters, Any]:
        direction, updated = optimizer.update(gradients, state, parameters, **known)
        clipped, _ = clip.update(gradients, state[0], **known)
        correct_v = 1 - b2 ** updated[1].updates

        def divide(d: jax.Array, g: jax.Array, v: jax.Array, info: ParameterInfo) -> jax.Array:
            ratio = jnp.square(g) / jnp.maximum(v / correct_v, eps**2)
            return d / jnp.maximum(1, jnp.sqrt(ratio.mean(axis=_own_axes(info), keepdims=True)))

        return jax.tree.map(divide, direction, clipped, updated[1].nu, info), updated

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


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
    # Always four links: AdamW, LAMB and StableAdamW have one structure of their state, and a run may change between
    # them. The arrays of Muon's state have other shapes: `claim_workdir` refuses a change from or to it.
    is_stable = config.name == "stable_adamw"
    matrices = jax.tree.map(lambda one: one if config.name == "muon" and is_matrix(one) else False, info)
    unclipped = optax.with_extra_args_support(optax.identity())
    clip = clip_by_norm(config.grad_clip_norm) if config.grad_clip_norm else unclipped
    optimizer = optax.chain(
        clip,
        scale_by_adam(
            config.b1, config.b2, config.eps, bias_correction=config.bias_correction or is_stable, matrices=matrices
        ),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask(info)),
        scale_by_trust_ratio(info) if config.name == "lamb" else optax.identity(),
    )
    return clip_updates(optimizer, clip, info, config.b2, config.eps) if is_stable else optimizer


_DEFAULTS = OptimizerKeys()


def count_steps(steps_or_share: float, total_steps: int) -> int:
    """Returns a number of steps; a number below 1 is a share of `total_steps`, rounded down."""
    return int(round(steps_or_share * total_steps, 6) if steps_or_share < 1 else steps_or_share)  # 0.29 * 100 < 29


def count_decay_steps(recipe: OptimizerKeys, total_steps: int) -> int:
    """Returns the steps of `recipe`'s decay; a share of `total_steps` above 0 has at least one."""
    return max(count_steps(recipe.decay_steps, total_steps), 1 if recipe.decay_steps else 0)


def check_schedule(recipe: OptimizerKeys, warmup_steps: float, total_steps: int) -> None:
    """Raises InputError for a key that the schedule does not read, and for a decay that begins before its warm-up ends.

    Args:
      recipe: the `optimizer` section.
      warmup_steps: steps or a share, below `total_steps`.
      total_steps: steps of the schedule.
    """
    for key, reader in {"decay_power": "polynomial", "decay_steps": "wsd", "decay_form": "wsd"}.items():
        value, default = getattr(recipe, key), getattr(_DEFAULTS, key)
        if recipe.schedule != reader and value != default:
            raise InputError(
                f"optimizer.{key}={value}: has no effect with optimizer.schedule={recipe.schedule}; set "
                f"optimizer.schedule={reader}, or optimizer.{key}={default}"
            )
    warmup, decay = count_steps(warmup_steps, total_steps), count_decay_steps(recipe, total_steps)
    if recipe.schedule == "wsd" and not 1 <= decay <= total_steps - warmup:
        raise InputError(
            f"optimizer.decay_steps={recipe.decay_steps}: {decay} steps of decay must be at least 1, and at most the "
            f"{total_steps - warmup} of the schedule's {total_steps} steps that follow its warm-up of {warmup}; set "
            f"optimizer.decay_steps={max(1, (total_steps - warmup) // 5)}"
        )


def learning_rate_schedule(
    peak: float, warmup_steps: float, total_steps: int, recipe: OptimizerKeys = _DEFAULTS, *, start: int = 0
) -> optax.Schedule:
    """Makes the schedule: peak * step / W below W = `warmup_steps`, then what `recipe.schedule` names.

    With T = `total_steps`, `linear` and `polynomial` are peak * (1 - step / T) ** power. Their decay counts from step
    0, so at W it is already below the peak (`optax.join_schedules` would start it at W); the reference's power is 1,
    NVIDIA's for LAMB is 0.5. `cosine` is peak * (1 + cos(pi x)) / 2 at a share x of the steps from W to T. `wsd`
    (warm-up, stable, decay; Hägele et al. 2024, arXiv:2405.18392) is the peak, and in the last steps
    peak * (1 - sqrt(x)) or peak * (1 - x) at a share x of the decay.

    The first update has a rate of 0 if there is a warm-up. Steps are counted from `start`, which is above 0 if a phase
    restarts the schedule. The result is a pytree whose leaves are all of its numbers: a program that takes it as an
    argument serves schedules of one name with any of them.

    Args:
      peak: the rate at the end of the warm-up.
      warmup_steps: steps; below 1 a share of `total_steps`.
      total_steps: steps of the schedule.
      recipe: has its name, and its decay.
      start: the step of the run that is step 0 of the schedule.
    """
    name = recipe.schedule if recipe.schedule != "wsd" else f"wsd, {recipe.decay_form}"
    warmup, decay = count_steps(warmup_steps, total_steps), count_decay_steps(recipe, total_steps)
    counts = (np.int32(count) for count in (warmup, decay, total_steps, start))
    return jax.tree_util.Partial(_rate_of(name), np.float32(peak), np.float32(recipe.decay_power), *counts)


@functools.cache  # `jax.jit` compares the functions of two schedules by identity
def _rate_of(name: str) -> Callable[..., jax.Array]:
    return functools.partial(_learning_rate, name)


def _learning_rate(
    name: str, peak: jax.Array, power: jax.Array, warmup: jax.Array, decay: jax.Array, total: jax.Array,
    start: jax.Array, step: jax.Array,
) -> jax.Array:  # fmt: skip
    step = jnp.asarray(step - start)
    done = jnp.minimum(step, total)
    left = (total - done) / total  # a ratio of integers: fp32 rounds it once

    def decayed() -> jax.Array:
        return jnp.maximum(0, decay - (total - done)) / decay

    shares: dict[str, Callable[[], jax.Array]] = {
        "linear": lambda: left,
        "polynomial": lambda: left**power,
        "cosine": lambda: (1 + jnp.cos(jnp.pi * ((done - warmup) / (total - warmup)))) / 2,
        "constant": lambda: jnp.float32(1),
        "wsd, 1-sqrt": lambda: 1 - jnp.sqrt(decayed()),
        "wsd, linear": lambda: 1 - decayed(),
    }
    return jnp.where(step < warmup, peak * step / jnp.maximum(1, warmup), peak * shares[name]())
