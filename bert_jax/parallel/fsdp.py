"""What happens inside `jax.shard_map` over the axes that rows are cut along.

Each device works on its rows with the whole of each parameter; what is cut along `fsdp` is gathered where it is used,
and its gradient comes back summed and cut. `tensor` stays with the compiler, which has to be told where a gathered
parameter is still cut along it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from bert_jax.model.bert import Parameters
from bert_jax.parallel.mesh import BATCH_AXES


def row_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes that rows are cut along: of `BATCH_AXES` those with more than one device.

    XLA fails on a sum over an axis of one device beside a larger automatic axis.
    """
    return tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1)


def manual_spec(sharding: NamedSharding) -> PartitionSpec:
    """Of an array's mesh axes those that rows are cut along as well."""
    axes = row_axes(sharding.mesh)
    return PartitionSpec(*(axis if axis in axes else None for axis in sharding.spec))


def over_rows(body: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`body` as each device does it, on its rows; "rows" among the specs' axes stands for what they are cut along."""
    axes = row_axes(mesh)

    def spelled_out(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(*((axes or None) if axis == "rows" else axis for axis in spec))

    if not axes:
        return body
    is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
    in_specs, out_specs = jax.tree.map(spelled_out, (in_specs, out_specs), is_leaf=is_spec)
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes))


def _uncut(sharding: NamedSharding) -> tuple[str, ...]:
    return tuple(axis for axis in row_axes(sharding.mesh) if axis not in manual_spec(sharding))


def vary(parameters: Parameters, shardings: Parameters) -> Parameters:
    """Each device's own copies: their gradients are its own as well, and are not summed where they are computed."""
    return jax.tree.map(
        lambda value, sharding: jax.lax.pcast(value, _uncut(sharding), to="varying"), parameters, shardings
    )


def varying_zeros(mesh: Mesh, like: Any) -> Any:
    """Zeros that each device adds to on its own."""
    return jax.tree.map(
        lambda value: jax.lax.pcast(jnp.zeros(value.shape, value.dtype), row_axes(mesh), to="varying"), like
    )


def sum_over_devices(
    gradients: Parameters, shardings: Parameters, targets: Parameters, reduce_dtype: jnp.dtype
) -> Parameters:
    """Gradients of the global batch from those of each device's rows, added up in `reduce_dtype`.

    They come cut as `shardings` says. They leave as `targets` says, which may cut along `data` as well: a device then
    gets the sum of its piece alone.
    """

    def total(value: jax.Array, sharding: NamedSharding, target: NamedSharding) -> jax.Array:
        have = manual_spec(sharding)
        cut = [(dimension, axis) for dimension, axis in enumerate(manual_spec(target)) if axis not in (None, *have)]
        if not cut and not _uncut(target):
            return value

        def reduce(x: jax.Array) -> jax.Array:
            return jax.lax.psum(_scatter(x, cut), _uncut(target))

        return _on_pieces(reduce, sharding)(value.astype(reduce_dtype)).astype(value.dtype)

    return jax.tree.map(total, gradients, shardings, targets)


def _on_pieces(
    collective: Callable[[jax.Array], jax.Array], sharding: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
    """`collective` of an array's pieces along `tensor`: left to itself XLA makes it whole first.

    All axes are manual in it then, without which XLA for CPUs dies of a sum in bfloat16.
    """
    mesh, axes = sharding.mesh, row_axes(sharding.mesh)
    if not axes:
        return collective
    spec = PartitionSpec(*(axis if axis == "tensor" else None for axis in sharding.spec))
    return jax.shard_map(collective, in_specs=spec, out_specs=spec, axis_names=set(mesh.axis_names) - set(axes))


Cuts = Sequence[tuple[int, str]]
"""(dimension, the mesh axis that it is cut along)."""


def _scatter(x: jax.Array, cuts: Cuts) -> jax.Array:
    for dimension, axis in cuts:
        x = jax.lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)
    return x


def _gather(value: jax.Array, sharding: NamedSharding, dtype: jnp.dtype, reduce_dtype: jnp.dtype) -> jax.Array:
    """The whole of a parameter, as `dtype`; its gradient is added up in `reduce_dtype` and cut again."""
    cuts = [(dimension, axis) for dimension, axis in enumerate(manual_spec(sharding)) if axis is not None]
    if not cuts:
        return value

    def whole(x: jax.Array) -> jax.Array:
        for dimension, axis in cuts:
            x = jax.lax.all_gather(x, axis, axis=dimension, tiled=True)
        return x

    @jax.custom_vjp
    def gather(x: jax.Array) -> jax.Array:
        return _on_pieces(whole, sharding)(x.astype(dtype))

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        scatter = _on_pieces(lambda x: _scatter(x, cuts), sharding)
        return (scatter(gradient.astype(reduce_dtype)).astype(value.dtype),)

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
