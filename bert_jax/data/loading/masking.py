"""Masked-LM masking, vectorized over a batch, with a random key for each instance.

The rule is the reference's (google-research/bert, `create_masked_lm_predictions`; the paper's section 3.1 and
appendix C.2). Of the tokens that are not special, n = min(max_predictions, max(1, round(rate * length))) are chosen.
Of those, 80% become [MASK], 10% are kept, and 10% become uniform draws from the whole vocabulary. Without
`max_predictions`, n = max(1, round(rate * length)).

With `whole_word`, words are chosen: a word is a token and the `##` pieces that follow it
(`Tokenizer.continues_word`). Words are chosen in random
order; a word that would exceed n tokens is skipped. Each token of a word has its own 80/10/10 draw.
"""

from dataclasses import dataclass

import numpy as np

from bert_jax.batch import HostBatch
from bert_jax.data.hashing import key_from, mix, random_bits
from bert_jax.errors import InputError

_CHOICE, _ACTION, _TOKEN = (np.uint64(key_from("mask", name)) for name in ("choice", "action", "token"))


@dataclass(frozen=True)
class Masking:
    """Masking rule: the number of predictions and the replacement of the chosen tokens.

    `mask_rate` is a share of a sequence's tokens, special ones included, as in the reference. `mask_token`,
    `keep_token` and `random_token` are shares of the chosen tokens and sum to 1.
    """

    max_predictions: int = -1  # maximum per sequence; -1: limited by `mask_rate` only
    mask_rate: float = 0.15
    mask_token: float = 0.8
    keep_token: float = 0.1
    random_token: float = 0.1
    whole_word: bool = False

    def __post_init__(self) -> None:
        if abs(self.mask_token + self.keep_token + self.random_token - 1) > 1e-6:
            raise InputError(
                f"objective.mask_token={self.mask_token}, keep_token={self.keep_token}, random_token="
                f"{self.random_token}: must be shares that sum to 1, such as 0.8, 0.1 and 0.1"
            )

    def predictions(self, lengths: np.ndarray | int) -> np.ndarray:
        """Returns the number of predictions [B] in sequences of the given lengths [B]."""
        counts = prediction_counts(lengths, self.mask_rate)
        return counts if self.max_predictions == -1 else np.minimum(counts, self.max_predictions)

    def slots(self, length: int) -> int:
        """Returns P, the maximum number of predictions in a sequence of at most `length` tokens."""
        return int(prediction_counts(length, self.mask_rate)) if self.max_predictions == -1 else self.max_predictions


def prediction_counts(lengths: np.ndarray | int, mask_rate: float = 0.15) -> np.ndarray:
    """Returns the targets [B] of sequences of the given lengths [B], without a maximum; halves round to even."""
    return np.maximum(1, np.rint(np.asarray(lengths) * mask_rate).astype(np.int64))


def mask_batch(
    input_ids: np.ndarray, maskable: np.ndarray, lengths: np.ndarray, keys: np.ndarray, masking: Masking, *,
    mask_id: int, vocab_size: int, continues_word: np.ndarray | None = None,
) -> HostBatch:  # fmt: skip
    """Draws the masks of a batch.

    Args:
      input_ids: int32 [B, L], unmasked.
      maskable: bool [B, L], the real tokens that are not special: the candidates.
      lengths: int [B], real tokens in each row, special ones included.
      keys: uint64 [B], a random key for each row; masks are a deterministic function of it.
      masking: the masking rule.
      mask_id: the id of [MASK].
      vocab_size: random tokens are uniform in [0, vocab_size).
      continues_word: bool [B, L], the tokens that belong to the word of the token before them; required for
        whole-word masking.

    Returns:
      `input_ids` masked; `masked_positions` ascending; `masked_ids`, the original tokens; `masked_weights`. P is
      `masking.slots(L)`.
    """
    length = input_ids.shape[1]
    predictions = masking.slots(length)
    targets = masking.predictions(lengths)

    columns = np.arange(length, dtype=np.uint64)
    order = random_bits((keys ^ _CHOICE)[:, None], columns)
    if masking.whole_word:
        assert continues_word is not None
        chosen = _choose_words(order, maskable, continues_word, targets)
    else:
        chosen = _choose_tokens(order, maskable, targets)
    row_of, column = np.nonzero(chosen)  # positions of a row are ascending
    counts = np.count_nonzero(chosen, axis=1)
    slot = np.arange(len(column)) - np.repeat(np.cumsum(counts) - counts, counts)
    originals, its_keys, at = input_ids[row_of, column], keys[row_of], column.astype(np.uint64)
    action = (random_bits(its_keys ^ _ACTION, at) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    draw = random_bits(its_keys ^ _TOKEN, at) >> np.uint64(32)
    random_ids = ((draw * np.uint64(vocab_size)) >> np.uint64(32)).astype(np.int32)
    replacement = np.where(action < masking.mask_token, np.int32(mask_id), originals)
    replacement = np.where(action >= masking.mask_token + masking.keep_token, random_ids, replacement)

    masked = input_ids.copy()
    masked[row_of, column] = replacement
    shape = len(input_ids), predictions
    masked_positions, masked_ids = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    masked_positions[row_of, slot], masked_ids[row_of, slot] = column, originals
    return {
        "input_ids": masked,
        "masked_positions": masked_positions,
        "masked_ids": masked_ids,
        "masked_weights": (np.arange(predictions) < counts[:, None]).astype(np.float32),
    }


_LAST = np.uint64(1 << 63)


def _choose_tokens(order: np.ndarray, maskable: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns bool [B, L]: the first `targets` [B] candidates of each row in random order."""
    counts = np.minimum(targets, np.count_nonzero(maskable, axis=1))
    most = max(int(counts.max(initial=0)), 1)
    values = np.where(maskable, order >> np.uint64(1), _LAST)
    least = np.sort(np.partition(values, most - 1, axis=1)[:, :most], axis=1)  # much faster than a sort of all columns
    last = np.take_along_axis(least, np.maximum(counts - 1, 0)[:, None], axis=1)
    chosen: np.ndarray = (values <= last) & (counts > 0)[:, None]
    for row in np.nonzero(np.count_nonzero(chosen, axis=1) != counts)[0].tolist():  # equal draws at the end
        chosen[row] = False
        chosen[row, np.argsort(values[row], kind="stable")[: counts[row]]] = True
    return chosen


def _choose_words(order: np.ndarray, maskable: np.ndarray, continues: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns bool [B, L]: tokens of words chosen in random order, skipping words that would exceed `targets` [B].

    A row's first candidate always begins a word. As in the reference, a `##` piece belongs to the candidate before it;
    at the start of the second segment, that is the first segment's last word.
    """
    rows, length = maskable.shape
    starts = maskable & (~continues | (np.cumsum(maskable, axis=1) == 1))
    word = np.maximum(np.cumsum(starts, axis=1) - 1, 0)  # index of each column's word; valid for candidates only
    sizes = np.bincount((np.arange(rows)[:, None] * length + word)[maskable], minlength=rows * length)
    first_columns = np.argsort(np.where(starts, order >> np.uint64(1), _LAST | (order >> np.uint64(1))), axis=1)
    word_at = np.take_along_axis(word, first_columns, axis=1)
    size_at = np.take_along_axis(sizes.reshape(rows, length), word_at, axis=1)
    taken = np.zeros_like(maskable)  # by word
    total, left = np.zeros(rows, np.int64), starts.sum(axis=1)
    for rank in range(int(left.max(initial=0))):
        fits = (rank < left) & (total + size_at[:, rank] <= targets)
        total += np.where(fits, size_at[:, rank], 0)
        taken[fits, word_at[fits, rank]] = True
        if (total == targets).all():
            break
    return np.asarray(maskable & np.take_along_axis(taken, word, axis=1))


def mask_keys(instance_ids: np.ndarray, seed_key: int, epochs: np.ndarray | int) -> np.ndarray:
    """Returns uint64 [B]: the key of each instance's mask in an epoch, independent of batch and process."""
    with np.errstate(over="ignore"):
        return np.asarray(mix(mix(instance_ids ^ np.uint64(seed_key)) + np.asarray(epochs).astype(np.uint64)))
