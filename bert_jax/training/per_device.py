"""What happens inside `jax.shard_map` over the axes that rows are cut along.

Each device works on its rows with the whole of each parameter; what is cut along `fsdp` is gathered where it is used,
and its gradient comes back summed and cut. `tensor` stays with the compiler, which has to be told where a gathered
parameter is still cut along it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from bert_jax.model.bert import Parameters
from bert_jax.training.mesh import BATCH_AXES


def manual_spec(sharding: NamedSharding) -> PartitionSpec:
    """Of an array's mesh axes those that rows are cut along as well, and that cut anything."""
    return _among(sharding, BATCH_AXES)


def _among(sharding: NamedSharding, axes: tuple[str, ...]) -> PartitionSpec:
    sizes = sharding.mesh.shape
    return PartitionSpec(*(axis if axis in axes and sizes[axis] > 1 else None for axis in sharding.spec))


def _uncut(spec: PartitionSpec) -> tuple[str, ...]:
    return tuple(axis for axis in BATCH_AXES if axis not in spec)


def vary(parameters: Parameters, shardings: Parameters) -> Parameters:
    """Each device's own copies: their gradients are its own as well, and are not summed where they are computed."""
    return jax.tree.map(
        lambda value, sharding: jax.lax.pcast(value, _uncut(manual_spec(sharding)), to="varying"),
        parameters,
        shardings,
    )


def varying_zeros(like: Any) -> Any:
    """Zeros that each device adds to on its own."""
    return jax.tree.map(
        lambda value: jax.lax.pcast(jnp.zeros(value.shape, value.dtype), BATCH_AXES, to="varying"), like
    )


def sum_over_devices(
    gradients: Parameters, shardings: Parameters, targets: Parameters, reduce_dtype: jnp.dtype
) -> Parameters:
    """Gradients of the global batch from those of each device's rows, added up in `reduce_dtype`.

    They come cut as `shardings` says. They leave as `targets` says, which may cut along `data` as well: a device then
    gets the sum of its piece alone.
    """

    def total(value: jax.Array, sharding: NamedSharding, target: NamedSharding) -> jax.Array:
        dtype, have, wanted = value.dtype, manual_spec(sharding), manual_spec(target)
        value = value.astype(reduce_dtype)
        for dimension, axis in enumerate(wanted):
            if axis is not None and axis not in have:
                value = jax.lax.psum_scatter(value, axis, scatter_dimension=dimension, tiled=True)
        return jax.lax.psum(value, _uncut(wanted)).astype(dtype)

    return jax.tree.map(total, gradients, shardings, targets)


def _gather(value: jax.Array, sharding: NamedSharding, dtype: jnp.dtype, reduce_dtype: jnp.dtype) -> jax.Array:
    """The whole of a parameter, as `dtype`; its gradient is added up in `reduce_dtype` and cut again."""
    spec, rest = manual_spec(sharding), _among(sharding, ("tensor",))
    cut = [(dimension, axis) for dimension, axis in enumerate(spec) if axis is not None]
    if not cut:
        return value

    def where(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, rest) if any(rest) else x

    @jax.custom_vjp
    def gather(x: jax.Array) -> jax.Array:
        x = x.astype(dtype)
        for dimension, axis in cut:
            x = where(jax.lax.all_gather(where(x), axis, axis=dimension, tiled=True))
        return x

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        gradient = gradient.astype(reduce_dtype)
        for dimension, axis in cut:
            gradient = where(jax.lax.psum_scatter(where(gradient), axis, scatter_dimension=dimension, tiled=True))
        return (gradient.astype(value.dtype),)

    gather.defvjp(lambda x: (gather(x), None), backward)
    return gather(value)


def whole_model(
    graph: nnx.GraphDef, parameters: Parameters, shardings: Parameters, reduce_dtype: jnp.dtype
) -> Callable[..., Any]:
    """The model of parameters that may be cut along `fsdp`: embeddings and heads are gathered here, each layer where
    it runs, its matrices in the type that they are used in."""

    def outside_of_layers(value: jax.Array, sharding: NamedSharding) -> jax.Array:
        return _gather(value, sharding, value.dtype, reduce_dtype)

    whole = {
        part: value if part == "encoder" else jax.tree.map(outside_of_layers, value, shardings[part])
        for part, value in parameters.items()
    }
    model = nnx.merge(graph, whole)
    of_layers = jax.tree_util.tree_leaves_with_path(shardings["encoder"]["layers"])
    if any(any(manual_spec(sharding)) for _, sharding in of_layers):

        def fetch_layer(layer: Any) -> Any:
            leaves, structure = jax.tree.flatten(layer)
            gathered = []
            for leaf, (path, sharding) in zip(leaves, of_layers, strict=True):
                of_one = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
                dtype = model.dtype if path[-1].key.endswith("kernel") else leaf.dtype
                gathered.append(_gather(leaf, of_one, dtype, reduce_dtype))
            return jax.tree.unflatten(structure, gathered)

        model.encoder.fetch_layer = fetch_layer
    return model
