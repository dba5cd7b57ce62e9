import numpy as np
import pytest

from bert_jax.data.hashing import key_from
from bert_jax.data.loading.masking import Masking, mask_batch, mask_keys, prediction_counts
from bert_jax.errors import InputError

PAD, CLS, SEP, MASK = 0, 2, 3, 4
VOCAB = 997
FIRST = 5  # ordinary ids are [FIRST, VOCAB)


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


def test_counts_round_as_python_rounds():
    lengths = np.arange(5, 513)
    assert prediction_counts(lengths).tolist() == [max(1, round(0.15 * length)) for length in lengths.tolist()]


def test_counts_of_the_usual_lengths():
    assert prediction_counts(np.array([10, 30, 128, 512, 5])).tolist() == [2, 4, 19, 77, 1]
    assert prediction_counts(np.array([128, 512]), 0.5).tolist() == [64, 256]


def test_without_max_predictions_every_target_is_predicted():
    lengths = np.arange(5, 129)
    ids, maskable, lengths = make_rows(np.random.default_rng(1), lengths, 128)
    batch = draw(ids, maskable, lengths, some_keys(len(lengths)), Masking(mask_rate=0.3))
    assert batch["masked_positions"].shape[1] == 38
    counts = np.minimum([max(1, round(0.3 * length)) for length in lengths.tolist()], maskable.sum(axis=1))
    assert batch["masked_weights"].sum(axis=1).tolist() == counts.tolist()


def test_every_length_gets_its_count():
    lengths = np.arange(5, 129)
    ids, maskable, lengths = make_rows(np.random.default_rng(1), lengths, 128)
    batch = draw(ids, maskable, lengths, some_keys(len(lengths)), Masking(20))
    expected = [min(20, max(1, round(0.15 * length))) for length in lengths.tolist()]
    assert batch["masked_weights"].sum(axis=1).tolist() == expected
    assert batch["masked_weights"].dtype == np.float32
    assert {name: batch[name].shape for name in batch} == {
        "input_ids": (124, 128), "masked_positions": (124, 20), "masked_ids": (124, 20), "masked_weights": (124, 20),
    }  # fmt: skip
    assert {batch[name].dtype for name in ("input_ids", "masked_positions", "masked_ids")} == {np.dtype(np.int32)}


def test_positions_are_ordinary_ascending_and_distinct():
    rng = np.random.default_rng(2)
    ids, maskable, lengths = make_rows(rng, rng.integers(5, 129, 3000), 128)
    batch = draw(ids, maskable, lengths, some_keys(3000), Masking(20))
    before = ids.copy()
    for row, (positions, weights) in enumerate(zip(batch["masked_positions"], batch["masked_weights"], strict=True)):
        real = positions[weights > 0]
        assert (np.diff(real) > 0).all()
        assert maskable[row, real].all()
        assert np.array_equal(weights, np.sort(weights)[::-1])  # filling comes last
        assert (positions[weights == 0] == 0).all()
        assert (batch["masked_ids"][row, weights == 0] == 0).all()
    assert np.array_equal(ids, before)


def test_originals_come_back():
    rng = np.random.default_rng(3)
    ids, maskable, lengths = make_rows(rng, rng.integers(5, 129, 2000), 128)
    batch = draw(ids, maskable, lengths, some_keys(2000), Masking(20))
    restored = batch["input_ids"].copy()
    row, slot = np.nonzero(batch["masked_weights"])
    restored[row, batch["masked_positions"][row, slot]] = batch["masked_ids"][row, slot]
    assert np.array_equal(restored, ids)
    assert (batch["input_ids"] != ids).any(axis=1).mean() > 0.9


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


def test_neighbours_are_chosen_independently(many):
    ids, maskable, lengths = many
    batch = draw(ids, maskable, lengths, some_keys(len(ids)))
    chosen = np.zeros(ids.shape, bool)
    row, slot = np.nonzero(batch["masked_weights"])
    chosen[row, batch["masked_positions"][row, slot]] = True
    both = maskable[:, 1:] & maskable[:, :-1]
    together = (chosen[:, 1:] & chosen[:, :-1])[both].mean()
    candidates = 125
    assert together == pytest.approx(19 * 18 / (candidates * (candidates - 1)), rel=0.03)


def test_sequences_too_short_for_their_count():
    ids = np.array([[CLS, 9, SEP, SEP, PAD]], np.int32)
    maskable = np.array([[False, True, False, False, False]])
    batch = draw(ids, maskable, np.array([4]), some_keys(1), Masking(8, mask_rate=1.0, mask_token=1, keep_token=0,
                 random_token=0))  # fmt: skip
    assert batch["masked_weights"].tolist() == [[1, 0, 0, 0, 0, 0, 0, 0]]  # more slots than columns
    assert batch["masked_positions"].tolist() == [[1, 0, 0, 0, 0, 0, 0, 0]]
    assert batch["input_ids"].tolist() == [[CLS, MASK, SEP, SEP, PAD]]


def test_nothing_to_mask():
    ids = np.array([[CLS, SEP, SEP, PAD]], np.int32)
    batch = draw(ids, np.zeros((1, 4), bool), np.array([3]), some_keys(1))
    assert batch["masked_weights"].sum() == 0
    assert np.array_equal(batch["input_ids"], ids)


def test_every_token_can_be_predicted():
    ids, maskable, lengths = make_rows(np.random.default_rng(4), [20, 30], 32)
    batch = draw(ids, maskable, lengths, some_keys(2), Masking(64, mask_rate=1.0))
    assert batch["masked_weights"].sum(axis=1).tolist() == [17, 27]


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


@pytest.mark.parametrize("vocab_size", [7, 30522, 250_000])
def test_random_tokens_span_the_vocabulary(many, vocab_size):
    ids, maskable, lengths = many
    ids = np.where(maskable, 5, ids).astype(np.int32)
    masking = Masking(20, mask_token=0, keep_token=0, random_token=1)
    batch = draw(ids, maskable, lengths, some_keys(len(ids)), masking, vocab_size=vocab_size)
    row, slot = np.nonzero(batch["masked_weights"])
    now = batch["input_ids"][row, batch["masked_positions"][row, slot]]
    parts = np.minimum(vocab_size, 500)
    assert now.min() >= 0
    assert now.max() < vocab_size
    # Parts of a vocabulary that does not divide have one id more or less.
    part_of = np.arange(vocab_size) * parts // vocab_size
    assert_shares(np.bincount(part_of[now], minlength=parts), np.bincount(part_of))


@pytest.mark.parametrize(
    "shares", [(1, 0, 0), (0.8, 0, 0.2), (0.8, 0.2, 0), (0, 0.2, 0.8), (0, 0, 1), (0, 1, 0), (0.5, 0.25, 0.25)]
)
def test_other_mixes(many, shares):
    ids, maskable, lengths = many
    masking = Masking(20, mask_token=shares[0], keep_token=shares[1], random_token=shares[2])
    counts, _ = actions(draw(ids, maskable, lengths, some_keys(len(ids)), masking))
    hit = shares[2] / VOCAB
    expected = np.array([shares[0] + hit, shares[1] + hit, shares[2] - 2 * hit])
    assert counts[expected == 0].sum() == 0
    if (expected > 0).sum() > 1:
        assert_shares(counts[expected > 0], expected[expected > 0])


def test_the_action_does_not_depend_on_the_position(many):
    ids, maskable, lengths = many
    batch = draw(ids, maskable, lengths, some_keys(len(ids)))
    row, slot = np.nonzero(batch["masked_weights"])
    positions = batch["masked_positions"][row, slot]
    masked = batch["input_ids"][row, positions] == MASK
    for half in (positions < 64, positions % 2 == 0, slot < 9):
        assert masked[half].mean() == pytest.approx(0.8, abs=6 * 0.4 / np.sqrt(half.sum()))


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


def test_a_wider_row_has_the_same_mask():
    rng = np.random.default_rng(6)
    ids, maskable, lengths = make_rows(rng, rng.integers(5, 65, 100), 64)
    wide = draw(np.pad(ids, ((0, 0), (0, 64))), np.pad(maskable, ((0, 0), (0, 64))), lengths, some_keys(100))
    narrow = draw(ids, maskable, lengths, some_keys(100))
    assert np.array_equal(wide["input_ids"][:, :64], narrow["input_ids"])
    for name in ("masked_positions", "masked_ids", "masked_weights"):
        assert np.array_equal(wide[name], narrow[name])


def test_keys_are_of_instance_seed_and_epoch():
    ids = np.arange(1000, dtype=np.uint64)
    seeds = [key_from(seed, "mask") for seed in range(5)]
    table = np.stack([mask_keys(ids, seed, np.full(1000, epoch)) for seed in seeds for epoch in range(5)])
    assert table.dtype == np.uint64
    assert len(np.unique(table)) == table.size
    assert mask_keys(ids[3:4], seeds[2], np.array([4]))[0] == table[2 * 5 + 4, 3]
    mixed = mask_keys(ids[:2], seeds[1], np.array([0, 3]))
    assert mixed.tolist() == [table[5, 0], table[8, 1]]


def test_epochs_draw_other_masks():
    rng = np.random.default_rng(7)
    ids, maskable, lengths = make_rows(rng, np.full(500, 64), 64)
    first, second = (draw(ids, maskable, lengths, some_keys(500, epoch=epoch)) for epoch in (0, 1))
    same = (first["masked_positions"][:, :10] == second["masked_positions"][:, :10]).all(axis=1)
    assert same.sum() == 0


# --- Options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_token": 0.9}, r"objective\.mask_token=0\.9\b"),
        ({"mask_token": -0.1, "keep_token": 1.0}, r"objective\.mask_token=-0\.1\b"),
        ({"mask_token": float("nan")}, r"objective\.mask_token=nan\b"),
        ({"mask_rate": 0.0}, r"objective\.mask_rate=0\.0:"),
        ({"mask_rate": 1.5}, r"objective\.mask_rate=1\.5:"),
        ({"mask_rate": float("nan")}, r"objective\.mask_rate=nan:"),
        ({"max_predictions": 0}, "max_predictions=0"),
        ({"max_predictions": -2}, "max_predictions=-2"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        Masking(**{"max_predictions": 20, **options})


def assert_shares(counts, shares):
    """Chi-square test of counts against shares, with a limit of six standard deviations."""
    expected = shares * (counts.sum() / shares.sum())
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = len(counts) - 1
    assert chi_square < freedom + 6 * np.sqrt(2 * freedom), (chi_square, freedom)
