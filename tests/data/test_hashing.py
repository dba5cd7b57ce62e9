import numpy as np
import pytest

from bert_jax.data.hashing import key_from, permute, random_bits


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 1000, 4097])
def test_permute_is_a_bijection(size):
    for key in (0, 1, 12345, 2**64 - 1):
        shuffled = permute(np.arange(size), size, key)
        assert shuffled.dtype == np.int64
        assert np.array_equal(np.sort(shuffled), np.arange(size))


def test_permute_of_a_range_too_large_to_hold():
    size = 2**40 + 12345
    index = np.concatenate([np.arange(1000), np.arange(size - 1000, size)])
    shuffled = permute(index, size, 9)
    assert len(np.unique(shuffled)) == len(index)
    assert shuffled.min() >= 0
    assert shuffled.max() < size
    assert abs(shuffled.mean() / size - 0.5) < 0.05


def test_random_bits_is_stable():
    expected = [9672475392221035855, 5573481420429128725, 17358316652931856208]
    assert random_bits(np.uint64(7), np.arange(3, dtype=np.uint64)).tolist() == expected


def test_key_from_is_stable():
    """A change here changes the order, the masks and the hash of every dataset there is."""
    assert key_from("a", 1, "b") == 8609886554906282919
    assert key_from("text") == 2024992729630503895


def test_key_from_tells_its_parts_apart():
    keys = [key_from("ab", "c"), key_from("a", "bc"), key_from("abc"), key_from("ab", "c", ""), key_from("c", "ab")]
    assert len(set(keys)) == len(keys)
    assert key_from("a", 1) == key_from("a", np.int64(1))  # epochs come out of arrays
    assert all(0 <= key < 2**64 for key in keys)
