"""Shardings by one table from logical axes to mesh axes, and the collectives of a `jax.shard_map` over the batch axes.

Each device computes its rows with full parameters: those sharded along `fsdp` are all-gathered where they are used, and
their gradients are reduce-scattered. In JAX's terms the batch axes are manual: the body sees one shard and calls
collectives itself. `tensor` stays auto: the compiler partitions the body along it, and is told where a gathered
parameter is still sharded along it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.batch import Batch
from bert_jax.model.bert import Parameters
from bert_jax.model.layers import ParameterInfo, parameter_info
from bert_jax.parallel.mesh import AnyMesh, batch_mesh_axes, batch_sharding

RULES: dict[str, str | None] = {
    "embed": "fsdp",
    "vocab": "tensor",
    "mlp": "tensor",
    "heads": "tensor",
    "head": None,
    "qkv": None,
    "gate": None,
    "pooled": None,
    "layers": None,
}


def partition_spec(logical_axes: tuple[str | None, ...]) -> PartitionSpec:
    """Maps a parameter's logical axes to mesh axes, each of which a `NamedSharding` accepts once."""
    return PartitionSpec(*(None if name is None else RULES[name] for name in logical_axes))


def parameter_shardings(mesh: AnyMesh, info: Parameters) -> Parameters:
    """Returns a `NamedSharding` for every parameter; `info` has its `ParameterInfo`, see `abstract_parameters`."""
    return jax.tree.map(lambda one: NamedSharding(mesh, partition_spec(one.logical_axes)), info)


def gather_model(
    graph: nnx.GraphDef[Any], parameters: Parameters, shardings: Parameters, reduce_dtype: jnp.dtype
) -> Callable[..., Any]:
    """Builds the model from parameters that may be sharded along `fsdp` and `data`, and returns it as a function.

    Embeddings and heads are all-gathered here, as is what is sharded by layer; each layer where it runs. A parameter is
    cast to the type of the computation before its all-gather if its `ParameterInfo` says so; its gradient is
    reduce-scattered in `reduce_dtype`.
    """
    model = nnx.merge(graph, parameters)
    info = parameter_info(model)

    def gather_one(value: jax.Array, sharding: NamedSharding, info: ParameterInfo) -> jax.Array:
        return gather(value, sharding, model.dtype if info.compute_cast else value.dtype, reduce_dtype)

    def gather_layer(layer: Parameters) -> Parameters:
        return jax.tree.map(gather_one, layer, layer_shardings, info["encoder"]["layers"])

    def gather_layers(value: jax.Array, sharding: NamedSharding, info: ParameterInfo) -> jax.Array:
        kept = (axis if place == 0 or axis == "tensor" else None for place, axis in enumerate(sharding.spec))
        return gather_one(value, NamedSharding(sharding.mesh, PartitionSpec(*kept)), info)

    outside = {part: jax.tree.map(gather_one, parameters[part], shardings[part], info[part]) for part in parameters
               if part != "encoder"}  # fmt: skip
    stacked = shardings["encoder"]["layers"]
    layers = jax.tree.map(gather_layers, parameters["encoder"]["layers"], stacked, info["encoder"]["layers"])
    encoder = {**parameters["encoder"], "layers": layers}
    merged: Callable[..., Any] = nnx.merge(graph, {**parameters, **outside, "encoder": encoder})
    if not any(any(manual_spec(sharding)) for sharding in jax.tree.leaves(stacked)):
        return merged
    layer_shardings = jax.tree.map(_of_layer, stacked)
    return functools.partial(merged, gather_layer=gather_layer)


def shard_along_data(parameters: Parameters, shardings: Parameters, info: Parameters) -> Parameters:
    """Shards parameters and moments along `data` as well: ZeRO stage 1 (Rajbhandari et al. 2020, arXiv:1910.02054).

    `data` shards the first dimension that is not sharded yet and is divisible by its size, so that the shards lie one
    after the other in a gathered parameter; the last dimension, a TPU's lanes, and that of the layers only if no other
    is divisible. A parameter without such a dimension, like a small bias on a large mesh, keeps its sharding.
    """

    def shard(parameter: jax.ShapeDtypeStruct, sharding: NamedSharding, info: ParameterInfo) -> NamedSharding:
        count = sharding.mesh.shape["data"]
        axes = list(sharding.spec) + [None] * (len(parameter.shape) - len(sharding.spec))
        unsharded = [i for i, axis in enumerate(axes) if axis is None or sharding.mesh.shape[axis] == 1]
        divisible = [i for i in unsharded if parameter.shape[i] % count == 0]
        if count > 1 and divisible:
            inner = [i for i in divisible if info.logical_axes[i] != "layers" and i < len(axes) - 1]
            axes[min(inner) if inner else max(divisible)] = "data"
        return NamedSharding(sharding.mesh, PartitionSpec(*axes))

    return jax.tree.map(shard, parameters, shardings, info)


def shard_bytes(tree: Any) -> int:
    """Returns the bytes that one device has of the arrays of a tree, which are `jax.ShapeDtypeStruct`s."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def like_parameters(mesh: AnyMesh, tree: Any, parameters: Parameters, shardings: Parameters) -> Any:
    """Returns shardings for an optimizer's state, `tree`, which put moments on the devices of their parameters.

    In subtrees with the structure of `parameters`, arrays with the shape of theirs get its sharding. All other arrays
    are replicated, such as the factored moments of Adafactor.
    """
    structure: Any = jax.tree.structure(parameters)
    replicated = NamedSharding(mesh, PartitionSpec())

    def is_like_parameters(node: Any) -> bool:
        return bool(jax.tree.structure(node) == structure)

    def place(node: Any) -> Any:
        if not is_like_parameters(node):
            return replicated
        return jax.tree.map(
            lambda leaf, parameter, sharding: sharding if leaf.shape == parameter.shape else replicated,
            node, parameters, shardings,
        )  # fmt: skip

    return jax.tree.map(place, tree, is_leaf=is_like_parameters)


def manual_spec(sharding: NamedSharding) -> PartitionSpec:
    """Returns the batch axes in an array's PartitionSpec, which are the manual ones in `shard_map`."""
    axes = batch_mesh_axes(sharding.mesh)
    return PartitionSpec(*(axis if axis in axes else None for axis in sharding.spec))


def shard_map_over_batch(body: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Maps `body` over the shards of a batch, which are along `batch_mesh_axes`; on one device returns `body`.

    Axes of one device are manual, too: beside an auto axis, even of one device, XLA:TPU fuses no activation and no
    LayerNorm into the product before it, and a step of BERT-LARGE takes a fourth longer.
    """
    if not batch_mesh_axes(mesh):
        return body
    manual = {axis for axis, size in mesh.shape.items() if axis != "tensor" or size == 1}
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=manual)


def _replicated_axes(sharding: NamedSharding) -> tuple[str, ...]:
    return tuple(axis for axis in batch_mesh_axes(sharding.mesh) if axis not in manual_spec(sharding))


def mark_varying(parameters: Parameters, shardings: Parameters) -> Parameters:
    """Casts parameters to device-varying, so that autodiff inserts no psum for their gradients."""
    return jax.tree.map(
        lambda value, sharding: jax.lax.pcast(value, _replicated_axes(sharding), to="varying"), parameters, shardings
    )


@jax.named_scope("parameters")
def gather_along_data(graph: nnx.GraphDef[Any], parameters: Parameters, shardings: Parameters) -> Parameters:
    """All-gathers the parameters that are sharded along `data`, weights as the type of the computation.

    Where the model unrolls its layers, the weights that are stacked over them come back as a list of arrays, each
    gathered by itself: a layer runs while the weights of the next are on their way, and XLA can compile equal code for
    all layers. `stack_layers` stacks them again.
    """
    model = nnx.merge(graph, parameters)

    def gather_one(value: jax.Array, sharding: NamedSharding, info: ParameterInfo) -> Any:
        spec, axes = manual_spec(sharding), info.logical_axes
        if "data" not in spec:
            return value
        if info.compute_cast and axes[0] == "layers" and spec[0] is None and not model.encoder.scan_layers:
            info = ParameterInfo(axes[1:], compute_cast=True)
            return [gather_one(layer, _of_layer(sharding), info) for layer in value]
        if info.compute_cast and "fsdp" not in spec:  # else `gather_model` casts, and reduces gradients in fp32
            value = value.astype(model.dtype)
        return _on_tensor_shards(functools.partial(_all_gather, cuts=[(spec.index("data"), "data")]), sharding)(value)

    return jax.tree.map(gather_one, parameters, shardings, parameter_info(model))


def _of_layer(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of one layer of a stacked parameter."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def stack_layers(parameters: Parameters) -> Parameters:
    """Stacks the lists that `gather_along_data` returns. XLA removes a stack of which only single layers are used."""
    return jax.tree.map(lambda x: jnp.stack(x) if _is_list(x) else x, parameters, is_leaf=_is_list)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


@jax.named_scope("gradient_reduction")
def reduce_gradients(
    gradients: Parameters, shardings: Parameters, targets: Parameters, reduce_dtype: jnp.dtype
) -> Parameters:
    """Reduces the gradients of each device's rows to those of the global batch, in `reduce_dtype`.

    Inputs are sharded as `shardings`, outputs as `targets`, which may be sharded along `data` as well: that axis is
    then reduce-scattered. A list of layers is reduced layer by layer, each as soon as its gradient is there, and
    stacked.
    """

    def total(value: Any, sharding: NamedSharding, target: NamedSharding) -> Any:
        if _is_list(value):
            return jnp.stack([total(layer, _of_layer(sharding), _of_layer(target)) for layer in value])
        have = manual_spec(sharding)
        cuts = [(dimension, axis) for dimension, axis in enumerate(manual_spec(target)) if axis not in (None, *have)]
        if not cuts and not _replicated_axes(target):
            return value

        def reduce(x: jax.Array) -> jax.Array:
            return jax.lax.psum(_scatter(x, cuts), _replicated_axes(target))

        return _on_tensor_shards(reduce, sharding)(value.astype(reduce_dtype)).astype(value.dtype)

    return jax.tree.map(total, gradients, shardings, targets, is_leaf=_is_list)


def _on_tensor_shards(
    collective: Callable[[jax.Array], jax.Array], sharding: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
    """Applies `collective` to an array's shards along `tensor`; otherwise XLA all-gathers it along `tensor` first.

    All axes are manual inside. This also works around a crash of XLA:CPU in a bfloat16 psum with auto axes.
    """
    if not batch_mesh_axes(sharding.mesh) or sharding.mesh.shape["tensor"] == 1:
        return collective
    spec = PartitionSpec(*(axis if axis == "tensor" else None for axis in sharding.spec))
    return jax.shard_map(collective, in_specs=spec, out_specs=spec, axis_names={"tensor"})


def _scatter(x: jax.Array, cuts: Sequence[tuple[int, str]]) -> jax.Array:
    """Reduce-scatters each (dimension, mesh axis that shards it)."""
    for dimension, axis in cuts:
        x = jax.lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)
    return x


def _all_gather(x: jax.Array, cuts: Sequence[tuple[int, str]]) -> jax.Array:
    for dimension, axis in cuts:
        x = jax.lax.all_gather(x, axis, axis=dimension, tiled=True)
    return x


def gather(value: jax.Array, sharding: NamedSharding, dtype: jnp.dtype, reduce_dtype: jnp.dtype) -> jax.Array:
    """All-gathers a parameter as `dtype`; its gradient is reduce-scattered in `reduce_dtype`."""
    cuts = [(dimension, axis) for dimension, axis in enumerate(manual_spec(sharding)) if axis is not None]
    if not cuts:
        return value

    @jax.custom_vjp
    def gather_shards(x: jax.Array) -> jax.Array:
        return _on_tensor_shards(functools.partial(_all_gather, cuts=cuts), sharding)(x.astype(dtype))

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        scatter = _on_tensor_shards(lambda x: _scatter(x, cuts), sharding)
        return (scatter(gradient.astype(reduce_dtype)).astype(value.dtype),)

    gather_shards.defvjp(lambda x: (gather_shards(x), None), backward)
    return gather_shards(value)


def make_forward_step(
    mesh: Mesh, graph: nnx.GraphDef[Any], shardings: Parameters, forward: Callable[..., Any], out_specs: PartitionSpec
) -> Callable[[Parameters, Batch[Any]], Any]:
    """Makes the jitted `(parameters, batch) -> forward(model, rows)` of a batch [1, B, ...]; results are replicated.

    `forward` runs on a device's rows [R, ...]; `out_specs` is that of its results in `shard_map_over_batch`.
    """

    def local_forward(parameters: Parameters, rows: Batch[jax.Array]) -> Any:
        return forward(gather_model(graph, parameters, shardings, jnp.float32), rows)

    def forward_step(parameters: Parameters, batch: Batch[jax.Array]) -> Any:
        specs = jax.tree.map(manual_spec, shardings), PartitionSpec(batch_mesh_axes(mesh))
        rows = jax.tree.map(lambda entry: entry[0], batch)
        return shard_map_over_batch(local_forward, mesh, specs, out_specs)(parameters, rows)

    forward_step.__name__ = forward.__name__  # the program's name in JAX's log and in a profile
    return jax.jit(
        forward_step,
        in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )
