"""Training state: parameters, optimizer moments and counters, initialized directly into their shardings."""

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from bert_jax.errors import InputError
from bert_jax.model import BertConfig, abstract_parameters, initialize
from bert_jax.model.bert import Parameters
from bert_jax.parallel.sharding import like_parameters, parameter_shardings, shard_along_data
from bert_jax.parallel.step_program import quick_compile_options


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Pytree of arrays, or of their shapes or shardings. Counters are int32 scalars.

    `step` counts consumed batches, with applied or skipped updates. `nonfinite_steps` counts skipped updates,
    `nonfinite_streak` the current number of them in a row.
    """

    step: Any
    parameters: Parameters
    optimizer_state: Any
    nonfinite_steps: Any
    nonfinite_streak: Any


@dataclass(frozen=True)
class StateSpec:
    """Plan of a state: the model's graph, shapes and shardings, and the function that makes it.

    `moments` has the shardings of each parameter's moments, in which its update is computed, too. Frozen parts of the
    model have no moments and are not in it.
    """

    graph: nnx.GraphDef[Any]
    abstract: TrainState  # of jax.ShapeDtypeStruct with shardings
    shardings: TrainState
    moments: Parameters  # shardings
    seed: int
    initialize: Any  # (key of the seed, given parts of the parameters) -> TrainState; jitted

    def make(self, given: Parameters | None = None) -> TrainState:
        """Makes the initial state, directly in its shardings; `given` parts of the parameters replace random ones."""
        result: TrainState = self.initialize(key_data(self.seed), given)
        return result

    def trained(self, tree: Parameters) -> Parameters:
        """Drops the frozen parts of the model from a tree like the parameters."""
        return {part: value for part, value in tree.items() if part in self.moments}


def key_data(seed: int) -> np.ndarray:
    """Returns the key of a seed as numbers, a program's argument on any number of hosts."""
    result: np.ndarray = jax.device_get(jax.random.key_data(jax.random.key(seed)))
    return result


def describe_state(
    mesh: Mesh | AbstractMesh,
    model: BertConfig,
    optimizer: optax.GradientTransformationExtraArgs,
    seed: int,
    *,
    zero1: bool = False,
    frozen: Collection[str] = (),
    **settings: Any,
) -> StateSpec:
    """Plans the state of a run; `settings` go to `initialize`. On an `AbstractMesh` it cannot be made.

    With `zero1` moments are sharded along `data`. The optimizer does not update the `frozen` parts of the model.
    """
    graph, shapes, info = abstract_parameters(model, **settings)

    def make(seed_data: jax.Array, given: Parameters | None = None) -> TrainState:
        seed_key = jax.random.wrap_key_data(seed_data)
        _, parameters = initialize(model, jax.random.fold_in(seed_key, 0), **settings)
        # XLA drops the random init of replaced parameters as dead code, which saves seconds of compilation.
        parameters |= given or {}
        # Each counter is a separate array: donated buffers must not be shared.
        zero = [jnp.zeros((), jnp.int32) for _ in range(3)]
        return TrainState(zero[0], parameters, optimizer.init(drop_parts(frozen, parameters)), zero[1], zero[2])

    abstract = jax.eval_shape(make, key_data(seed))
    replicated = NamedSharding(mesh, PartitionSpec())
    sharded_parameters = parameter_shardings(mesh, info)
    trained, moments = (drop_parts(frozen, tree) for tree in (shapes, sharded_parameters))
    moments = shard_along_data(trained, moments) if zero1 else moments
    shardings = TrainState(
        step=replicated,
        parameters=sharded_parameters,
        optimizer_state=like_parameters(mesh, abstract.optimizer_state, trained, moments),
        nonfinite_steps=replicated,
        nonfinite_streak=replicated,
    )
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings
    )
    options = quick_compile_options(mesh) or None
    jitted = jax.jit(make, out_shardings=shardings, donate_argnums=1, compiler_options=options)
    return StateSpec(graph, abstract, shardings, moments, seed, jitted)


def drop_parts(parts: Collection[str], parameters: Parameters) -> Parameters:
    """Drops some parts of the model from `parameters`, or from a tree like them."""
    return {part: value for part, value in parameters.items() if part not in parts}


def check_memory(state: TrainState, devices: Sequence[jax.Device]) -> None:
    """Raises InputError if a state of jax.ShapeDtypeStruct, without gradients and activations, exceeds the memory.

    `devices` are those of this process that the state is on.
    """
    device = devices[0]
    if device.platform == "cpu":  # the devices of a process share the memory of the machine
        memory, sharing = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), len(devices)
    else:
        memory, sharing = (device.memory_stats() or {}).get("bytes_limit", 0), 1
    needed = sharing * sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)
    )
    if memory and needed > memory:
        raise InputError(
            f"parameters and optimizer need {needed / 2**30:,.1f} GiB of memory, but {device.device_kind} has "
            f"{memory / 2**30:,.1f} GiB; use a smaller model.hidden_size or model.num_hidden_layers, or more devices "
            "along mesh.fsdp"
        )
