"""Masked-LM masks, drawn for a whole batch at once from each instance's own key.

The rule is the reference's (google-research/bert, `create_masked_lm_predictions`; the paper's section 3.1 and
appendix C.2): of the tokens that are not special, n = min(max_predictions, max(1, round(rate * length))) are chosen;
of those, 80% become [MASK], 10% stay, 10% become a uniform draw from the whole vocabulary. Without `max_predictions`,
n = max(1, round(rate * length)).

With `whole_word` the draw is of words, a word being a token and the `##` pieces that follow it: words come in random
order, and one that would make more than n tokens is passed over. Each token of a word has its own 80/10/10 draw.
"""

from dataclasses import dataclass

import numpy as np

from bert_jax.data.hashing import key_from, mix, random_bits
from bert_jax.errors import InputError

_CHOICE, _ACTION, _TOKEN = (np.uint64(key_from("mask", name)) for name in ("choice", "action", "token"))


@dataclass(frozen=True)
class Masking:
    """How many tokens are predicted, and what is put in their place.

    `mask_rate` is a share of a sequence's tokens, special ones counted, as the reference counts them. `mask_token`,
    `keep_token` and `random_token` are shares of the chosen tokens and sum to 1.
    """

    max_predictions: int = -1  # of a sequence, at most; -1: as many as `mask_rate` asks for
    mask_rate: float = 0.15
    mask_token: float = 0.8
    keep_token: float = 0.1
    random_token: float = 0.1
    whole_word: bool = False

    def __post_init__(self) -> None:
        shares = (self.mask_token, self.keep_token, self.random_token)
        if not (min(shares) >= 0 and abs(sum(shares) - 1) <= 1e-6):  # so that NaN is refused as well
            raise InputError(
                f"objective.mask_token, keep_token and random_token are shares that sum to 1, not {shares}: change them"
            )
        if not 0 < self.mask_rate <= 1:
            raise InputError(f"objective.mask_rate is a share in (0, 1], not {self.mask_rate}")
        if self.max_predictions < 1 and self.max_predictions != -1:
            raise InputError(
                f"data.max_predictions={self.max_predictions}: must be at least 1, or -1 for what objective.mask_rate "
                "asks for"
            )

    def predictions(self, lengths: np.ndarray | int) -> np.ndarray:
        """Returns how many tokens are predicted in sequences of these lengths [B]."""
        counts = prediction_counts(lengths, self.mask_rate)
        return counts if self.max_predictions == -1 else np.minimum(counts, self.max_predictions)

    def slots(self, length: int) -> int:
        """Returns P, the predictions that a sequence of at most `length` tokens has room for."""
        return int(prediction_counts(length, self.mask_rate)) if self.max_predictions == -1 else self.max_predictions


def prediction_counts(lengths: np.ndarray | int, mask_rate: float = 0.15) -> np.ndarray:
    """How many tokens are to be predicted in sequences of these lengths [B]; halves round to even, as Python rounds."""
    return np.maximum(1, np.rint(np.asarray(lengths) * mask_rate).astype(np.int64))


def mask_batch(
    input_ids: np.ndarray,
    maskable: np.ndarray,
    lengths: np.ndarray,
    keys: np.ndarray,
    masking: Masking,
    *,
    mask_id: int,
    vocab_size: int,
    continuation: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Draws the masks of a batch.

    Args:
      input_ids: int32 [B, L], unmasked.
      maskable: bool [B, L], the real tokens that are not special: the candidates.
      lengths: int [B], real tokens in each row, special ones counted.
      keys: uint64 [B], one for each row: the same key draws the same mask.
      masking: the rule.
      mask_id: the id of [MASK].
      vocab_size: random tokens are uniform in [0, vocab_size).
      continuation: bool [V], the pieces that begin with `##`; what whole-word masks go by.

    Returns:
      `input_ids` int32 [B, L] masked; `masked_positions` int32 [B, P] ascending, `masked_ids` int32 [B, P] the original
      tokens, `masked_weights` float32 [B, P] 1 for a prediction and 0 for filling. P is `masking.slots(L)`.
    """
    length = input_ids.shape[1]
    predictions = masking.slots(length)
    slots = min(predictions, length)
    wanted = masking.predictions(lengths)

    columns = np.arange(length, dtype=np.uint64)
    order = random_bits((keys ^ _CHOICE)[:, None], columns)
    if masking.whole_word:
        assert continuation is not None
        chosen = _choose_words(order, maskable, continuation[input_ids], wanted)
    else:
        chosen = _choose_tokens(order, maskable, wanted)
    # Ascending, and unused slots at the end.
    positions = np.sort(np.where(chosen, np.arange(length), length), axis=1)[:, :slots]
    used = positions < length
    positions = np.where(used, positions, 0)

    originals = np.take_along_axis(input_ids, positions, axis=1)
    at = positions.astype(np.uint64)
    action = (random_bits((keys ^ _ACTION)[:, None], at) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    draw = random_bits((keys ^ _TOKEN)[:, None], at) >> np.uint64(32)
    random_ids = ((draw * np.uint64(vocab_size)) >> np.uint64(32)).astype(np.int32)
    replacement = np.where(action < masking.mask_token, np.int32(mask_id), originals)
    replacement = np.where(action >= masking.mask_token + masking.keep_token, random_ids, replacement)

    masked = input_ids.copy()
    row_of, slot_of = np.nonzero(used)
    masked[row_of, positions[row_of, slot_of]] = replacement[row_of, slot_of]

    filling = ((0, 0), (0, predictions - slots))
    return {
        "input_ids": masked,
        "masked_positions": np.pad(positions.astype(np.int32), filling),
        "masked_ids": np.pad(np.where(used, originals, 0).astype(np.int32), filling),
        "masked_weights": np.pad(used.astype(np.float32), filling),
    }


_LAST = np.uint64(1 << 63)


def _in_random_order(order: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """Columns [B, L], the candidates first, by their random bits; the top bit marks what is none."""
    return np.argsort((order >> np.uint64(1)) | np.where(candidates, np.uint64(0), _LAST), axis=1)


def _choose_tokens(order: np.ndarray, maskable: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """bool [B, L]: the first `wanted` candidates of each row in random order."""
    counts = np.minimum(wanted, maskable.sum(axis=1))
    chosen = np.zeros_like(maskable)
    np.put_along_axis(chosen, _in_random_order(order, maskable), np.arange(maskable.shape[1]) < counts[:, None], axis=1)
    return chosen


def _choose_words(order: np.ndarray, maskable: np.ndarray, continues: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """bool [B, L]: words in random order, each that does not overflow `wanted`, until that is reached.

    A row's first candidate begins a word whatever it is. As in the reference, a `##` piece goes with the candidate
    before it, which at the start of the second segment is the first segment's last word.
    """
    rows, length = maskable.shape
    starts = maskable & (~continues | (np.cumsum(maskable, axis=1) == 1))
    word = np.maximum(np.cumsum(starts, axis=1) - 1, 0)  # of each column; meant for candidates alone
    sizes = np.bincount((np.arange(rows)[:, None] * length + word)[maskable], minlength=rows * length)
    first_columns = _in_random_order(order, starts)
    word_at = np.take_along_axis(word, first_columns, axis=1)
    size_at = np.take_along_axis(sizes.reshape(rows, length), word_at, axis=1)
    taken = np.zeros_like(maskable)  # by word
    total, left = np.zeros(rows, np.int64), starts.sum(axis=1)
    for rank in range(int(left.max(initial=0))):
        fits = (rank < left) & (total + size_at[:, rank] <= wanted)
        total += np.where(fits, size_at[:, rank], 0)
        taken[fits, word_at[fits, rank]] = True
        if (total == wanted).all():
            break
    return maskable & np.take_along_axis(taken, word, axis=1)


def mask_keys(instance_ids: np.ndarray, seed_key: int, epochs: np.ndarray | int) -> np.ndarray:
    """uint64 [B]: the key of each instance's mask in an epoch, whatever batch or process it falls to."""
    with np.errstate(over="ignore"):
        return mix(mix(instance_ids ^ np.uint64(seed_key)) + np.asarray(epochs).astype(np.uint64))
