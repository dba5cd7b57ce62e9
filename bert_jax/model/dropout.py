"""Dropout whose masks are functions of one key per row: the same on every mesh and for any number of microbatches."""

import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bert_jax.model.layers import Key

LEVELS = 1 << 16
"""Values of an element's random bits."""


@jax.named_scope("dropout")
def dropout_mask(shape: tuple[int, ...], rate: float, keys: Key | None) -> jax.Array | None:
    """Draws a mask bool [B, ...], False with probability `rate`; None without keys or for a rate that rounds to 0.

    Each row has its own key, [B]: the mask does not depend on which rows are computed together, and is the same on
    every mesh. One 32-bit draw serves two neighbours on the last axis. A 16-bit threshold realizes `rate` to 8e-6.
    """
    if keys is None or keep_levels(rate) == LEVELS:
        return None
    *leading, last = shape
    pairs = _random_words(keys, (*leading[1:], -(-last // 2)))
    bits = jax.lax.bitcast_convert_type(pairs, jnp.uint16).reshape(*leading, -1)[..., :last]
    return bits < keep_levels(rate)


def _random_words(keys: Key, shape: tuple[int, ...]) -> jax.Array:
    """Draws uint32 [B, *shape] from keys [B]: hashes each element's index with the two words of its row's key.

    Takes a third of the operations of `jax.random.bits`, whose Threefry is stronger than dropout needs and only makes
    the keys. Not for other uses: no two words of a row are equal.
    """
    words = key_words(keys).reshape(-1, 2, *(1 for _ in shape))
    number = jnp.zeros((1, *shape), jnp.uint32)
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        number += stride * jax.lax.broadcasted_iota(jnp.uint32, number.shape, axis + 1)
    return hash_number(number, words[:, 0], words[:, 1])


def key_words(keys: Key) -> jax.Array:
    """Returns the two words of each row's key, uint32 [B, 2], for `hash_number`."""
    return jax.random.key_data(keys)[:, -2:]


def hash_number(number: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """Hashes an element's index, uint32, with the two words of its row's key.

    The low half of the result is the bits of element 2 * index of a row, the high half those of the next element.
    """
    return _scramble(_scramble(number + first) ^ second)


def _scramble(x: jax.Array) -> jax.Array:
    """Mixes uint32 bijectively, each bit depending on all: `lowbias32` of https://github.com/skeeto/hash-prospector."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def keep_levels(rate: float) -> int:
    """Returns the number of values of `LEVELS`, from 0, whose elements are kept: at least one for a rate below 1."""
    return max(1, LEVELS - round(rate * LEVELS))


def drop(x: jax.Array, keep: jax.Array | None, rate: float) -> jax.Array:
    """Zeroes x where not `keep` and scales the rest by the realized rate; returns x without a mask.

    Multiplies in fp32: rounded to bfloat16, the scale for a rate of 0.1 would be 0.16% too small.
    """
    if keep is None:
        return x
    scale = jnp.float32(LEVELS / keep_levels(rate))
    return jnp.where(keep, (x.astype(jnp.float32) * scale).astype(x.dtype), jnp.zeros((), x.dtype))


def dropout(x: jax.Array, rate: float, keys: Key | None) -> jax.Array:
    """Zeroes elements of x [B, ...] with probability `rate` and scales up the others; without keys returns x."""
    return drop(x, checkpoint_name(dropout_mask(x.shape, rate, keys), "dropout_mask"), rate)


def row_keys(key: Key, rows: jax.Array) -> Key:
    """Derives one key per row, [B], from the row numbers int32 [B] alone."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def keys_per_row(key: Key | None, rows: int) -> Key | None:
    """Returns keys [B] for a key, and keys [B] or None as they are."""
    return key if key is None or key.ndim else row_keys(key, jnp.arange(rows))


def split_keys(keys: Key | None, count: int) -> Key | tuple[None, ...]:
    """Splits keys [B] to [count, B]; without keys returns `count` Nones."""
    return (None,) * count if keys is None else jax.vmap(lambda key: jax.random.split(key, count), out_axes=1)(keys)
