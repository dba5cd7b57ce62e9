"""The mesh, and the one table that maps the model's logical axes to it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bert_jax.config import ConfigDict
from bert_jax.errors import InputError
from bert_jax.model import BertConfig
from bert_jax.model.bert import Parameters

MESH_AXES = ("data", "fsdp", "tensor")

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

BATCH_AXES = ("data", "fsdp")


def make_mesh(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `devices`, by default all; `config` is the `mesh` section, in which one -1 is filled in."""
    devices = jax.devices() if devices is None else devices
    sizes = {axis: config[axis] for axis in MESH_AXES}
    wanted = " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise InputError(f"{wanted}: sizes are at least 1, and one at the most may be -1")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free:
        if len(devices) % fixed:
            raise InputError(f"{wanted}: {len(devices)} devices do not divide by {fixed}")
        sizes[free[0]] = len(devices) // fixed
    elif fixed != len(devices):
        raise InputError(f"{wanted} is {fixed} devices, but there are {len(devices)}: set one of them to -1 to fill in")
    return jax.make_mesh(
        tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices
    )


def check_divisibility(mesh: Mesh, model: BertConfig, global_batch_size: int, gradient_accumulation: int) -> None:
    """InputError for sizes that the mesh does not divide, each with the key that says so."""
    rows = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if global_batch_size < 1 or gradient_accumulation < 1 or global_batch_size % (rows * gradient_accumulation):
        raise InputError(
            f"global_batch_size={global_batch_size} does not divide by gradient_accumulation={gradient_accumulation} x "
            f"{rows} devices (mesh.data x mesh.fsdp): it has to be a multiple of {rows * gradient_accumulation}"
        )
    for name, size, axis in (
        ("hidden_size", model.hidden_size, "fsdp"),
        ("num_attention_heads", model.num_attention_heads, "tensor"),
        ("intermediate_size", model.intermediate_size, "tensor"),
        ("vocab_size (padded)", model.padded_vocab_size, "tensor"),
    ):
        if size % mesh.shape[axis]:
            raise InputError(f"model.{name}={size} does not divide by mesh.{axis}={mesh.shape[axis]}")


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


def like_parameters(mesh: Mesh, tree: Any, parameters: Parameters, shardings: Parameters) -> Any:
    """Shardings for `tree`: its parts that are trees like `parameters` get their shardings, all else is replicated.

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


# --- Inside jax.shard_map over BATCH_AXES ----------------------------------------------------------------------------
#
# Each device works on its rows with the whole of each parameter; what is cut along `fsdp` is gathered where it is used,
# and its gradient comes back summed and cut. `tensor` stays with the compiler.


def manual_spec(sharding: NamedSharding) -> PartitionSpec:
    """Of a parameter's mesh axes those that rows are cut along as well, and that cut anything."""
    sizes = sharding.mesh.shape
    return PartitionSpec(*(axis if axis in BATCH_AXES and sizes[axis] > 1 else None for axis in sharding.spec))


def _others(spec: PartitionSpec) -> tuple[str, ...]:
    return tuple(axis for axis in BATCH_AXES if axis not in spec)


def vary(parameters: Parameters, specs: Parameters) -> Parameters:
    """Each device's own copies: their gradients are its own as well, and are not summed where they are computed."""
    return jax.tree.map(lambda value, spec: jax.lax.pcast(value, _others(spec), to="varying"), parameters, specs)


def varying_zeros(like: Any) -> Any:
    """Zeros that each device adds to on its own."""
    return jax.tree.map(
        lambda value: jax.lax.pcast(jnp.zeros(value.shape, value.dtype), BATCH_AXES, to="varying"), like
    )


def sum_over_devices(gradients: Parameters, specs: Parameters) -> Parameters:
    """Gradients of the global batch from those of each device's rows."""
    return jax.tree.map(lambda value, spec: jax.lax.psum(value, _others(spec)), gradients, specs)


def _gather(value: jax.Array, spec: PartitionSpec) -> jax.Array:
    for dimension, axis in enumerate(spec):
        if axis is not None:
            value = jax.lax.all_gather(value, axis, axis=dimension, tiled=True)
    return value


def gather_all_but_layers(parameters: Parameters, specs: Parameters) -> Parameters:
    """Embeddings and heads whole; the layers are gathered one by one, by `layer_gatherer`."""
    return {
        part: value if part == "encoder" else jax.tree.map(_gather, value, specs[part])
        for part, value in parameters.items()
    }


def layer_gatherer(mesh: Mesh, specs: Parameters) -> Callable[[Any], Any] | None:
    """What gathers the parameters of one layer; None where they are whole."""
    if mesh.shape["fsdp"] == 1:
        return None
    of_layers = jax.tree.leaves(specs["encoder"]["layers"], is_leaf=lambda x: isinstance(x, PartitionSpec))

    def gather_layer(layer: Any) -> Any:
        leaves, structure = jax.tree.flatten(layer)
        gathered = [_gather(leaf, spec[1:]) for leaf, spec in zip(leaves, of_layers, strict=True)]
        return jax.tree.unflatten(structure, gathered)

    return gather_layer
