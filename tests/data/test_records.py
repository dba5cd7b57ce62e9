"""Records of instances: binary format and layout of rows."""

import numpy as np
import pytest

from bert_jax.data.records import (
    RANDOM_NEXT,
    SINGLE,
    decode,
    make_headers,
    pad_batch,
)
from bert_jax.text.tokenizer import SPECIAL_TOKENS, token_dtype
from bert_jax.text.wordpiece import wordpiece_tokenizer


def make_tokenizer(pieces):
    # The special tokens last and out of order: nothing may rest on their usual ids.
    words = [f"w{i}" for i in range(pieces - len(SPECIAL_TOKENS))]
    return wordpiece_tokenizer([*words, *reversed(SPECIAL_TOKENS)], lowercase=True)


def encode(pairs, ids, dtype):
    """Encodes (A, B, label) triples as records; B is None for a single segment."""
    headers = make_headers(
        np.array(ids, np.uint64),
        np.array([len(a) for a, _, _ in pairs]),
        np.array([len(b or []) for _, b, _ in pairs]),
        np.array([SINGLE if b is None else label * RANDOM_NEXT for _, b, label in pairs]),
    )
    tokens = [np.array([*a, *(b or [])], dtype).tobytes() for a, b, _ in pairs]
    return [header.tobytes() + content for header, content in zip(headers, tokens, strict=True)]


def laid_out(records, seq_len, tokenizer):
    return pad_batch(decode(records, tokenizer.vocab_size), seq_len, tokenizer)


@pytest.mark.parametrize("vocab_size", [300, 1 << 16, (1 << 16) + 1, 70_000])
def test_layout_row_by_row(vocab_size):
    tokenizer = make_tokenizer(vocab_size)
    dtype = token_dtype(vocab_size)
    assert dtype.itemsize == (2 if vocab_size <= 65536 else 4)
    seq_len = 24
    rng = np.random.default_rng(0)
    sizes = [(1, 1), (20, 1), (1, 20), (10, 11), (2, 3), *rng.integers(1, 10, (40, 2)).tolist()]
    pairs = [
        (rng.integers(0, vocab_size, a).tolist(), rng.integers(0, vocab_size, b).tolist(), bool(rng.integers(2)))
        for a, b in sizes
    ]
    ids = rng.integers(0, 2**64, len(pairs), dtype=np.uint64)
    ids[0] = 2**64 - 1
    found = laid_out(encode(pairs, ids, dtype), seq_len, tokenizer)

    for row, (a, b, label) in enumerate(pairs):
        tokens = [tokenizer.cls_id, *a, tokenizer.sep_id, *b, tokenizer.sep_id]
        padding = seq_len - len(tokens)
        assert found["input_ids"][row].tolist() == tokens + [tokenizer.pad_id] * padding
        assert found["token_type_ids"][row].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * padding
        assert found["sequence_ids"][row].tolist() == [1] * len(tokens) + [0] * padding
        assert found["positions"][row].tolist() == list(range(seq_len))
        maskable = [False] + [True] * len(a) + [False] + [True] * len(b) + [False] * (padding + 1)
        assert found["maskable"][row].tolist() == maskable
        assert bool(found["is_random_next"][row]) == label
        assert found["instance_ids"][row] == ids[row]
    for name in ("input_ids", "token_type_ids", "positions", "sequence_ids"):
        assert found[name].dtype == np.int32
    assert found["instance_ids"].dtype == np.uint64


def test_one_segment():
    tokenizer = make_tokenizer(300)
    found = laid_out(encode([([1, 2], None, False), ([3], [4], False)], [1, 2], token_dtype(300)), 6, tokenizer)
    cls, sep, pad = tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id
    assert found["input_ids"].tolist() == [[cls, 1, 2, sep, pad, pad], [cls, 3, sep, 4, sep, pad]]
    assert found["token_type_ids"].tolist() == [[0] * 6, [0, 0, 0, 1, 1, 0]]
    assert found["sequence_ids"].tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]
    assert found["maskable"][0].tolist() == [False, True, True, False, False, False]
    assert found["is_single"].tolist() == [True, False]


@pytest.mark.parametrize(
    "spoil", [lambda r: r[:5], lambda r: r[:-2], lambda r: r + b"xx", lambda r: r[:-1], lambda r: b"\xff" * 40]
)
def test_invalid_records_are_refused(spoil):
    good, bad = encode([([1, 2], [3], False)] * 2, [1, 2], token_dtype(300))
    with pytest.raises(ValueError, match=r"record.*\d"):
        decode([good, spoil(bad)], 300)
