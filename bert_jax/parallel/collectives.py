"""Collectives inside a `jax.shard_map` over the batch axes.

Each device computes its rows with full parameters: those sharded along `fsdp` are all-gathered where they are used, and
their gradients are reduce-scattered. In JAX's terms the batch axes are manual: the body sees one shard and calls
collectives itself. `tensor` stays auto: the compiler partitions the body along it, and is told where a gathered
parameter is still sharded along it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.model.bert import Parameters
from bert_jax.parallel.mesh import batch_mesh_axes


def manual_spec(sharding: NamedSharding) -> PartitionSpec:
    """Returns the batch axes in an array's PartitionSpec, which are the manual ones in `shard_map`."""
    axes = batch_mesh_axes(sharding.mesh)
    return PartitionSpec(*(axis if axis in axes else None for axis in sharding.spec))


def shard_map_over_batch(body: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Maps `body` over the shards of a batch, which are along `batch_mesh_axes`; on one device returns `body`."""
    axes = batch_mesh_axes(mesh)
    if not axes:
        return body
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes))


def _replicated_axes(sharding: NamedSharding) -> tuple[str, ...]:
    return tuple(axis for axis in batch_mesh_axes(sharding.mesh) if axis not in manual_spec(sharding))


def mark_varying(parameters: Parameters, shardings: Parameters) -> Parameters:
    """Casts parameters to device-varying, so that autodiff inserts no psum for their gradients."""
    result: Parameters = jax.tree.map(
        lambda value, sharding: jax.lax.pcast(value, _replicated_axes(sharding), to="varying"), parameters, shardings
    )
    return result


def varying_zeros(mesh: Mesh, like: Any) -> Any:
    """Returns device-varying zeros with the shapes of `like`."""
    return jax.tree.map(
        lambda value: jax.lax.pcast(jnp.zeros(value.shape, value.dtype), batch_mesh_axes(mesh), to="varying"), like
    )


@jax.named_scope("gradient_reduction")
def reduce_gradients(
    gradients: Parameters, shardings: Parameters, targets: Parameters, reduce_dtype: jnp.dtype
) -> Parameters:
    """Reduces the gradients of each device's rows to those of the global batch, in `reduce_dtype`.

    Inputs are sharded as `shardings`, outputs as `targets`, which may be sharded along `data` as well: that axis is
    then reduce-scattered.
    """

    def total(value: jax.Array, sharding: NamedSharding, target: NamedSharding) -> jax.Array:
        have = manual_spec(sharding)
        cuts = [(dimension, axis) for dimension, axis in enumerate(manual_spec(target)) if axis not in (None, *have)]
        if not cuts and not _replicated_axes(target):
            return value

        def reduce(x: jax.Array) -> jax.Array:
            result: jax.Array = jax.lax.psum(_scatter(x, cuts), _replicated_axes(target))
            return result

        return _on_tensor_shards(reduce, sharding)(value.astype(reduce_dtype)).astype(value.dtype)

    result: Parameters = jax.tree.map(total, gradients, shardings, targets)
    return result


def _on_tensor_shards(
    collective: Callable[[jax.Array], jax.Array], sharding: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
    """Applies `collective` to an array's shards along `tensor`; otherwise XLA all-gathers it along `tensor` first.

    All axes are manual inside. This also works around a crash of XLA:CPU in a bfloat16 psum with auto axes.
    """
    mesh, axes = sharding.mesh, batch_mesh_axes(sharding.mesh)
    if not axes:
        return collective
    spec = PartitionSpec(*(axis if axis == "tensor" else None for axis in sharding.spec))
    return jax.shard_map(collective, in_specs=spec, out_specs=spec, axis_names=set(mesh.axis_names) - set(axes))


Cuts = Sequence[tuple[int, str]]
"""Pairs of (dimension, the mesh axis that shards it)."""


def _scatter(x: jax.Array, cuts: Cuts) -> jax.Array:
    for dimension, axis in cuts:
        x = jax.lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)
    return x


def gather(value: jax.Array, sharding: NamedSharding, dtype: jnp.dtype, reduce_dtype: jnp.dtype) -> jax.Array:
    """All-gathers a parameter as `dtype`; its gradient is reduce-scattered in `reduce_dtype`."""
    cuts = [(dimension, axis) for dimension, axis in enumerate(manual_spec(sharding)) if axis is not None]
    if not cuts:
        return value

    def all_gather(x: jax.Array) -> jax.Array:
        for dimension, axis in cuts:
            x = jax.lax.all_gather(x, axis, axis=dimension, tiled=True)
        return x

    @jax.custom_vjp
    def gather_shards(x: jax.Array) -> jax.Array:
        return _on_tensor_shards(all_gather, sharding)(x.astype(dtype))

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        scatter = _on_tensor_shards(lambda x: _scatter(x, cuts), sharding)
        return (scatter(gradient.astype(reduce_dtype)).astype(value.dtype),)

    gather_shards.defvjp(lambda x: (gather_shards(x), None), backward)
    return gather_shards(value)
