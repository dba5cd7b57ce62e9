"""The share of [UNK] among a corpus's tokens: what it says of a vocabulary, and when it is too much."""

import logging
from collections.abc import Sequence

import numpy as np

from bert_jax.data.preparation.sorted_runs import Run
from bert_jax.errors import InputError
from bert_jax.text.tokenization import WordPieceTokenizer

log = logging.getLogger(__name__)

WARN_SHARE = 0.02
MAX_SHARE = 0.2
"""The default of `--allow_unk`. Released vocabularies have below 0.005 on the text they were made for."""

_SAMPLED_RUNS = 64
_SAMPLED_TOKENS = 1 << 20  # of each


def unknown_share(token_counts: np.ndarray, unk_id: int) -> float:
    """Returns the share of [UNK] in token counts [V]."""
    return float(token_counts[unk_id] / max(1, token_counts.sum()))


def sampled_share(runs: Sequence[Run], unk_id: int) -> float:
    """Returns the share of [UNK] in a sample of tokenized documents, which runs hold in random order."""
    unknown = tokens = 0
    for run in runs[:: -(-len(runs) // _SAMPLED_RUNS)]:
        sample = run.part("tokens", 0, min(run.tokens, _SAMPLED_TOKENS))
        unknown, tokens = unknown + int((sample == unk_id).sum()), tokens + len(sample)
    return unknown / max(1, tokens)


def check_limit(limit: float) -> None:
    """Refuses an `--allow_unk` that is no share."""
    if not 0 <= limit <= 1:
        raise InputError(f"--allow_unk is a share from 0 to 1, not {limit}; the default is {MAX_SHARE}")


def check_share(share: float, limit: float, tokenizer: WordPieceTokenizer) -> None:
    """Refuses text of which more than the share `limit` is [UNK].

    Raises:
      InputError: with the share, and an `--allow_unk` that would take it.
    """
    if share > limit:
        raise InputError(
            f"{share:.1%} of the tokens are [UNK], more than --allow_unk {limit:g}: the vocabulary "
            f"({_case(tokenizer)}) does not fit the text; give the --vocab that was made from such text, with --cased "
            f"if it is cased, or --allow_unk {min(1.0, int(share * 20 + 1) / 20):g}"
        )


def warn_of_share(share: float, tokenizer: WordPieceTokenizer, *, above: float, where: str) -> None:
    """Logs a warning where more than the share `above` of the tokens of `where` is [UNK]."""
    if share > above:
        log.warning(
            "%s: %.1f%% of the tokens are [UNK], which nothing is learned from: the vocabulary (%s) may not fit the "
            "text; check its case and its language",
            where,
            100 * share,
            _case(tokenizer),
        )


def _case(tokenizer: WordPieceTokenizer) -> str:
    return "uncased" if tokenizer.lowercase else "cased"
