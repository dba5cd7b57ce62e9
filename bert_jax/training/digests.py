"""Digests of arrays and of JSON, by which a load notices any bit of a checkpoint that has changed since its save.

The digest of an array is a 32-bit number: the sum, modulo 2**32, of its 32-bit words, each times an odd weight, a hash
of the word's place in the array. The upper half of a word is folded into its lower half first.

- A change within one word always changes the digest: folding is a bijection, and so is a product with an odd number
  modulo 2**32. Other changes (zeroed blocks, swapped rows) go unnoticed once in 2**32, and the least noticeable pair of
  bits, two signs, once in 2**15.
- It is a sum of integers: its value depends neither on the mesh, nor on the number of processes, nor on the order.
  Each device reads its own shards once; two numbers an array travel.
"""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

ALGORITHM = "weighted-words-1"
"""Names what the numbers are. It is written beside them, and changes with them."""

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}  # by bytes of an element
_ROW = 4096  # words: what the loop over an array on a CPU reads at a time, at least


def array_digests(tree: Any) -> dict[str, str]:
    """Returns "dtype[shape] digest" of each array of a pytree, by its name; all processes have to call it.

    A name is the path in the tree, as `encoder.layers.attention.qkv_kernel`. Elements have at most 32 bits.
    """
    arrays = _named_leaves(tree)
    values = _measured(arrays, _digest)
    return {name: f"{_kind(array)} {values[name]:08x}" for name, array in arrays.items()}


def changed_arrays(tree: Any, saved: Mapping[str, str]) -> list[str]:
    """Returns the names of the arrays whose digests are not those of `saved`; all processes have to call it."""
    return [name for name, digest in array_digests(tree).items() if saved.get(name) != digest]


def nonfinite_arrays(tree: Any) -> list[str]:
    """Returns the names of the arrays that hold NaN or infinity; all processes have to call it."""
    return [name for name, count in _measured(_named_leaves(tree), _count_nonfinite).items() if count]


def json_digest(value: Any) -> str:
    """Returns the SHA-256 of a JSON value, which does not depend on the order of keys."""
    as_read = json.loads(json.dumps(value))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def _named_leaves(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _kind(array: Any) -> str:
    return f"{np.dtype(array.dtype).name}[{','.join(map(str, array.shape))}]"


# --- On devices ------------------------------------------------------------------------------------------------------

Measure = Callable[[jax.Array, Sequence[Any], bool], jax.Array]
"""(shard, the index in the array at which it begins along each axis, whether it is on a CPU) -> uint32 []."""


def _measured(arrays: Mapping[str, Any], measure: Measure) -> dict[str, int]:
    """Returns the sum over the shards of each array of what `measure` says of them, modulo 2**32."""
    by_mesh: dict[Mesh | None, list[str]] = {}
    for name, array in arrays.items():
        by_mesh.setdefault(getattr(getattr(array, "sharding", None), "mesh", None), []).append(name)
    values: dict[str, int] = {}
    for mesh, names in by_mesh.items():
        group = [arrays[name] for name in names]
        specs = () if mesh is None else tuple(array.sharding.spec for array in group)
        found = jax.device_get(_program(measure, mesh, specs)(group))
        values |= dict(zip(names, found.tolist(), strict=True))
    return values


@functools.cache
def _program(measure: Measure, mesh: Mesh | None, specs: tuple[PartitionSpec, ...]) -> Callable[..., jax.Array]:
    """Returns a compiled function of arrays of those shardings; without a mesh they are on one device."""
    on_cpu = (jax.devices()[0] if mesh is None else mesh.devices.flat[0]).platform == "cpu"
    if mesh is None:
        return jax.jit(lambda arrays: jnp.stack([measure(array, (0,) * array.ndim, on_cpu) for array in arrays]))

    def of_shards(arrays: list[jax.Array]) -> jax.Array:
        sums = []
        for array, spec in zip(arrays, specs, strict=True):
            axes = [*spec, *[None] * (array.ndim - len(spec))]
            starts = [
                0 if axis is None else jax.lax.axis_index(axis) * n for axis, n in zip(axes, array.shape, strict=True)
            ]
            value = measure(array, starts, on_cpu)
            names = [name for axis in axes if axis is not None for name in ((axis,) if isinstance(axis, str) else axis)]
            sums.append(jax.lax.psum(value, tuple(names)) if names else value)
        return jnp.stack(sums)

    return jax.jit(
        jax.shard_map(of_shards, mesh=mesh, in_specs=(list(specs),), out_specs=PartitionSpec(), check_vma=False)
    )


def _digest(shard: jax.Array, starts: Sequence[Any], on_cpu: bool) -> jax.Array:
    weights = [_weights(axis, start, size) for axis, (start, size) in enumerate(zip(starts, shard.shape, strict=True))]
    if on_cpu:
        return _digest_by_rows(shard, weights)
    total = _folded_words(shard)
    for weight in reversed(weights):
        # The barrier keeps the hash out of the loop over the array, which would compute it for every element.
        total = jnp.sum(total * jax.lax.optimization_barrier(weight), axis=-1, dtype=jnp.uint32)
    return total


def _digest_by_rows(shard: jax.Array, weights: list[jax.Array]) -> jax.Array:
    """The same number, in a loop over rows that XLA's CPU back end vectorizes, as it does no reduction of integers."""
    split = next((at for at in reversed(range(shard.ndim)) if math.prod(shard.shape[at:]) >= _ROW), 0)
    rows, columns = _outer(weights[:split]), _outer(weights[split:])

    def add(total: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + _folded_words(row[0]) * row[1], None

    total, _ = jax.lax.scan(add, jnp.zeros_like(columns), (shard.reshape(rows.size, columns.size), rows))
    return jnp.sum(total * columns, dtype=jnp.uint32)


def _folded_words(array: jax.Array) -> jax.Array:
    """uint32, of the same shape."""
    if array.dtype == jnp.bool:
        array = array.astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(array, _WORDS[array.dtype.itemsize]).astype(jnp.uint32)
    return words ^ (words >> 16)


def _weights(axis: int, start: Any, size: int) -> jax.Array:
    """uint32 [size], odd: hashes (murmur3's finalizer) of the indices from `start` on along an axis."""
    mixed = jnp.arange(size, dtype=jnp.uint32) + jnp.uint32(start) + jnp.uint32(0x9E3779B1 * (axis + 1) % 2**32)
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return mixed ^ (mixed >> 16) | jnp.uint32(1)


def _outer(weights: list[jax.Array]) -> jax.Array:
    """uint32 [product of the sizes]: the products of one of each, as rows of an array lie in memory."""
    return functools.reduce(lambda left, right: (left[:, None] * right).reshape(-1), weights, jnp.ones(1, jnp.uint32))


def _count_nonfinite(shard: jax.Array, starts: Sequence[Any], on_cpu: bool) -> jax.Array:
    return jnp.sum(~jnp.isfinite(shard), dtype=jnp.uint32)
