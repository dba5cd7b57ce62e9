"""Shardings of parameters, optimizer state and batches, by one table from logical axes to mesh axes."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.model.bert import Parameters
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


def parameter_shardings(mesh: Mesh, info: Parameters) -> Parameters:
    """Returns a `NamedSharding` for every parameter; `info` has its `ParameterInfo`, see `abstract_parameters`."""
    return jax.tree.map(lambda one: NamedSharding(mesh, partition_spec(one.logical_axes)), info)


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

    return jax.tree.map(shard, parameters, shardings)


def like_parameters(mesh: Mesh, tree: Any, parameters: Parameters, shardings: Parameters) -> Any:
    """Returns shardings for `tree`: subtrees with the structure of `parameters` get `shardings`, others are replicated.

    It puts optimizer moments on the devices of their parameters.
    """
    structure: Any = jax.tree.structure(parameters)

    def is_like_parameters(node: Any) -> bool:
        return bool(jax.tree.structure(node) == structure)

    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda node: shardings if is_like_parameters(node) else replicated, tree, is_leaf=is_like_parameters
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch entry [A, B / A, ...]: rows are sharded along data and fsdp, microbatches not."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))
