"""Examples of one text or two, and what the encoder reads of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from bert_jax.text.sequences import EncodedSequence, encode_sequence
from bert_jax.text.tokenization import WordPieceTokenizer

_BATCH = 4_096  # texts tokenized at once


@dataclass(frozen=True)
class TextExample:
    """One text or two. `label` is the number of a class, or a score; None where the file has none."""

    id: str
    text_a: str
    text_b: str | None
    label: int | float | None


def encode_examples(
    tokenizer: WordPieceTokenizer, examples: Sequence[TextExample], max_seq_len: int
) -> list[EncodedSequence]:
    """[CLS] A [SEP], or [CLS] A [SEP] B [SEP], of each example: at most `max_seq_len` tokens, which is 4 or more.

    A "[SEP]" that is written in a text is text like any other.
    """
    return encode_pairs(tokenizer, [(example.text_a, example.text_b) for example in examples], max_seq_len)


def encode_pairs(
    tokenizer: WordPieceTokenizer, pairs: Sequence[tuple[str, str | None]], max_seq_len: int
) -> list[EncodedSequence]:
    """As `encode_examples`, of bare texts."""
    encoded = []
    for start in range(0, len(pairs), _BATCH):
        batch = pairs[start : start + _BATCH]
        first = tokenizer.encode_batch([a for a, _ in batch])
        second = iter(tokenizer.encode_batch([b for _, b in batch if b is not None]))
        for ids, (_, b) in zip(first, batch, strict=True):
            encoded.append(encode_sequence(tokenizer, ids, None if b is None else next(second), max_seq_len))
    return encoded
