"""Digests of arrays and JSON, by which a load detects changed bits of a checkpoint.

The digest of an array is a 32-bit number: the sum, modulo 2**32, of its 32-bit words, each times an odd weight, a hash
of the word's index in the array. The upper half of a word is folded into its lower half first.

- A change within one word always changes the digest: folding is a bijection, and so is a product with an odd number
  modulo 2**32. Other changes (zeroed blocks, swapped rows) are missed with probability 2**-32. The worst pair of bits,
  two signs, is missed with probability 2**-15.
- It is a sum of integers: its value depends neither on the mesh, nor on the number of processes, nor on the order.
  Each device reads its own shards once; two numbers per array are communicated.

A digest reads memory at the speed of one core: on a CPU the arrays are divided among `_WORKERS` threads.
"""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

FORMAT_VERSION = 1
"""Version of a checkpoint's items, stored with the digests; earlier versions stored none."""

ALGORITHM = "weighted-words-1"
"""Name of the algorithm, stored with the digests; it has to change when the algorithm does."""

_ROW = 512  # least number of words per iteration of the loop on a CPU; the order of hidden_size
_LARGE_BYTES = 1 << 20  # arrays above this size are digested in a thread or by a program
_COMPILED_BYTES = 64 << 20  # arrays on one CPU of at least this size are digested by a program
_WORKERS = 4  # more would wait for the memory


def describe(arrays: Any, items: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the digests of a pytree of arrays and of JSON items, as JSON; all processes have to call it.

    They carry the version of the whole checkpoint.
    """
    return start_description(arrays, items)()


def start_description(arrays: Any, items: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """Starts to compute the result of `describe`, as `start_digests` does, and returns the function that waits."""
    by_name = {name: json_digest(value) for name, value in items.items()}
    digests = start_digests(arrays)
    return lambda: {"format_version": FORMAT_VERSION, "algorithm": ALGORITHM, "arrays": digests(), "items": by_name}


def is_known(digests: Mapping[str, Any]) -> bool:
    """Returns whether `digests` are from the algorithm of this version."""
    return digests["algorithm"] == ALGORITHM


def changed_items(items: Mapping[str, Any], digests: Mapping[str, Any]) -> list[str]:
    """Returns the names of items in `digests` that are missing in `items` or have changed."""
    saved = digests["items"] if is_known(digests) else {}
    return [name for name in saved if name not in items or json_digest(items[name]) != saved[name]]


def changed_arrays(found: Mapping[str, str], digests: Mapping[str, Any]) -> list[str]:
    """Returns the names in `found`, the result of `array_digests`, whose digests differ from `digests`.

    `found` may be of a part of the tree that was described.
    """
    saved = digests.get("arrays", {})
    return [name for name, digest in found.items() if saved.get(name) != digest]


def array_digests(tree: Any) -> dict[str, str]:
    """Returns "dtype[shape] digest" of each array of a pytree, by its name; all processes have to call it.

    A name is the path in the tree, such as `encoder.layers.attention.qkv_kernel`. Elements have at most 32 bits.
    """
    return start_digests(tree)()


def start_digests(tree: Any) -> Callable[[], dict[str, str]]:
    """Starts to compute the result of `array_digests`, and returns the function that waits for it.

    All processes have to call it, in the same order relative to other programs. The result may be called by any of
    them at any time.
    """
    arrays = _named_leaves(tree)
    large = {name: array for name, array in arrays.items() if _is_large(array)}
    by_size = sorted(large, key=lambda name: large[name].nbytes, reverse=True)  # the last ones fill up idle threads
    pending = {name: _start(large[name]) for name in by_size}
    values = _on_hosts({name: array for name, array in arrays.items() if name not in large})

    def result() -> dict[str, str]:
        found = values | {name: int(jax.device_get(one.result())) for name, one in pending.items()}
        return {name: f"{_kind(array)} {found[name]:08x}" for name, array in arrays.items()}

    return result


def nonfinite_arrays(tree: Any) -> list[str]:
    """Returns the names of the arrays, none of them sharded over processes, that hold NaN or infinity."""
    return [name for name, array in _named_leaves(tree).items() if not np.isfinite(jax.device_get(array)).all()]


def json_digest(value: Any) -> str:
    """Returns the SHA-256 of a JSON value, independent of the order of keys."""
    normalized = json.loads(json.dumps(value))
    return hashlib.sha256(json.dumps(normalized, sort_keys=True).encode()).hexdigest()


def _named_leaves(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _kind(array: Any) -> str:
    return f"{np.dtype(array.dtype).name}[{','.join(map(str, array.shape))}]"


def _is_large(array: Any) -> bool:
    """Returns whether the digest of an array is worth a thread, or a program on its devices."""
    return isinstance(array, jax.Array) and array.nbytes > _LARGE_BYTES


# --- On hosts --------------------------------------------------------------------------------------------------------


def _on_hosts(arrays: Mapping[str, Any]) -> dict[str, int]:
    """Returns the digest of each array; for one sharded over processes it is the sum over processes."""
    complete: dict[str, int] = {}
    partial: dict[str, int] = {}
    for name, array in arrays.items():
        if not isinstance(array, jax.Array):
            complete[name] = _digest_on_host(array, (0,) * array.ndim)
        elif array.is_fully_replicated:
            complete[name] = _digest_on_host(jax.device_get(array.addressable_data(0)), (0,) * array.ndim)
        else:
            total = sum(
                _digest_on_host(jax.device_get(shard.data), [place.start or 0 for place in shard.index])
                for shard in array.addressable_shards
                if shard.replica_id == 0
            )
            (complete if array.is_fully_addressable else partial)[name] = total % 2**32
    if partial:
        with jax.transfer_guard("allow"):  # transfers a few bytes, which the run's transfer guard may disallow
            local = np.array(list(partial.values()), np.uint32)
            totals = np.sum(multihost_utils.process_allgather(local), axis=0, dtype=np.uint32)
        complete |= dict(zip(partial, np.atleast_1d(totals).tolist(), strict=True))
    return complete


def _digest_on_host(shard: np.ndarray, starts: Sequence[int]) -> int:
    """Returns the digest of a shard that starts at the indices `starts` of the array."""
    weights = [
        _weights(np, axis, start, size) for axis, (start, size) in enumerate(zip(starts, shard.shape, strict=True))
    ]
    rows, columns = _rows_and_columns(np, weights)
    words = np.ascontiguousarray(shard).view(f"u{shard.dtype.itemsize}").reshape(len(rows), len(columns))
    total = np.zeros_like(columns)
    for row, weight in zip(words, rows, strict=True):
        total += _folded(row.astype(np.uint32)) * weight
    return int(np.sum(total * columns, dtype=np.uint32))


# --- On devices ------------------------------------------------------------------------------------------------------


def _on_devices(array: jax.Array) -> jax.Array:
    """Returns the digest of an array, uint32 [], in all processes that hold a shard of it."""
    sharding = array.sharding
    mesh, spec = (sharding.mesh, sharding.spec) if isinstance(sharding, NamedSharding) else (None, PartitionSpec())
    return digest_program(mesh, spec, array.ndim)(array)


def _start(array: jax.Array) -> Future[Any]:
    """Starts to compute the digest of an array: for an array on one CPU in a thread, else by asynchronous dispatch.

    A CPU runs the programs of one thread one after the other. A program reads ten times as fast as NumPy, but compiles
    for half a second, in which NumPy reads `_COMPILED_BYTES` several times. Programs with collectives must not be
    started by several threads: the devices could run them in different orders, and wait for each other forever.
    """
    if len(array.sharding.device_set) == 1 and next(iter(array.devices())).platform == "cpu":
        if array.nbytes < _COMPILED_BYTES:
            return _workers().submit(_digest_on_host, jax.device_get(array), (0,) * array.ndim)
        return _workers().submit(lambda: jax.block_until_ready(_on_devices(array)))
    started: Future[Any] = Future()
    started.set_result(_on_devices(array))
    return started


@functools.cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_WORKERS, "digests")


@functools.cache
def digest_program(mesh: Mesh | None, spec: PartitionSpec, ndim: int) -> Callable[[jax.Array], jax.Array]:
    """Returns the jitted digest of an array with this sharding; without a mesh it is on one device."""
    digest = _digest_by_rows if (jax.devices() if mesh is None else mesh.devices.flat)[0].platform == "cpu" else _digest
    axes = [*spec, *[None] * (ndim - len(spec))]
    names = tuple(name for axis in axes if axis is not None for name in ((axis,) if isinstance(axis, str) else axis))

    def shard_digest(shard: jax.Array) -> jax.Array:
        starts = [
            0 if axis is None else jax.lax.axis_index(axis) * size for axis, size in zip(axes, shard.shape, strict=True)
        ]
        total = digest(shard, starts)
        return jax.lax.psum(total, names) if names else total

    if mesh is None:
        return jax.jit(shard_digest)
    return jax.jit(jax.shard_map(shard_digest, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False))


def _digest(shard: jax.Array, starts: Sequence[Any]) -> jax.Array:
    total = _folded(_words(shard))
    for axis in reversed(range(shard.ndim)):
        # The barrier keeps the hash out of the loop over the array, which would compute it for every element.
        weights = jax.lax.optimization_barrier(_weights(jnp, axis, starts[axis], shard.shape[axis]))
        total = jnp.sum(total * weights, axis=-1, dtype=jnp.uint32)
    return total


def _digest_by_rows(shard: jax.Array, starts: Sequence[Any]) -> jax.Array:
    """Computes `_digest` in a loop that XLA:CPU vectorizes; it does not vectorize integer sums."""
    weights = [
        _weights(jnp, axis, start, size) for axis, (start, size) in enumerate(zip(starts, shard.shape, strict=True))
    ]
    rows, columns = _rows_and_columns(jnp, weights)

    def add(total: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + _folded(_words(row[0])) * row[1], None

    total, _ = jax.lax.scan(add, jnp.zeros_like(columns), (shard.reshape(rows.size, columns.size), rows))
    return jnp.sum(total * columns, dtype=jnp.uint32)


def _words(array: jax.Array) -> jax.Array:
    """Returns the bits of each element, uint32."""
    array = array.astype(jnp.uint8) if array.dtype == jnp.bool else array
    return jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}").astype(jnp.uint32)


# --- On both: `numpy` is numpy or jax.numpy --------------------------------------------------------------------------


def _folded(words: Any) -> Any:
    return words ^ (words >> 16)


def _weights(numpy: Any, axis: int, start: Any, size: int) -> Any:
    """Returns uint32 [size], odd: hashes (murmur3's finalizer) of the indices from `start` along an axis."""
    mixed = numpy.arange(size, dtype=numpy.uint32) + numpy.asarray(start, numpy.uint32)
    mixed += numpy.uint32(0x9E3779B1 * (axis + 1) % 2**32)
    mixed = (mixed ^ (mixed >> 16)) * numpy.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * numpy.uint32(0xC2B2AE35)
    return mixed ^ (mixed >> 16) | numpy.uint32(1)


def _rows_and_columns(numpy: Any, weights: list[Any]) -> tuple[Any, Any]:
    """Returns the weights of rows and columns of an array whose last axes are merged to columns.

    Merges the fewest axes that make `_ROW` columns, or all.
    """
    sizes = [len(weight) for weight in weights]
    split = next((at for at in reversed(range(len(sizes))) if math.prod(sizes[at:]) >= _ROW), 0)

    def merged(axes: list[Any]) -> Any:
        one = numpy.ones(1, numpy.uint32)
        return functools.reduce(lambda left, right: (left[:, None] * right).reshape(-1), axes, one)

    return merged(weights[:split]), merged(weights[split:])
