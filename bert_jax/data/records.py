"""Record format: a block of unmasked instances, and its conversion to the rows of a batch.

Little-endian fields in this order:

    count      uint32, then 4 bytes of zero
    headers    `count` times INSTANCE, 16 bytes each
    tokens     A and then B of each instance, without special tokens: uint16, or uint32 for a vocabulary of more than
               65,536 pieces

A record is a block of instances, not one instance, because each read costs some 10 microseconds regardless of size.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from bert_jax.text.tokenizer import Tokenizer, token_dtype

BLOCK = 512
"""Instances in a block; the last block of a shard may have fewer."""

INSTANCE = np.dtype([("id", "<u8"), ("len_a", "<u2"), ("len_b", "<u2"), ("flags", "<u2"), ("zero", "<u2")])
RANDOM_NEXT = 1  # flag: B is a random continuation
SINGLE = 2  # flag: one segment, without B and its [SEP]

_COUNT = struct.Struct("<II")


@dataclass(frozen=True)
class Instances:
    """N instances: `headers` [N] of INSTANCE, the concatenated `tokens`, and `starts` int64 [N], their offsets."""

    headers: np.ndarray
    tokens: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.headers)


def sequence_lengths(headers: np.ndarray) -> np.ndarray:
    """Returns int64 [N]: tokens in each sequence, special ones included."""
    special = np.where(headers["flags"] & SINGLE, 2, 3)
    result: np.ndarray = headers["len_a"].astype(np.int64) + headers["len_b"] + special
    return result


def make_headers(ids: np.ndarray, len_a: np.ndarray, len_b: np.ndarray, flags: np.ndarray) -> np.ndarray:
    """Returns an array [N] of INSTANCE."""
    headers = np.zeros(len(ids), INSTANCE)
    headers["id"], headers["len_a"], headers["len_b"], headers["flags"] = ids, len_a, len_b, flags
    return headers


def encode_block(headers: np.ndarray, segments: Sequence[bytes | memoryview]) -> bytes:
    """Encodes a record of at most BLOCK instances; `segments` are the tokens of A and B of each instance in order."""
    return b"".join((_COUNT.pack(len(headers), 0), headers.tobytes(), *segments))


def decode_block(record: bytes, vocab_size: int) -> Instances:
    """Decodes a record to instances, as views of it. Raises ValueError for an invalid block."""
    dtype = token_dtype(vocab_size)
    if len(record) < _COUNT.size:
        raise ValueError(f"invalid block: got {len(record)} bytes, expected at least {_COUNT.size}")
    count, zero = _COUNT.unpack_from(record)
    begin = _COUNT.size + count * INSTANCE.itemsize
    if zero or len(record) < begin or (len(record) - begin) % dtype.itemsize:
        raise ValueError(f"invalid block: got {len(record)} bytes for {count} instances, reserved field {zero}")
    headers = np.frombuffer(record, INSTANCE, count, _COUNT.size)
    instances = join([Instances(headers, np.frombuffer(record, dtype, offset=begin), np.zeros(0, np.int64))])
    if len(instances.tokens) != headers["len_a"].sum(dtype=np.int64) + headers["len_b"].sum(dtype=np.int64):
        raise ValueError(
            f"invalid block: got {len(instances.tokens)} tokens, expected the sum of its instances' lengths"
        )
    return instances


def join(parts: Sequence[Instances]) -> Instances:
    """Concatenates the instances of one or more parts."""
    headers, tokens = parts[0].headers, parts[0].tokens
    if len(parts) > 1:
        headers = np.concatenate([part.headers for part in parts])
        tokens = np.concatenate([part.tokens for part in parts])
    sizes = headers["len_a"].astype(np.int64) + headers["len_b"]
    return Instances(headers, tokens, np.cumsum(sizes) - sizes)


class Unmasked(TypedDict):
    """B instances as rows of L tokens: [CLS] A [SEP] B [SEP] and padding. For the first fields see `Batch`."""

    input_ids: np.ndarray
    token_type_ids: np.ndarray
    positions: np.ndarray
    sequence_ids: np.ndarray
    instance_ids: np.ndarray
    """uint64 [B]."""
    maskable: np.ndarray
    """bool [B, L]: the tokens that are not special."""
    is_random_next: np.ndarray
    """bool [B]: the second segment is random."""
    is_single: np.ndarray
    """bool [B]: there is no second segment."""


def pad_batch(instances: Instances, which: np.ndarray, seq_len: int, tokenizer: Tokenizer) -> Unmasked:
    """Lays out the instances `which` [B], vectorized over instances."""
    headers = instances.headers[which]
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
    source = instances.starts[which, None] + (column - 1 - after_a)
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
