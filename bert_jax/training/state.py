"""What a run is made of at a step: parameters, optimizer moments and counters, made sharded from the start."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.model import BertConfig, abstract_parameters, initialize
from bert_jax.model.bert import Parameters
from bert_jax.training.sharding import cut_along_data, like_parameters, parameter_shardings


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

    `moments` is where the optimizer's moments of each parameter lie, and so where its update is made.
    """

    graph: nnx.GraphDef
    abstract: TrainState  # of jax.ShapeDtypeStruct with shardings
    shardings: TrainState
    moments: Parameters  # shardings
    make: Any  # (parts of the parameters that there are, if any) -> TrainState, jitted, never materialised unsharded


def describe_state(
    mesh: Mesh,
    model: BertConfig,
    optimizer: optax.GradientTransformation,
    seed: int,
    *,
    zero1: bool = False,
    **settings: Any,
) -> StateSpec:
    """Plans the state of a run; `settings` go to `initialize`. With `zero1` moments are cut along `data`."""
    graph, shapes, logical_axes = abstract_parameters(model, **settings)

    def make(there: Parameters | None = None) -> TrainState:
        _, parameters = initialize(model, jax.random.fold_in(jax.random.key(seed), 0), **settings)
        parameters |= there or {}  # what is replaced is not drawn, nor is drawing it compiled, which takes seconds
        # Each counter is an array of its own: donated buffers must not be shared.
        zero = [jnp.zeros((), jnp.int32) for _ in range(3)]
        return TrainState(zero[0], parameters, optimizer.init(parameters), zero[1], zero[2])

    abstract = jax.eval_shape(make)
    replicated = NamedSharding(mesh, PartitionSpec())
    of_parameters = parameter_shardings(mesh, logical_axes)
    moments = cut_along_data(shapes, of_parameters) if zero1 else of_parameters
    shardings = TrainState(
        step=replicated,
        parameters=of_parameters,
        optimizer_state=like_parameters(mesh, abstract.optimizer_state, shapes, moments),
        nonfinite_steps=replicated,
        nonfinite_streak=replicated,
    )
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings
    )
    return StateSpec(graph, abstract, shardings, moments, jax.jit(make, out_shardings=shardings))
