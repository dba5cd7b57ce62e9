"""What the encoder reads of an example: one text or two, between special tokens, cut to a length."""

from collections.abc import Sequence
from dataclasses import dataclass

from bert_jax.text.tokenization import WordPieceTokenizer


@dataclass(frozen=True)
class EncodedSequence:
    """[CLS] A [SEP], or [CLS] A [SEP] B [SEP]: `input_ids`, of which the first `first_length` have token type 0."""

    input_ids: tuple[int, ...]
    first_length: int


def truncate_pair(a: Sequence[int], b: Sequence[int], limit: int) -> tuple[Sequence[int], Sequence[int]]:
    """Both cut to `limit` tokens in all, one by one from the end of the longer; of two as long, from `b`.

    As `_truncate_seq_pair` of the reference's `run_classifier.py`.
    """
    excess = len(a) + len(b) - limit
    if excess <= 0:
        return a, b
    shorter = min(len(a), len(b))
    # Down to the same length only the longer one gives; from there on both do, `b` first.
    from_longer = min(excess, abs(len(a) - len(b)))
    keep_a, keep_b = (len(a) - from_longer, shorter) if len(a) > len(b) else (shorter, len(b) - from_longer)
    rest = excess - from_longer
    return a[: keep_a - rest // 2], b[: keep_b - (rest + 1) // 2]


def encode_sequence(
    tokenizer: WordPieceTokenizer, a: Sequence[int], b: Sequence[int] | None, max_seq_len: int
) -> EncodedSequence:
    """The ids of one text, or of two, with special tokens: `max_seq_len` tokens at the most, which is 4 or more."""
    if b is None:
        ids = (tokenizer.cls_id, *a[: max_seq_len - 2], tokenizer.sep_id)
        return EncodedSequence(ids, len(ids))
    a, b = truncate_pair(a, b, max_seq_len - 3)
    first = (tokenizer.cls_id, *a, tokenizer.sep_id)
    return EncodedSequence((*first, *b, tokenizer.sep_id), len(first))
