"""Plan of a run's state: shapes, shardings and initialization."""

import math
import os
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from bert_jax.errors import InputError
from bert_jax.model import BertConfig, abstract_parameters, initialize
from bert_jax.model.bert import Parameters
from bert_jax.parallel.compiler_options import quick_compile_options
from bert_jax.parallel.moment_shardings import like_parameters, shard_along_data
from bert_jax.parallel.sharding import parameter_shardings
from bert_jax.training.state import StateSpec, TrainState, key_data


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
