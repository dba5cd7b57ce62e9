"""Masks: their shares, and that they are those of a plain port of the reference's rule with our random draws."""

import numpy as np
import pytest

from bert_jax.data.hashing import key_from, random_bits
from bert_jax.data.loading import masking as ours
from bert_jax.data.loading.masking import Masking, mask_batch, mask_keys

PAD, CLS, SEP, MASK = 0, 2, 3, 4
VOCAB = 997
FIRST = 5  # ordinary ids are [FIRST, VOCAB)
CONTINUATION = np.arange(VOCAB) >= 500  # every id from 500 on begins with ##


def make_rows(rng, lengths, width):
    """Returns [CLS] A [SEP] B [SEP] rows of these lengths, padded to `width`, and their maskable positions."""
    lengths = np.asarray(lengths)
    column = np.arange(width)
    ids = rng.integers(FIRST, VOCAB, (len(lengths), width)).astype(np.int32)
    first_sep = rng.integers(2, np.maximum(3, lengths - 2))[:, None]
    last_sep = lengths[:, None] - 1
    maskable = (column > 0) & (column < last_sep) & (column != first_sep)
    ids[:, 0] = CLS
    ids = np.where((column == first_sep) | (column == last_sep), SEP, ids)
    ids = np.where(column > last_sep, PAD, ids).astype(np.int32)
    return ids, maskable, lengths


def draw(ids, maskable, lengths, keys, masking=None, vocab_size=VOCAB):
    masking = masking or Masking(20)
    return mask_batch(ids, maskable, lengths, keys, masking, mask_id=MASK, vocab_size=vocab_size)


def some_keys(rows, seed=0, epoch=0):
    return mask_keys(np.arange(rows, dtype=np.uint64) * np.uint64(7919), seed, np.full(rows, epoch))


@pytest.fixture(scope="module")
def many():
    """6,000 rows of 128 tokens, all of them the ordinary token 500: more than 100,000 predictions."""
    rng = np.random.default_rng(0)
    ids, maskable, lengths = make_rows(rng, np.full(6000, 128), 128)
    ids = np.where(maskable, 500, ids).astype(np.int32)
    return ids, maskable, lengths


# --- How many, and where ----------------------------------------------------------------------------------------


def test_every_position_is_as_likely(many):
    ids, maskable, lengths = many
    batch = draw(ids, maskable, lengths, some_keys(len(ids)))
    row, slot = np.nonzero(batch["masked_weights"])
    counts = np.bincount(batch["masked_positions"][row, slot], minlength=128)
    share = maskable.sum(axis=0)
    assert counts[share == 0].sum() == 0
    inside = share > 0
    # Drawn without replacement: the variance of each count is a little below the binomial's.
    assert_shares(counts[inside], share[inside])


def test_sequences_too_short_for_their_count():
    ids = np.array([[CLS, 9, SEP, SEP, PAD]], np.int32)
    maskable = np.array([[False, True, False, False, False]])
    batch = draw(ids, maskable, np.array([4]), some_keys(1), Masking(8, mask_rate=1.0, mask_token=1, keep_token=0,
                 random_token=0))  # fmt: skip
    assert batch["masked_weights"].tolist() == [[1, 0, 0, 0, 0, 0, 0, 0]]  # more slots than columns
    assert batch["masked_positions"].tolist() == [[1, 0, 0, 0, 0, 0, 0, 0]]
    assert batch["input_ids"].tolist() == [[CLS, MASK, SEP, SEP, PAD]]


# --- What is put there ------------------------------------------------------------------------------------------


def actions(batch, original=500):
    """Counts masked, kept and replaced tokens that all were `original`; returns the random ids, too."""
    row, slot = np.nonzero(batch["masked_weights"])
    now = batch["input_ids"][row, batch["masked_positions"][row, slot]]
    others = now[(now != MASK) & (now != original)]
    return np.array([(now == MASK).sum(), (now == original).sum(), len(others)]), others


def test_eighty_ten_ten(many):
    ids, maskable, lengths = many
    counts, others = actions(draw(ids, maskable, lengths, some_keys(len(ids))))
    assert counts.sum() >= 100_000
    hit = 0.1 / VOCAB  # a random token may be [MASK], or the token that was there
    assert_shares(counts, np.array([0.8 + hit, 0.1 + hit, 0.1 - 2 * hit]))
    drawn = np.bincount(others, minlength=VOCAB)
    assert len(drawn) == VOCAB
    drawn = np.delete(drawn, [MASK, 500])
    assert_shares(drawn, np.ones(VOCAB - 2))  # special tokens too, as in the reference


# --- Keys -------------------------------------------------------------------------------------------------------


def test_a_mask_follows_its_key_alone():
    rng = np.random.default_rng(5)
    ids, maskable, lengths = make_rows(rng, rng.integers(5, 65, 200), 64)
    keys = some_keys(200)
    whole = draw(ids, maskable, lengths, keys)
    for rows in (rng.permutation(200), np.array([17]), np.arange(50, 60), np.array([3, 3, 9])):
        part = draw(ids[rows], maskable[rows], lengths[rows], keys[rows])
        for name in whole:
            assert np.array_equal(part[name], whole[name][rows])


def test_keys_are_of_instance_seed_and_epoch():
    ids = np.arange(1000, dtype=np.uint64)
    seeds = [key_from(seed, "mask") for seed in range(5)]
    table = np.stack([mask_keys(ids, seed, np.full(1000, epoch)) for seed in seeds for epoch in range(5)])
    assert table.dtype == np.uint64
    assert len(np.unique(table)) == table.size
    assert mask_keys(ids[3:4], seeds[2], np.array([4]))[0] == table[2 * 5 + 4, 3]
    mixed = mask_keys(ids[:2], seeds[1], np.array([0, 3]))
    assert mixed.tolist() == [table[5, 0], table[8, 1]]


# --- The reference ----------------------------------------------------------------------------------------------


def reference_mask(ids, maskable, length, key, masking):
    """Ports google-research/bert's create_masked_lm_predictions for one row, with our hashes as random draws."""
    words = []
    for column, token in enumerate(ids.tolist()):
        if not maskable[column]:
            continue
        if masking.whole_word and words and CONTINUATION[token]:
            words[-1].append(column)
        else:
            words.append([column])

    def draw(name, column):
        return int(random_bits(np.uint64(key) ^ getattr(ours, name), np.uint64(column)))

    words.sort(key=lambda word: draw("_CHOICE", word[0]) >> 1)
    wanted = min(masking.max_predictions, max(1, round(int(length) * masking.mask_rate)))
    output, chosen = ids.copy(), []
    for word in words:
        if len(chosen) >= wanted:
            break
        if len(chosen) + len(word) > wanted:
            continue
        for column in word:
            chosen.append(column)
            action = (draw("_ACTION", column) >> 11) * 2.0**-53
            if action < masking.mask_token:
                output[column] = MASK
            elif action >= masking.mask_token + masking.keep_token:
                output[column] = ((draw("_TOKEN", column) >> 32) * VOCAB) >> 32
    chosen.sort()
    return output, chosen


@pytest.mark.parametrize("whole_word", [False, True])
@pytest.mark.parametrize(("rate", "most"), [(0.15, 20), (0.5, 100), (0.15, 3)])
@pytest.mark.parametrize("share", [0.0, 0.4, 0.9])
def test_masks_are_the_references_for_the_same_draws(whole_word, rate, most, share):
    masking = Masking(most, mask_rate=rate, whole_word=whole_word)
    rng = np.random.default_rng(1)
    ids, maskable, lengths = make_rows(rng, rng.integers(6, 65, 200), 64)
    pieces = 495 * (rng.random(ids.shape) < share)
    ids = np.where(maskable, FIRST + ids % (500 - FIRST) + pieces, ids).astype(np.int32)
    keys = some_keys(200)
    batch = mask_batch(
        ids, maskable, lengths, keys, masking, mask_id=MASK, vocab_size=VOCAB, continues_word=CONTINUATION[ids]
    )
    for row in range(200):
        expected, chosen = reference_mask(ids[row], maskable[row], lengths[row], keys[row], masking)
        count = int(batch["masked_weights"][row].sum())
        assert batch["masked_positions"][row, :count].tolist() == chosen
        assert batch["masked_ids"][row, :count].tolist() == ids[row, chosen].tolist()
        assert batch["input_ids"][row].tolist() == expected.tolist()


def assert_shares(counts, shares):
    """Chi-square test of counts against shares, with a limit of six standard deviations."""
    expected = shares * (counts.sum() / shares.sum())
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = len(counts) - 1
    assert chi_square < freedom + 6 * np.sqrt(2 * freedom), (chi_square, freedom)
