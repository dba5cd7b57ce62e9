"""Examples of one or two texts, and their encoding as token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

from bert_jax.text.sequences import EncodedSequence, encode_sequence
from bert_jax.text.tokenization import WordPieceTokenizer

_BATCH = 4_096  # texts per call of the tokenizer


@dataclass(frozen=True)
class TextExample:
    """An example of one or two texts. `label` is a class index or a score; None if the file has no labels."""

    id: str
    text_a: str
    text_b: str | None
    label: int | float | None


def encode_examples(
    tokenizer: WordPieceTokenizer, examples: Sequence[TextExample], max_seq_len: int
) -> list[EncodedSequence]:
    """Encodes each example as [CLS] A [SEP] or [CLS] A [SEP] B [SEP], truncated to `max_seq_len` tokens (at least 4).

    A literal "[SEP]" in a text is tokenized as ordinary text.
    """
    return encode_pairs(tokenizer, [(example.text_a, example.text_b) for example in examples], max_seq_len)


def encode_pairs(
    tokenizer: WordPieceTokenizer, pairs: Sequence[tuple[str, str | None]], max_seq_len: int
) -> list[EncodedSequence]:
    """Encodes (A, B) texts as `encode_examples` does."""
    encoded = []
    for start in range(0, len(pairs), _BATCH):
        batch = pairs[start : start + _BATCH]
        first = tokenizer.encode_batch([a for a, _ in batch])
        second = iter(tokenizer.encode_batch([b for _, b in batch if b is not None]))
        for ids, (_, b) in zip(first, batch, strict=True):
            encoded.append(encode_sequence(tokenizer, ids, None if b is None else next(second), max_seq_len))
    return encoded
