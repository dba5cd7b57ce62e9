"""Where parameters, optimizer state and batches lie: the one table from the model's logical axes to the mesh's."""

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
    """The mesh axes of a parameter; a mesh axis used twice is a mistake in the model or the table."""
    axes = [RULES[name] if name is not None else None for name in logical_axes]
    used = [axis for axis in axes if axis is not None]
    if len(used) != len(set(used)):
        raise ValueError(f"{logical_axes} map to {axes}: a mesh axis can cut one dimension only")
    return PartitionSpec(*axes)


def parameter_shardings(mesh: Mesh, logical_axes: Parameters) -> Parameters:
    """A `NamedSharding` for every parameter; `logical_axes` is the tree that `abstract_parameters` gives."""
    return jax.tree.map(
        lambda axes: NamedSharding(mesh, partition_spec(axes)), logical_axes, is_leaf=lambda x: isinstance(x, tuple)
    )


def cut_along_data(parameters: Parameters, shardings: Parameters) -> Parameters:
    """ZeRO stage 1 (Rajbhandari et al. 2020, arXiv:1910.02054): shardings of moments, each device along `data` its own.

    Each parameter's is that of the parameter, cut along `data` as well: in its longest dimension that is whole and
    divides. What has none, small biases on large meshes, stays as it is.
    """

    def cut(parameter: jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
        count = sharding.mesh.shape["data"]
        axes = list(sharding.spec) + [None] * (len(parameter.shape) - len(sharding.spec))
        whole = [i for i, axis in enumerate(axes) if axis is None or sharding.mesh.shape[axis] == 1]
        able = [i for i in whole if parameter.shape[i] % count == 0]
        if count > 1 and able:
            axes[max(able, key=lambda i: parameter.shape[i])] = "data"
        return NamedSharding(sharding.mesh, PartitionSpec(*axes))

    return jax.tree.map(cut, parameters, shardings)


def like_parameters(mesh: Mesh, tree: Any, parameters: Parameters, shardings: Parameters) -> Any:
    """Shardings for `tree`: its parts that are trees like `parameters` get `shardings`, all else is replicated.

    This is how optimizer moments come to lie beside the parameters they belong to.
    """
    structure: Any = jax.tree.structure(parameters)

    def is_like_parameters(node: Any) -> bool:
        return bool(jax.tree.structure(node) == structure)

    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda node: shardings if is_like_parameters(node) else replicated, tree, is_leaf=is_like_parameters
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of every batch entry [A, B / A, ...]: microbatches whole, rows over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))
