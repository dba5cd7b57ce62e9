"""Shardings by one table from logical axes to mesh axes; fully sharded data parallelism (FSDP) inside `shard_map`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from bert_jax.model.bert import Parameters
from bert_jax.model.layers import ParameterInfo, parameter_info
from bert_jax.parallel.collectives import gather, manual_spec
from bert_jax.parallel.mesh import BATCH_AXES

RULES: dict[str, str | None] = {
    "embed": "fsdp",
    "vocab": "tensor",
    "mlp": "tensor",
    "heads": "tensor",
    "head": None,
    "qkv": None,
    "pooled": None,
    "layers": None,
}


def partition_spec(logical_axes: tuple[str | None, ...]) -> PartitionSpec:
    """Maps a parameter's logical axes to mesh axes. Raises ValueError if a mesh axis is used twice."""
    axes = [RULES[name] if name is not None else None for name in logical_axes]
    used = [axis for axis in axes if axis is not None]
    if len(used) != len(set(used)):
        raise ValueError(
            f"logical axes {logical_axes} map to mesh axes {axes}: a mesh axis can shard only one dimension"
        )
    return PartitionSpec(*axes)


def parameter_shardings(mesh: Mesh | AbstractMesh, info: Parameters) -> Parameters:
    """Returns a `NamedSharding` for every parameter; `info` has its `ParameterInfo`, see `abstract_parameters`."""
    result: Parameters = jax.tree.map(lambda one: NamedSharding(mesh, partition_spec(one.logical_axes)), info)
    return result


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch entry [A, B / A, ...]: rows are sharded along data and fsdp, microbatches not."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))


def gather_model(
    graph: nnx.GraphDef[Any], parameters: Parameters, shardings: Parameters, reduce_dtype: jnp.dtype
) -> Callable[..., Any]:
    """Builds the model from parameters that may be sharded along `fsdp`, and returns it as a function.

    Embeddings and heads are all-gathered here, each layer where it runs. A parameter is cast to the type of the
    computation before its all-gather if its `ParameterInfo` says so; its gradient is reduce-scattered in
    `reduce_dtype`.
    """
    model = nnx.merge(graph, parameters)
    info = parameter_info(model)

    def gather_one(value: jax.Array, sharding: NamedSharding, info: ParameterInfo) -> jax.Array:
        return gather(value, sharding, model.dtype if info.compute_cast else value.dtype, reduce_dtype)

    def gather_layer(layer: Parameters) -> Parameters:
        result: Parameters = jax.tree.map(gather_one, layer, layer_shardings, info["encoder"]["layers"])
        return result

    outside = {part: jax.tree.map(gather_one, parameters[part], shardings[part], info[part]) for part in parameters
               if part != "encoder"}  # fmt: skip
    merged: Callable[..., Any] = nnx.merge(graph, {**parameters, **outside})
    stacked = shardings["encoder"]["layers"]
    if not any(any(manual_spec(sharding)) for sharding in jax.tree.leaves(stacked)):
        return merged
    layer_shardings = jax.tree.map(lambda s: NamedSharding(s.mesh, PartitionSpec(*s.spec[1:])), stacked)
    return functools.partial(merged, gather_layer=gather_layer)


def shard_along_data(parameters: Parameters, shardings: Parameters) -> Parameters:
    """Shards moments along `data` as well: ZeRO stage 1 (Rajbhandari et al. 2020, arXiv:1910.02054).

    `data` shards the longest dimension that is not sharded yet and is divisible by its size. A parameter without such a
    dimension, like a small bias on a large mesh, keeps its sharding.
    """

    def shard(parameter: jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
        count = sharding.mesh.shape["data"]
        axes = list(sharding.spec) + [None] * (len(parameter.shape) - len(sharding.spec))
        unsharded = [i for i, axis in enumerate(axes) if axis is None or sharding.mesh.shape[axis] == 1]
        divisible = [i for i in unsharded if parameter.shape[i] % count == 0]
        if count > 1 and divisible:
            axes[max(divisible, key=lambda i: parameter.shape[i])] = "data"
        return NamedSharding(sharding.mesh, PartitionSpec(*axes))

    result: Parameters = jax.tree.map(shard, parameters, shardings)
    return result


def like_parameters(mesh: Mesh | AbstractMesh, tree: Any, parameters: Parameters, shardings: Parameters) -> Any:
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
