"""The device mesh of a run, checks of the sizes that it shards, and batches of the host on it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from bert_jax.batch import Batch, HostBatch, map_arrays
from bert_jax.config_keys import MeshKeys, PretrainConfig
from bert_jax.errors import InputError
from bert_jax.model import BertConfig

AnyMesh = Mesh | AbstractMesh
"""A mesh of devices, or one without, for which programs can be compiled."""

MESH_AXES = ("data", "fsdp", "tensor")

BATCH_AXES = ("data", "fsdp")
"""The mesh axes that shard the rows of a batch."""


def make_mesh(config: MeshKeys, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the mesh of `devices`, by default all; `config` is the `mesh` section, in which one -1 is inferred.

    With several slices (TPU slices, or GPU nodes) `data` spans the slow network between them, then `fsdp`, and `tensor`
    never does. Raises InputError for sizes that do not match the devices and slices.
    """
    devices = jax.devices() if devices is None else devices
    wanted, sizes = _named_sizes(config), mesh_sizes(config, len(devices))
    types = (AxisType.Auto,) * len(MESH_AXES)
    slices = count_slices(devices)
    between = between_slices(sizes, slices)
    within = [size // count for size, count in zip(sizes.values(), between, strict=True)]
    lay_out: Any = mesh_utils.create_device_mesh
    if slices > 1:  # reads an attribute of devices that CPUs lack
        lay_out = partial(mesh_utils.create_hybrid_device_mesh, dcn_mesh_shape=between)
    try:
        grid = lay_out(within, devices=devices, allow_split_physical_axes=True)
    except ValueError as error:  # slices of different sizes
        raise InputError(f"{wanted}: cannot be laid over {slices} slices ({error})") from error
    return Mesh(grid, MESH_AXES, axis_types=types)


def count_slices(devices: Iterable[jax.Device]) -> int:
    """Counts the TPU slices, or GPU nodes, that the devices are in; 1 for devices without a slice, such as CPUs."""
    return len({getattr(device, "slice_index", None) for device in devices})


def abstract_mesh(config: MeshKeys, devices: int) -> AbstractMesh:
    """Makes the mesh of a number of devices that need not exist, in one slice. Raises InputError as `make_mesh`."""
    sizes = mesh_sizes(config, devices)
    return AbstractMesh(tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def mesh_sizes(config: MeshKeys, devices: int) -> dict[str, int]:
    """Returns the size of each axis, with a -1 inferred from the number of devices. InputError if it does not match."""
    wanted, sizes = _named_sizes(config), {axis: getattr(config, axis) for axis in MESH_AXES}
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise InputError(f"{wanted}: sizes must be at least 1; at most one may be -1")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free:
        if devices % fixed:
            raise InputError(f"{wanted}: {devices} devices are not divisible by {fixed}")
        sizes[free[0]] = devices // fixed
    elif fixed != devices:
        raise InputError(f"{wanted}: needs {fixed} devices, got {devices}; set one size to -1 to infer it")
    return sizes


def _named_sizes(config: MeshKeys) -> str:
    return " x ".join(f"mesh.{axis}={getattr(config, axis)}" for axis in MESH_AXES)


def between_slices(sizes: Mapping[str, int], slices: int) -> tuple[int, int, int]:
    """Returns the slices that each axis spans: `data` as many as divide it, `fsdp` the rest. Or raises InputError."""
    data = math.gcd(sizes["data"], slices)
    fsdp = slices // data
    if sizes["fsdp"] % fsdp:
        wanted = " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
        raise InputError(
            f"{wanted}: cannot be laid over {slices} slices; mesh.data must be a multiple of {slices}, or mesh.fsdp a "
            f"multiple of the remaining {fsdp}; mesh.tensor stays within a slice"
        )
    return data, fsdp, 1


def batch_mesh_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Returns the mesh axes that shard rows: those of `BATCH_AXES` with more than one device.

    XLA fails on a psum over an axis of one device next to a larger auto axis.
    """
    return tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1)


def fill_in_accumulation(mesh: AnyMesh, config: PretrainConfig) -> PretrainConfig:
    """Infers `gradient_accumulation` from -1: the fewest microbatches that `max_rows_per_device` allows.

    Returns the config, which needs the number of devices.
    """
    if config.gradient_accumulation != -1:
        return config
    copies = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    rows = max(1, config.global_batch_size // copies)  # `check_divisibility` refuses a remainder
    microbatches = next(
        count for count in range(1, rows + 1) if rows % count == 0 and rows // count <= config.max_rows_per_device
    )
    return replace(config, gradient_accumulation=microbatches)


def check_divisibility(mesh: AnyMesh, model: BertConfig, global_batch_size: int, gradient_accumulation: int) -> None:
    """Raises InputError, with the key, for a size that is not divisible by its mesh axes."""
    rows = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if global_batch_size < 1 or gradient_accumulation < 1 or global_batch_size % (rows * gradient_accumulation):
        raise InputError(
            f"global_batch_size={global_batch_size} is not divisible by gradient_accumulation={gradient_accumulation} "
            f"x {rows} devices (mesh.data x mesh.fsdp); use a multiple of {rows * gradient_accumulation}"
        )
    for name, size, axis in (
        ("hidden_size", model.hidden_size, "fsdp"),
        ("num_attention_heads", model.num_attention_heads, "tensor"),
        ("intermediate_size", model.intermediate_size, "tensor"),
        ("vocab_size (padded)", model.padded_vocab_size, "tensor"),
    ):
        if size % mesh.shape[axis]:
            raise InputError(f"model.{name}={size} is not divisible by mesh.{axis}={mesh.shape[axis]}")


# --- Batches of the host ----------------------------------------------------------------------------------------------


def batch_sharding(mesh: AnyMesh) -> NamedSharding:
    """Returns the sharding of a batch entry [A, B / A, ...]: rows are sharded along data and fsdp, microbatches not."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))


def _columns_here(mesh: Mesh, batch_size: int, microbatches: int) -> np.ndarray:
    """Returns the rows of a microbatch that are on this process's devices: int64, ascending."""
    shape = microbatches, batch_size // microbatches
    indices = batch_sharding(mesh).addressable_devices_indices_map(shape).values()
    return np.unique(np.concatenate([np.arange(shape[1])[index[1]] for index in indices if index is not None]))


def rows_here(mesh: Mesh, batch_size: int, microbatches: int = 1) -> np.ndarray:
    """Returns the rows of a batch that this process has to make: int64, ascending. A single process makes all."""
    columns = _columns_here(mesh, batch_size, microbatches)
    return (np.arange(microbatches)[:, None] * (batch_size // microbatches) + columns).reshape(-1)


def put_batch(
    mesh: Mesh, batch: HostBatch, microbatches: int = 1, *, batch_size: int | None = None
) -> Batch[jax.Array]:
    """Puts the rows from `rows_here`, [R, ...], on the mesh as their part of a batch [A, B / A, ...].

    The host splits it into microbatches, which is free there. B is `batch_size`, by default R. The arrays of `batch`
    may be reused at once: without a copy, a CPU's array could share their memory, and a transfer could still read it.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    batch_size = rows if batch_size is None else batch_size
    length = batch_size // microbatches
    columns, sharding = _columns_here(mesh, batch_size, microbatches), batch_sharding(mesh)

    def put(entry: np.ndarray) -> jax.Array:
        here = entry.reshape(microbatches, len(columns), *entry.shape[1:])

        def shard(index: Any) -> np.ndarray:
            first, stop, _ = index[1].indices(length)
            start = int(np.searchsorted(columns, first))
            return here[:, start : start + stop - first].copy()

        return jax.make_array_from_callback((microbatches, length, *entry.shape[1:]), sharding, shard)

    with jax.transfer_guard("allow"):  # intended transfers
        return map_arrays(put, batch)


def put_flag(mesh: Mesh, value: bool) -> jax.Array:
    """Puts a flag of this process on its devices: int32 [devices], an element a device.

    Processes may have different values, so that no element may be a replica of another process's.
    """
    here = np.full(1, value, np.int32)
    return jax.make_array_from_callback((mesh.size,), flag_sharding(mesh), lambda _: here)


def flag_sharding(mesh: AnyMesh) -> NamedSharding:
    """Returns the sharding of `put_flag`."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def abstract_batch(
    mesh: AnyMesh, batch: Batch[Any], microbatches: int = 1, *, batch_size: int
) -> Batch[jax.ShapeDtypeStruct]:
    """Returns the shapes, types and shardings of what `put_batch` returns; `batch` has arrays or their shapes."""
    sharding = batch_sharding(mesh)

    def describe(entry: Any) -> jax.ShapeDtypeStruct:
        shape = microbatches, batch_size // microbatches, *entry.shape[1:]
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(entry.dtype), sharding=sharding)

    return map_arrays(describe, batch)


def put_everywhere(mesh: Mesh, tree: Any) -> Any:
    """Replicates numpy arrays, which must be equal in all processes, on every device."""
    replicated = NamedSharding(mesh, PartitionSpec())

    def put(entry: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(np.shape(entry), replicated, lambda _: np.asarray(entry))

    return jax.tree.map(put, tree)
