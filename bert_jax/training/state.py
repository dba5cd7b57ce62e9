"""What a run is made of at a step: parameters, optimizer moments and counters, made sharded from the start."""

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.model import BertConfig, abstract_parameters, initialize
from bert_jax.model.bert import Parameters
from bert_jax.parallel.sharding import cut_along_data, like_parameters, parameter_shardings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """A pytree: of arrays, or of what stands for them (shapes, shardings). Counters are int32 scalars.

    `step` counts batches consumed, whether their update was taken or skipped; `nonfinite_steps` the skipped ones,
    `nonfinite_streak` those in a row up to now.
    """

    step: Any
    parameters: Parameters
    optimizer_state: Any
    nonfinite_steps: Any
    nonfinite_streak: Any


@dataclass(frozen=True)
class StateSpec:
    """The state before it exists: the model's graph, shapes and shardings, and the function that makes it.

    `moments` is where the optimizer's moments of each parameter lie, and so where its update is made. Frozen parts
    of the model have none and are not in it.
    """

    graph: nnx.GraphDef
    abstract: TrainState  # of jax.ShapeDtypeStruct with shardings
    shardings: TrainState
    moments: Parameters  # shardings
    make: Any  # (parts of the parameters that there are, if any) -> TrainState, jitted, never materialised unsharded


def without(parts: Collection[str], parameters: Parameters) -> Parameters:
    """`parameters`, or a tree like them, but for some parts of the model."""
    return {part: value for part, value in parameters.items() if part not in parts}


def key_data(seed: int) -> np.ndarray:
    """The key of a seed as numbers, which a program may have as an argument on any number of hosts."""
    return np.asarray(jax.random.key_data(jax.random.key(seed)))


def describe_state(
    mesh: Mesh,
    model: BertConfig,
    optimizer: optax.GradientTransformation,
    seed: int,
    *,
    zero1: bool = False,
    frozen: Collection[str] = (),
    **settings: Any,
) -> StateSpec:
    """Plans the state of a run; `settings` go to `initialize`.

    With `zero1` moments are cut along `data`. The parts of the model that are `frozen` stay as they are: the optimizer
    gets all others.
    """
    graph, shapes, logical_axes = abstract_parameters(model, **settings)

    def make(seed_data: jax.Array, there: Parameters | None = None) -> TrainState:
        of_seed = jax.random.wrap_key_data(seed_data)
        _, parameters = initialize(model, jax.random.fold_in(of_seed, 0), **settings)
        parameters |= there or {}  # what is replaced is not drawn, nor is drawing it compiled, which takes seconds
        # Each counter is an array of its own: donated buffers must not be shared.
        zero = [jnp.zeros((), jnp.int32) for _ in range(3)]
        return TrainState(zero[0], parameters, optimizer.init(without(frozen, parameters)), zero[1], zero[2])

    abstract = jax.eval_shape(make, key_data(seed))
    replicated = NamedSharding(mesh, PartitionSpec())
    of_parameters = parameter_shardings(mesh, logical_axes)
    trained, moments = without(frozen, shapes), without(frozen, of_parameters)
    if zero1:
        moments = cut_along_data(trained, moments)
    shardings = TrainState(
        step=replicated,
        parameters=of_parameters,
        optimizer_state=like_parameters(mesh, abstract.optimizer_state, trained, moments),
        nonfinite_steps=replicated,
        nonfinite_streak=replicated,
    )
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings
    )
    jitted = jax.jit(make, out_shardings=shardings, donate_argnums=1)
    return StateSpec(graph, abstract, shardings, moments, functools.partial(jitted, key_data(seed)))
