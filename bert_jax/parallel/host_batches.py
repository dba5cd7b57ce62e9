"""Batches from the hosts that make them onto the devices that read them."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.parallel.sharding import batch_sharding


def _columns_here(mesh: Mesh, batch_size: int, microbatches: int) -> np.ndarray:
    """Which rows of a microbatch this process's devices work on: int64, ascending."""
    shape = microbatches, batch_size // microbatches
    indices = batch_sharding(mesh).addressable_devices_indices_map(shape).values()
    return np.unique(np.concatenate([np.arange(shape[1])[index[1]] for index in indices if index is not None]))


def rows_here(mesh: Mesh, batch_size: int, microbatches: int = 1) -> np.ndarray:
    """Which rows of a batch this process has to make: int64, ascending. All of them where it is the only one."""
    columns = _columns_here(mesh, batch_size, microbatches)
    return (np.arange(microbatches)[:, None] * (batch_size // microbatches) + columns).reshape(-1)


def put_batch(
    mesh: Mesh, batch: Mapping[str, Any], microbatches: int = 1, *, batch_size: int | None = None
) -> dict[str, jax.Array]:
    """The rows that `rows_here` names, [R, ...], as their part of a batch [A, B / A, ...] on the mesh.

    It is cut into microbatches on the host, where that costs nothing. B is `batch_size`, by default R.
    """
    rows = next(iter(batch.values())).shape[0]
    batch_size = rows if batch_size is None else batch_size
    length = batch_size // microbatches
    columns, sharding = _columns_here(mesh, batch_size, microbatches), batch_sharding(mesh)

    def put(entry: np.ndarray) -> jax.Array:
        here = entry.reshape(microbatches, len(columns), *entry.shape[1:])

        def piece(index: Any) -> np.ndarray:
            first, stop, _ = index[1].indices(length)
            start = int(np.searchsorted(columns, first))
            return here[:, start : start + stop - first]

        return jax.make_array_from_callback((microbatches, length, *entry.shape[1:]), sharding, piece)

    with jax.transfer_guard("allow"):  # these are meant
        return {name: put(entry) for name, entry in batch.items()}


def put_everywhere(mesh: Mesh, tree: Any) -> Any:
    """numpy arrays that all processes have alike, whole on every device."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def put(entry: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(np.shape(entry), everywhere, lambda _: np.asarray(entry))

    return jax.tree.map(put, tree)
