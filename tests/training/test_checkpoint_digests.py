"""Digests notice every changed bit, and do not depend on how an array is sharded."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bert_jax.training.checkpointing import checkpoint_digests
from bert_jax.training.checkpointing.checkpoint_digests import (
    array_digests,
    changed_arrays,
    describe,
    json_digest,
    nonfinite_arrays,
    start_digests,
)

MESH = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
SPECS = [
    PartitionSpec(), PartitionSpec("fsdp"), PartitionSpec(("data", "fsdp"), None, "tensor"),
    PartitionSpec(None, ("tensor", "data")),
]  # fmt: skip


def digest_by_definition(array: np.ndarray) -> int:
    """The sum over elements, one by one, of the folded word times the hashes of its indices."""
    total = 0
    for index, word in np.ndenumerate(array.view(np.uint32)):
        weight = 1
        for axis, place in enumerate(index):
            mixed = (place + 0x9E3779B1 * (axis + 1)) % 2**32
            mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B % 2**32
            mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 % 2**32
            weight *= mixed ^ mixed >> 16 | 1
        total += (int(word) ^ int(word) >> 16) * weight
    return total % 2**32


@pytest.mark.parametrize("size", ["small", "large", "huge"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_digest_does_not_depend_on_the_mesh(spec: PartitionSpec, size: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint_digests, "_LARGE_BYTES", 1 << 20 if size == "small" else 0)
    monkeypatch.setattr(checkpoint_digests, "_COMPILED_BYTES", 0 if size == "huge" else 1 << 20)
    array = np.random.default_rng(0).normal(size=(8, 4, 6)).astype(np.float32)
    expected = {"kernel": f"float32[8,4,6] {digest_by_definition(array):08x}"}
    assert array_digests({"kernel": jax.device_put(array, NamedSharding(MESH, spec))}) == expected
    assert array_digests({"kernel": array}) == expected
    assert array_digests({"kernel": jnp.asarray(array)}) == expected


def test_digest_is_of_the_array_when_it_starts_though_the_array_is_donated_after():
    array = jnp.arange(1 << 20, dtype=jnp.float32)
    expected = array_digests({"kernel": np.asarray(array).copy()})
    digests = start_digests({"kernel": array})
    jax.jit(lambda x: x + 1, donate_argnums=0)(array).block_until_ready()
    assert digests() == expected


def test_digest_is_equal_in_numpy_and_on_devices():
    array = np.random.default_rng(0).normal(size=(3, 5, 16, 300)).astype(np.float32)
    starts = (3, 0, 16, 300)
    on_host = checkpoint_digests._digest_on_host(array, starts)
    assert int(checkpoint_digests._digest_by_rows(jnp.asarray(array), starts)) == on_host
    assert int(checkpoint_digests._digest(jnp.asarray(array), starts)) == on_host


@pytest.mark.parametrize("dtype", [np.float32, np.int32, ml_dtypes.bfloat16, np.float16, np.int8, np.bool])
def test_digest_words_of_all_dtypes_are_equal_on_devices(dtype: np.dtype):
    array = np.random.default_rng(0).normal(size=(7, 9)).astype(dtype)
    assert int(checkpoint_digests._digest(jnp.asarray(array), (0, 0))) == checkpoint_digests._digest_on_host(
        array, (0, 0)
    )


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32, ml_dtypes.bfloat16, np.float16, np.int8, np.bool])
def test_any_flipped_bit_changes_the_digest(dtype: np.dtype):
    array = np.zeros((2, 3), dtype)
    before = describe({"a": array}, {})
    for bit in range(1 if dtype is np.bool else 8 * array.dtype.itemsize):
        for index in np.ndindex(array.shape):
            flipped = array.copy()
            words = flipped.view(f"u{array.dtype.itemsize}")
            words[index] ^= words.dtype.type(1 << bit)
            assert changed_arrays(array_digests({"a": flipped}), before) == ["a"], (bit, index)


def test_digest_detects_swapped_rows_zeroed_blocks_and_sign_pairs():
    array = np.random.default_rng(1).normal(size=(16, 32)).astype(np.float32)
    before = describe({"a": array}, {})
    zeroed, signs = array.copy(), array.copy()
    zeroed[4:8] = 0
    signs[3, 5] *= -1
    signs[9, 20] *= -1
    for other in (array[::-1], array[:, ::-1], array.reshape(32, 16), array.T, zeroed, signs):
        assert changed_arrays(array_digests({"a": np.ascontiguousarray(other)}), before) == ["a"]
    assert changed_arrays(array_digests({"a": array}), before) == []
    assert changed_arrays(array_digests({"b": array}), before) == ["b"]


def test_names_are_paths_in_the_tree():
    tree = {"encoder": {"kernel": np.ones(2, np.float32)}, "moments": (np.ones((), np.int32),)}
    assert list(array_digests(tree)) == ["encoder.kernel", "moments.0"]


def test_nonfinite_arrays_are_named():
    arrays = {
        "a": np.array([1.0, np.inf], np.float32),
        "b": np.array([1], np.int32),
        "c": np.array([np.nan], np.float32),
    }
    assert nonfinite_arrays(arrays) == ["a", "c"]


def test_json_digest_does_not_depend_on_the_order_of_keys():
    assert json_digest({"a": 1, "b": (2, 3)}) == json_digest({"b": [2, 3], "a": 1})
    assert json_digest({"a": 1}) != json_digest({"a": 2})
