"""Share of [UNK] among a corpus's tokens, with warnings and limits that detect an unsuitable vocabulary."""

import logging

import numpy as np

from bert_jax.data.preparation.options import MAX_SHARE
from bert_jax.errors import InputError
from bert_jax.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

WARN_SHARE = 0.02


def unknown_share(token_counts: np.ndarray, unk_id: int) -> float:
    """Returns the share of [UNK] in token counts [V]."""
    return float(token_counts[unk_id] / max(1, token_counts.sum()))


def check_limit(limit: float) -> None:
    """Raises InputError for an invalid `--allow_unk`."""
    if not 0 <= limit <= 1:
        raise InputError(f"allow_unk={limit}: must be a share from 0 to 1; the default is {MAX_SHARE}")


def check_share(share: float, limit: float, tokenizer: Tokenizer) -> None:
    """Checks that the share of [UNK] is at most `limit`.

    Raises:
      InputError: with the share, and a value of `--allow_unk` that would accept it.
    """
    if share > limit:
        raise InputError(
            f"allow_unk={limit:g}: {share:.1%} of the tokens are [UNK], so that the vocabulary "
            f"({_case(tokenizer)}) does not match the text; pass a --vocab trained on such text, with --cased if it is "
            f"cased, or allow_unk={min(1.0, int(share * 20 + 1) / 20):g}"
        )


def warn_of_share(share: float, tokenizer: Tokenizer, *, above: float, where: str) -> None:
    """Logs a warning if the share of [UNK] in the tokens of `where` is greater than `above`."""
    if share > above:
        log.warning(
            "%s: %.1f%% of the tokens are [UNK], which add nothing to training: the vocabulary (%s) may not match the "
            "text; check its case and its language",
            where,
            100 * share,
            _case(tokenizer),
        )


def _case(tokenizer: Tokenizer) -> str:
    return "uncased" if tokenizer.lowercase else "cased"
