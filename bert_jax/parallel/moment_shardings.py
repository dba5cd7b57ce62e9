"""Shardings of optimizer moments: those of their parameters, or sharded along `data` as well (ZeRO stage 1)."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from bert_jax.model.bert import Parameters


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
