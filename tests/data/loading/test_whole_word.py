"""Masks compared with a plain port of the reference's rule that uses our random draws, also for whole words."""

import numpy as np
import pytest

from bert_jax.data.hashing import random_bits
from bert_jax.data.loading import masking as ours
from bert_jax.data.loading.masking import Masking, mask_batch, mask_keys

PAD, CLS, SEP, MASK = 0, 2, 3, 4
VOCAB = 500
CONTINUATION = np.arange(VOCAB) >= 250  # every id from 250 on begins with ##


def make_rows(seed, rows, width, share=0.4):
    """Returns [CLS] A [SEP] B [SEP] rows; `share` of the tokens are ## pieces, also at the start of a segment."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(6, width + 1, rows)
    column = np.arange(width)
    whole, pieces = rng.integers(5, 250, (rows, width)), rng.integers(250, VOCAB, (rows, width))
    ids = np.where(rng.random((rows, width)) < share, pieces, whole)
    first_sep, last_sep = rng.integers(2, lengths - 2)[:, None], lengths[:, None] - 1
    maskable = (column > 0) & (column < last_sep) & (column != first_sep)
    ids = np.where(maskable, ids, np.where(column == 0, CLS, np.where(column <= last_sep, SEP, PAD)))
    return ids.astype(np.int32), maskable, lengths


def keys_of(rows, epoch=0):
    return mask_keys(np.arange(rows, dtype=np.uint64), 7, np.full(rows, epoch))


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
    ids, maskable, lengths = make_rows(1, 200, 64, share)
    keys = keys_of(200)
    batch = mask_batch(
        ids, maskable, lengths, keys, masking, mask_id=MASK, vocab_size=VOCAB, continues_word=CONTINUATION[ids]
    )
    for row in range(200):
        expected, chosen = reference_mask(ids[row], maskable[row], lengths[row], keys[row], masking)
        count = int(batch["masked_weights"][row].sum())
        assert batch["masked_positions"][row, :count].tolist() == chosen
        assert batch["masked_ids"][row, :count].tolist() == ids[row, chosen].tolist()
        assert batch["input_ids"][row].tolist() == expected.tolist()
