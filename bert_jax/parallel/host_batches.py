"""Placement of host batches on devices."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.batch import Batch, HostBatch, map_arrays
from bert_jax.parallel.sharding import batch_sharding


def _columns_here(mesh: Mesh, batch_size: int, microbatches: int) -> np.ndarray:
    """Returns the rows of a microbatch that are on this process's devices: int64, ascending."""
    shape = microbatches, batch_size // microbatches
    indices = batch_sharding(mesh).addressable_devices_indices_map(shape).values()
    return np.unique(np.concatenate([np.arange(shape[1])[index[1]] for index in indices if index is not None]))


def rows_here(mesh: Mesh, batch_size: int, microbatches: int = 1) -> np.ndarray:
    """Returns the rows of a batch that this process has to make: int64, ascending. A single process makes all."""
    columns = _columns_here(mesh, batch_size, microbatches)
    result: np.ndarray = (np.arange(microbatches)[:, None] * (batch_size // microbatches) + columns).reshape(-1)
    return result


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


def flag_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of `put_flag`."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def abstract_batch(
    mesh: Mesh, batch: Batch[Any], microbatches: int = 1, *, batch_size: int
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
