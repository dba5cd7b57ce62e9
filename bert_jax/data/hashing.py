"""Stateless random numbers: a counter-based hash, keys derived from names, and a shuffle in constant memory.

Every draw in data loading is a pure function of a key and a counter. Batches are therefore deterministic: any process
computes the same batch, in any order.
"""

import hashlib
from typing import Any

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix(x: Any) -> Any:
    """Finalizer of SplitMix64 (Steele et al. 2014), elementwise on uint64."""
    x = x ^ (x >> np.uint64(30))
    x *= _MIX_1  # in place: a new array
    x ^= x >> np.uint64(27)
    x *= _MIX_2
    x ^= x >> np.uint64(31)
    return x


def random_bits(key: np.ndarray | np.uint64, counter: np.ndarray) -> np.ndarray:
    """Returns uint64 draws: element `counter` of the stream `key`. Both are uint64 and are broadcast together."""
    with np.errstate(over="ignore"):
        return np.asarray(mix(mix(key) + (counter + np.uint64(1)) * _GOLDEN))


def key_from(*parts: object) -> int:
    """Derives a 64-bit key from printable parts, e.g. `key_from(dataset_hash, seed, "shuffle", epoch)`."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Returns the elements at positions `index` of a shuffled range(size), one permutation of [0, size) for each key.

    Applies a balanced Feistel network over the next even number of bits, repeatedly until the result is in the range
    (cycle walking; Black and Rogaway 2002). A shuffle of a billion instances takes constant memory and any position can
    be computed alone.

    Args:
      index: int64 positions in [0, size).
      size: the number of shuffled elements, at most 2**62.
      key: selects the permutation.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    round_keys = [np.uint64(key_from(key, "round", i)) for i in range(8)]

    def network(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & low
        for round_key in round_keys:
            left, right = right, left ^ (random_bits(round_key, right) & low)
        return (left << half) | right

    result = network(np.asarray(index).astype(np.uint64))
    while (outside := result >= size).any():
        result[outside] = network(result[outside])
    return result.astype(np.int64)
