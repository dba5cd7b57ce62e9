"""What a record holds: a block of unmasked instances, and how rows of a batch are made of them.

Little-endian, one after the other:

    count      uint32, then 4 bytes of zero
    headers    `count` times INSTANCE, 16 bytes each
    tokens     A and then B of each instance, without special tokens: uint16, or uint32 where the vocabulary has more
               than 65,536 pieces

A block, not an instance, is what is read at a time: a record costs some 10 microseconds however small it is.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bert_jax.text.tokenization import WordPieceTokenizer, token_dtype

BLOCK = 512
"""Instances in a block; the last of a shard may have fewer."""

INSTANCE = np.dtype([("id", "<u8"), ("len_a", "<u2"), ("len_b", "<u2"), ("flags", "<u2"), ("zero", "<u2")])
RANDOM_NEXT = 1  # flag: B is a random continuation
SINGLE = 2  # flag: there is no B, and no [SEP] after it

_COUNT = struct.Struct("<II")


@dataclass(frozen=True)
class Instances:
    """Instances side by side: `headers` [N] of INSTANCE, `tokens` of all, and `starts` int64 [N], where each begins."""

    headers: np.ndarray
    tokens: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.headers)


def sequence_lengths(headers: np.ndarray) -> np.ndarray:
    """int64 [N]: tokens in each sequence, special ones counted."""
    special = np.where(headers["flags"] & SINGLE, 2, 3)
    return headers["len_a"].astype(np.int64) + headers["len_b"] + special


def make_headers(ids: np.ndarray, len_a: np.ndarray, len_b: np.ndarray, flags: np.ndarray) -> np.ndarray:
    """[N] of INSTANCE."""
    headers = np.zeros(len(ids), INSTANCE)
    headers["id"], headers["len_a"], headers["len_b"], headers["flags"] = ids, len_a, len_b, flags
    return headers


def encode_block(headers: np.ndarray, segments: Sequence[bytes | memoryview]) -> bytes:
    """A record of at most BLOCK instances; `segments` are the tokens of A and B, instance after instance."""
    return b"".join((_COUNT.pack(len(headers), 0), headers.tobytes(), *segments))


def decode_block(record: bytes, vocab_size: int) -> Instances:
    """The instances of a record, as views of it. ValueError where it is not a block."""
    dtype = token_dtype(vocab_size)
    if len(record) < _COUNT.size:
        raise ValueError("a record that is no block of instances")
    count, zero = _COUNT.unpack_from(record)
    begin = _COUNT.size + count * INSTANCE.itemsize
    if zero or len(record) < begin or (len(record) - begin) % dtype.itemsize:
        raise ValueError("a record that is no block of instances")
    headers = np.frombuffer(record, INSTANCE, count, _COUNT.size)
    instances = join([Instances(headers, np.frombuffer(record, dtype, offset=begin), np.zeros(0, np.int64))])
    if len(instances.tokens) != headers["len_a"].sum(dtype=np.int64) + headers["len_b"].sum(dtype=np.int64):
        raise ValueError("a block with more or fewer tokens than its instances have")
    return instances


def join(parts: Sequence[Instances]) -> Instances:
    """All instances of one part or more, in order."""
    headers, tokens = parts[0].headers, parts[0].tokens
    if len(parts) > 1:
        headers = np.concatenate([part.headers for part in parts])
        tokens = np.concatenate([part.tokens for part in parts])
    sizes = headers["len_a"].astype(np.int64) + headers["len_b"]
    return Instances(headers, tokens, np.cumsum(sizes) - sizes)


def lay_out(
    instances: Instances, which: np.ndarray, seq_len: int, tokenizer: WordPieceTokenizer
) -> dict[str, np.ndarray]:
    """The instances `which` [B] as [CLS] A [SEP] B [SEP] and padding, with no loop over them.

    Returns:
      `instance_ids` uint64 [B]; `input_ids`, `token_type_ids`, `positions`, `sequence_ids` int32 [B, L] (sequence 0 is
      padding); `maskable` bool [B, L], the tokens that are not special; `is_random_next` and `is_single` bool [B].
    """
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
    # Of what is not maskable the source may be anything in bounds: it is written over.
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
