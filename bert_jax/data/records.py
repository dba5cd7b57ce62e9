"""Record format: an unmasked instance, and the conversion of many to the rows of a batch.

header   INSTANCE, 16 bytes, little-endian
tokens   A and then B, without special tokens: uint16, or uint32 for a vocabulary of more than 65,536 pieces
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.text.tokenizer import Tokenizer, token_dtype

INSTANCE = np.dtype([("id", "<u8"), ("len_a", "<u2"), ("len_b", "<u2"), ("flags", "<u2"), ("zero", "<u2")])
RANDOM_NEXT = 1  # flag: B is a random continuation
SINGLE = 2  # flag: one segment, without B and its [SEP]


class Instances(NamedTuple):
    """N instances: `headers` [N] of INSTANCE, an array with all `tokens`, and `starts` int64 [N], their offsets in it.

    A start is that of A; B follows it.
    """

    headers: np.ndarray
    tokens: np.ndarray
    starts: np.ndarray


def sequence_lengths(headers: np.ndarray) -> np.ndarray:
    """Returns int64 [N]: tokens in each sequence, special ones included."""
    special = np.where(headers["flags"] & SINGLE, 2, 3)
    return np.asarray(headers["len_a"].astype(np.int64) + headers["len_b"] + special)


def make_headers(ids: np.ndarray, len_a: np.ndarray, len_b: np.ndarray, flags: np.ndarray) -> np.ndarray:
    """Returns an array [N] of INSTANCE."""
    headers = np.zeros(len(ids), INSTANCE)
    headers["id"], headers["len_a"], headers["len_b"], headers["flags"] = ids, len_a, len_b, flags
    return headers


def decode(records: Sequence[bytes], vocab_size: int) -> Instances:
    """Decodes N records, all at once. Raises ValueError for one that is invalid."""
    dtype = token_dtype(vocab_size)
    sizes = np.fromiter(map(len, records), np.int64, len(records))
    starts = np.cumsum(sizes) - sizes
    if (sizes < INSTANCE.itemsize).any():
        raise ValueError(f"invalid record: got {sizes.min()} bytes, expected at least {INSTANCE.itemsize}")
    data = b"".join(records)
    places = starts[:, None] + np.arange(INSTANCE.itemsize)
    headers = np.frombuffer(data, np.uint8)[places].view(INSTANCE)[:, 0]
    tokens = headers["len_a"].astype(np.int64) + headers["len_b"]
    if (wrong := np.flatnonzero(sizes != INSTANCE.itemsize + tokens * dtype.itemsize)).size:
        raise ValueError(f"invalid record: got {sizes[wrong[0]]} bytes for {tokens[wrong[0]]} tokens")
    return Instances(headers, np.frombuffer(data, dtype), (starts + INSTANCE.itemsize) // dtype.itemsize)


def pad_batch(instances: Instances, seq_len: int, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """Lays out B instances as rows of L tokens, [CLS] A [SEP] B [SEP] and padding, vectorized over instances.

    Beside fields of `Batch`, the arrays are `instance_ids` uint64 [B]; `maskable` bool [B, L], the tokens that are not
    special; and bool [B] `is_random_next`, the second segment is random, and `is_single`, there is none.
    """
    headers = instances.headers
    column = np.arange(seq_len, dtype=np.int32)
    len_a = headers["len_a"].astype(np.int32)[:, None]
    len_b = headers["len_b"].astype(np.int32)[:, None]
    is_single = (headers["flags"] & SINGLE) > 0
    first_sep = len_a + 1
    last_sep = np.where(is_single[:, None], first_sep, first_sep + len_b + 1)
    real = column <= last_sep
    after_a = column > first_sep
    is_sep = (column == first_sep) | (column == last_sep)
    maskable = real & ~is_sep
    maskable[:, 0] = False
    # Sources of special tokens and padding are clipped to be in bounds; their values are overwritten below.
    source = instances.starts[:, None] + (column - 1 - after_a)
    input_ids = instances.tokens.take(source, mode="clip").astype(np.int32)
    np.copyto(input_ids, np.int32(tokenizer.sep_id), where=is_sep)
    np.copyto(input_ids, np.int32(tokenizer.pad_id), where=~real)
    input_ids[:, 0] = tokenizer.cls_id
    return {
        "instance_ids": headers["id"].astype(np.uint64),
        "input_ids": input_ids,
        "token_type_ids": (after_a & real).astype(np.int32),
        "positions": np.broadcast_to(column, input_ids.shape),
        "sequence_ids": real.astype(np.int32),
        "maskable": maskable,
        "is_random_next": (headers["flags"] & RANDOM_NEXT) > 0,
        "is_single": is_single,
    }
