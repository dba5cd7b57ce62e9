"""Training steps that leave more to XLA's partitioner than `make_train_step`, for benchmarks/step_programs.py."""

import math
import sys
from collections.abc import Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.batch import Batch
from bert_jax.model.bert import Layer, Parameters
from bert_jax.model.layers import row_keys
from bert_jax.parallel.mesh import BATCH_AXES
from bert_jax.training import objectives
from bert_jax.training.objectives import Objective
from bert_jax.training.train_step import Metrics, StateSpec, TrainState, TrainStep, apply_gradients, key_data


class _FullyShardedLayer(Layer):
    """A layer that shards its activations [B, L, D] along both batch axes."""

    axes: tuple[str, ...] = BATCH_AXES

    def __call__(self, x: jax.Array, visibility: jax.Array, keys: jax.Array | None) -> jax.Array:
        x = _shard_rows(x, self.axes)
        return _shard_rows(super().__call__(x, visibility, keys), self.axes)


class _LayerShardedByFsdp(_FullyShardedLayer):
    """A layer that shards its activations along `fsdp`, inside of a `jax.shard_map` over `data`."""

    axes = ("fsdp",)


def _shard_rows(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axes))


def make_plain_step(
    mesh: Mesh,
    spec: StateSpec,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    objective: Objective,
    *,
    seed: int,
    gradient_reduce_dtype: jnp.dtype = jnp.float32,
    compiler_options: Mapping[str, Any] | None = None,
) -> TrainStep:
    """Makes the step of `make_train_step` by `jax.jit` with the shardings of state and batch.

    XLA decides where it gathers parameters and reduces gradients, and in which type: `gradient_reduce_dtype` is unused.
    """

    def gradients(state: TrainState, batch: Batch[jax.Array], rows: jax.Array, key: jax.Array, counts: Any) -> Any:
        return _accumulate(spec, objective, _FullyShardedLayer, state.parameters, batch, rows, key, counts)

    return _make_step(mesh, spec, optimizer, schedule, objective, seed, compiler_options, gradients)


def make_data_manual_step(
    mesh: Mesh,
    spec: StateSpec,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    objective: Objective,
    *,
    seed: int,
    gradient_reduce_dtype: jnp.dtype = jnp.float32,
    compiler_options: Mapping[str, Any] | None = None,
) -> TrainStep:
    """Makes the step of `make_train_step` with `data` as the only manual axis: gradients are reduced once along it.

    XLA decides what it does along `fsdp` and `tensor`. Requires more than one device along `data`, and no ZeRO.
    """
    auto = set(mesh.axis_names) - {"data"}

    def reduce(gradient: jax.Array, sharding: NamedSharding) -> jax.Array:
        total = jax.shard_map(  # of shards; otherwise XLA gathers the gradient along the other axes first
            lambda x: jax.lax.psum(x, "data"), in_specs=sharding.spec, out_specs=sharding.spec, axis_names=auto
        )(gradient.astype(gradient_reduce_dtype))
        return total.astype(gradient.dtype)

    def local_gradients(
        parameters: Parameters, batch: Batch[jax.Array], rows: jax.Array, key: jax.Array, counts: Any
    ) -> Any:
        parameters = jax.lax.pcast(parameters, "data", to="varying")
        gradients, metrics = _accumulate(
            spec, objective, _LayerShardedByFsdp, parameters, batch, rows, key, counts, varying=("data",)
        )
        return jax.tree.map(reduce, gradients, spec.moments), jax.lax.psum(metrics, "data")

    def gradients(state: TrainState, batch: Batch[jax.Array], rows: jax.Array, key: jax.Array, counts: Any) -> Any:
        sharded, replicated = PartitionSpec(None, "data"), PartitionSpec()
        return jax.shard_map(
            local_gradients, mesh=mesh, in_specs=(replicated, sharded, sharded, replicated, replicated),
            out_specs=replicated, axis_names={"data"},
        )(state.parameters, batch, rows, key, counts)  # fmt: skip

    return _make_step(mesh, spec, optimizer, schedule, objective, seed, compiler_options, gradients)


def _accumulate(
    spec: StateSpec, objective: Objective, layer: type[_FullyShardedLayer], parameters: Parameters,
    batch: Batch[jax.Array], rows: jax.Array, key: jax.Array, counts: Any, varying: tuple[str, ...] = (),
) -> tuple[Parameters, Metrics]:  # fmt: skip
    """Sums gradients and metrics over microbatches, like the step of `make_train_step` without its reductions."""
    trained = spec.trained(parameters)

    def compute_loss(trained: Parameters, microbatch: Batch[jax.Array], keys: jax.Array) -> Any:
        model = nnx.merge(spec.graph, {**parameters, **trained})
        model.encoder.layers.__class__ = layer
        # Chunks of predictions would mix the rows of devices.
        with mock.patch.object(objectives, "CHUNK_PREDICTIONS", sys.maxsize):
            means = objectives.divide(objective.sums(model, microbatch, keys), counts)
        return objective.loss(means), means

    def microbatch_gradients(rows: jax.Array, microbatch: Batch[jax.Array]) -> tuple[Parameters, Metrics]:
        value_and_grad = jax.value_and_grad(compute_loss, has_aux=True)
        (loss, means), gradients = value_and_grad(trained, microbatch, row_keys(key, rows))
        return gradients, {"loss": loss, **means}

    def add(total: Any, rows_and_microbatch: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, microbatch_gradients(*rows_and_microbatch)), None

    if len(rows) == 1:
        return microbatch_gradients(*jax.tree.map(lambda entry: entry[0], (rows, batch)))
    zeros: Any = jax.tree.map(
        lambda value: jnp.zeros(value.shape, value.dtype), (trained, {"loss": jnp.float32(0), **counts})
    )
    zeros = (jax.tree.map(jax.lax.with_sharding_constraint, zeros[0], _specs(spec)), zeros[1])
    return jax.lax.scan(add, jax.lax.pcast(zeros, varying, to="varying"), (rows, batch))[0]


def _specs(spec: StateSpec) -> Any:
    return jax.tree.map(lambda sharding: sharding.spec, spec.trained(spec.shardings.parameters))


def _make_step(
    mesh: Mesh, spec: StateSpec, optimizer: optax.GradientTransformation, schedule: optax.Schedule,
    objective: Objective, seed: int, compiler_options: Mapping[str, Any] | None, compute_gradients: Any,
) -> TrainStep:  # fmt: skip
    def train_step(
        state: TrainState, batch: Batch[jax.Array], seed_data: jax.Array, schedule: optax.Schedule
    ) -> tuple[TrainState, Metrics]:
        entries = batch.copy()
        asked_to_stop = entries.pop("stop", None)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(seed_data), 1), state.step)
        shape = entries["input_ids"].shape[:2]
        rows = jnp.arange(math.prod(shape)).reshape(shape)
        gradients, metrics = compute_gradients(state, entries, rows, key, objective.denominators(entries))
        gradients = jax.lax.with_sharding_constraint(gradients, spec.moments)
        state, metrics = apply_gradients(spec, optimizer, state, gradients, metrics, schedule(state.step))
        return state, metrics if asked_to_stop is None else {**metrics, "stop": asked_to_stop.max()}

    replicated = NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(
        train_step, in_shardings=(spec.shardings, None, replicated, replicated),
        out_shardings=(spec.shardings, replicated), donate_argnums=0,
        compiler_options=dict(compiler_options or {}) or None,
    )  # fmt: skip
    return TrainStep(jitted, mesh, key_data(seed), schedule)
