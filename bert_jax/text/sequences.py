"""Encoder input of one or two texts: special tokens added, truncated to a maximum length."""

from collections.abc import Sequence
from dataclasses import dataclass

from bert_jax.text.tokenization import WordPieceTokenizer


@dataclass(frozen=True)
class EncodedSequence:
    """Token ids [CLS] A [SEP] or [CLS] A [SEP] B [SEP]; the first `first_length` of `input_ids` have token type 0."""

    input_ids: tuple[int, ...]
    first_length: int


def truncate_pair(a: Sequence[int], b: Sequence[int], limit: int) -> tuple[Sequence[int], Sequence[int]]:
    """Truncates a pair to `limit` tokens in total, one by one from the end of the longer text (tie: from `b`).

    Equals `_truncate_seq_pair` in the reference's `run_classifier.py` (google-research/bert).
    """
    excess = len(a) + len(b) - limit
    if excess <= 0:
        return a, b
    shorter = min(len(a), len(b))
    # First only the longer text is truncated, to the length of the other; then both are, `b` first.
    from_longer = min(excess, abs(len(a) - len(b)))
    keep_a, keep_b = (len(a) - from_longer, shorter) if len(a) > len(b) else (shorter, len(b) - from_longer)
    rest = excess - from_longer
    return a[: keep_a - rest // 2], b[: keep_b - (rest + 1) // 2]


def encode_sequence(
    tokenizer: WordPieceTokenizer, a: Sequence[int], b: Sequence[int] | None, max_seq_len: int
) -> EncodedSequence:
    """Adds special tokens to one or two texts, truncated to at most `max_seq_len` tokens (at least 4)."""
    if b is None:
        ids = (tokenizer.cls_id, *a[: max_seq_len - 2], tokenizer.sep_id)
        return EncodedSequence(ids, len(ids))
    a, b = truncate_pair(a, b, max_seq_len - 3)
    first = (tokenizer.cls_id, *a, tokenizer.sep_id)
    return EncodedSequence((*first, *b, tokenizer.sep_id), len(first))
