import numpy as np
import pytest

from bert_jax.data.hashing import content_hash, key_from, permute, random_bits


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 1000, 4097])
def test_permute_is_a_bijection(size):
    for key in (0, 1, 12345, 2**64 - 1):
        shuffled = permute(np.arange(size), size, key)
        assert shuffled.dtype == np.int64
        assert np.array_equal(np.sort(shuffled), np.arange(size))


def test_permute_of_any_position_alone():
    whole = permute(np.arange(1000), 1000, 3)
    some = np.array([999, 0, 17, 17])
    assert np.array_equal(permute(some, 1000, 3), whole[some])


def test_permute_of_a_range_too_large_to_hold():
    size = 2**40 + 12345
    index = np.concatenate([np.arange(1000), np.arange(size - 1000, size)])
    shuffled = permute(index, size, 9)
    assert len(np.unique(shuffled)) == len(index)
    assert shuffled.min() >= 0
    assert shuffled.max() < size
    assert abs(shuffled.mean() / size - 0.5) < 0.05


def test_keys_name_different_permutations():
    orders = {tuple(permute(np.arange(100), 100, key)) for key in range(200)}
    assert len(orders) == 200


@pytest.mark.parametrize(
    "size", [3, pytest.param(7, marks=pytest.mark.long), pytest.param(100, marks=pytest.mark.long)]
)
def test_an_element_lands_anywhere_over_keys(size):
    keys = 1000
    landed = np.stack([permute(np.arange(size), size, key) for key in range(keys)])
    for position in (0, size // 2, size - 1):
        assert_uniform(np.bincount(landed[:, position], minlength=size))
    # Nor do neighbours stay together.
    distance = (landed[:, 1] - landed[:, 0]) % size
    assert_uniform(np.bincount(distance, minlength=size)[1:])


def test_random_bits_do_not_depend_on_the_batch():
    keys = np.arange(50, dtype=np.uint64) * np.uint64(977)
    counters = np.arange(20, dtype=np.uint64)
    table = random_bits(keys[:, None], counters)
    assert table.shape == (50, 20)
    assert table.dtype == np.uint64
    assert np.array_equal(random_bits(keys[7:9, None], counters), table[7:9])
    assert np.array_equal(random_bits(keys, counters[3]), table[:, 3])
    assert random_bits(keys[4], counters[11]) == table[4, 11]
    assert len(np.unique(table)) == table.size


def test_random_bits_are_balanced():
    table = random_bits(np.arange(200, dtype=np.uint64)[:, None], np.arange(500, dtype=np.uint64))
    ones = np.array([((table >> np.uint64(bit)) & np.uint64(1)).sum() for bit in range(64)])
    assert np.abs(ones / table.size - 0.5).max() < 5 * 0.5 / np.sqrt(table.size)
    assert_uniform(np.bincount((table >> np.uint64(56)).ravel().astype(int), minlength=256))


def test_random_bits_is_stable():
    expected = [9672475392221035855, 5573481420429128725, 17358316652931856208]
    assert random_bits(np.uint64(7), np.arange(3, dtype=np.uint64)).tolist() == expected


def test_key_from_is_stable():
    """A change here changes the order, the masks and the hash of every dataset there is."""
    assert key_from("a", 1, "b") == 8609886554906282919
    assert content_hash("text") == 2024992729630503895


def test_key_from_tells_its_parts_apart():
    keys = [key_from("ab", "c"), key_from("a", "bc"), key_from("abc"), key_from("ab", "c", ""), key_from("c", "ab")]
    assert len(set(keys)) == len(keys)
    assert key_from("a", 1) == key_from("a", np.int64(1))  # epochs come out of arrays
    assert all(0 <= key < 2**64 for key in keys)


def test_content_hash_takes_any_text():
    texts = ["", "a", "A", "a ", "é", "e\u0301", "\ud800", "漢"]
    assert len({content_hash(text) for text in texts}) == len(texts)


def assert_uniform(counts):
    """Chi-square, six standard deviations."""
    expected = counts.sum() / len(counts)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = len(counts) - 1
    assert chi_square < freedom + 6 * np.sqrt(2 * freedom), (chi_square, freedom)
