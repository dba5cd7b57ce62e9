"""The prepared dataset: what is in its folder, how a record is laid out, how batches of records are read.

    dataset.json            what it is: format version, tokenizer, seq_len, seed, options, counts, shards, hash
    vocab.txt               the vocabulary, one piece a line
    token_counts.npy        int64 [V]: how often each token stands in the training documents
    train-00000-of-00012.array_record, ...; eval-00000-of-00001.array_record

A record is one unmasked sentence pair, little-endian: instance id (uint64), tokens in A, tokens in B, flags (uint16
each; bit 0 of the flags: B is random), 2 bytes of zero, then A's and B's token ids (uint16, or uint32 where the
vocabulary has more than 65,536 entries) without special tokens. Within a shard, records are in order of instance id,
which is a hash: reading a shard from the front reads a shuffled one.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from etils import epath

from bert_jax.data.hashing import key_from
from bert_jax.data.tokenization import WordPieceTokenizer
from bert_jax.errors import BertJaxError, InputError

FORMAT_VERSION = 1
INFO_FILE = "dataset.json"
VOCABULARY_FILE = "vocab.txt"
TOKEN_COUNTS_FILE = "token_counts.npy"
RANDOM_NEXT = 1  # flag bit

_HEADER = struct.Struct("<QHHHH")
_HEADER_WORDS = _HEADER.size // 2
HEADER_DTYPE = np.dtype([("id", "<u8"), ("len_a", "<u2"), ("len_b", "<u2"), ("flags", "<u2"), ("zero", "<u2")])


@dataclass(frozen=True)
class Shard:
    """One ArrayRecord file: its name, its size on disk, and a digest of its records."""

    file: str
    instances: int
    bytes: int
    digest: str


@dataclass(frozen=True)
class SplitInfo:
    """Counts of one split. Tokens are unique ones, counted once whatever `dupe_factor` is."""

    documents: int
    sentences: int
    tokens: int
    instances: int
    random_next: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class DatasetInfo:
    """The contents of `dataset.json`."""

    tokenizer: dict[str, Any]  # kind, lowercase, vocab_size, sha256
    seq_len: int
    seed: int
    options: dict[str, Any]
    splits: dict[str, SplitInfo]
    format_version: int = FORMAT_VERSION
    hash: str = field(default="")

    def with_hash(self) -> "DatasetInfo":
        """The same, with `hash` set from everything else: equal hashes are equal datasets."""
        return DatasetInfo(**{**self.__dict__, "hash": _hash(asdict(self))})

    def to_json(self) -> str:
        """The text of `dataset.json`."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def read(cls, folder: epath.Path) -> "DatasetInfo":
        """Reads `dataset.json`; InputError where there is none or another version wrote it."""
        path = folder / INFO_FILE
        if not path.exists():
            raise InputError(f"{folder} is not a prepared dataset (no {INFO_FILE}): make one with `bert-jax prepare`")
        try:
            content = json.loads(path.read_text())
            if content["format_version"] != FORMAT_VERSION:
                raise InputError(
                    f"{path}: format version {content['format_version']}, this version reads {FORMAT_VERSION}: "
                    "prepare the dataset again"
                )
            if content["hash"] != _hash(content):
                raise InputError(f"{path}: damaged (its hash is another); copy or prepare the dataset again")
            content["splits"] = {
                name: SplitInfo(**{**split, "shards": tuple(Shard(**shard) for shard in split["shards"])})
                for name, split in content["splits"].items()
            }
            return cls(**content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: damaged ({error}); prepare the dataset again") from error


def _hash(content: dict[str, Any]) -> str:
    unhashed = {key: value for key, value in content.items() if key != "hash"}
    return f"{key_from(json.dumps(unhashed, sort_keys=True)):016x}"


def token_dtype(vocab_size: int) -> np.dtype:
    """The type token ids are stored in."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class ShardWriter:
    """Writes one shard under a temporary name and gives it its own when it is whole."""

    def __init__(self, path: epath.Path):
        self._path = path
        self._partial = path.parent / (path.name + ".partial")
        # One record a group: random access then decompresses nothing but the record it wants.
        self._writer = ArrayRecordWriter(str(self._partial), "group_size:1")
        self._count = 0
        self._digest = 0

    def write(self, record: bytes) -> None:
        """Appends one record."""
        self._writer.write(record)
        self._count += 1

    def close(self, digest: str) -> Shard:
        """Finishes the file, reads its count back, and renames it. OSError where the disk did not take it all."""
        try:
            self._writer.close()
            reader = ArrayRecordReader(str(self._partial))
            count = reader.num_records()
            reader.close()
        except (RuntimeError, ValueError) as error:
            raise OSError(f"{self._path}: could not be written ({error})") from error
        if count != self._count:
            raise OSError(f"{self._path}: {count} of {self._count} records arrived on disk")
        size = self._partial.stat().length
        self._partial.rename(self._path)
        return Shard(self._path.name, self._count, size, digest)


class PreparedDataset:
    """A prepared dataset, open for reading.

    Raises InputError, before anything is read, where a file is missing, truncated or of another version.
    """

    def __init__(self, path: str):
        self.folder = epath.Path(path)
        self.info = DatasetInfo.read(self.folder)
        self.tokenizer = WordPieceTokenizer.from_file(
            str(self.folder / VOCABULARY_FILE), lowercase=self.info.tokenizer["lowercase"]
        )
        if self.tokenizer.sha256 != self.info.tokenizer["sha256"]:
            raise InputError(
                f"{self.folder / VOCABULARY_FILE} is not the vocabulary that {INFO_FILE} names: restore it"
            )
        self._readers: dict[str, list[ArrayRecordReader]] = {}
        self._starts = {
            name: np.cumsum([0] + [shard.instances for shard in split.shards])
            for name, split in self.info.splits.items()
        }
        for split in self.info.splits.values():
            for shard in split.shards:
                self._check(shard)

    def _check(self, shard: Shard) -> None:
        path = self.folder / shard.file
        if not path.exists():
            raise InputError(f"{path}: the shard is missing; copy the dataset again or prepare it again")
        if path.stat().length != shard.bytes:
            raise InputError(
                f"{path}: {path.stat().length:,} bytes where {INFO_FILE} says {shard.bytes:,}: the shard is truncated "
                "or was changed; copy the dataset again or prepare it again"
            )

    def size(self, split: str) -> int:
        """Instances in a split."""
        return int(self._starts[split][-1]) if split in self._starts else 0

    def token_counts(self) -> np.ndarray:
        """int64 [V]: how often each token stands in the training documents. InputError where the file is damaged."""
        path = self.folder / TOKEN_COUNTS_FILE
        try:
            with path.open("rb") as file:
                return np.load(file)
        except (FileNotFoundError, ValueError, EOFError) as error:
            raise InputError(f"{path}: missing or damaged ({error}); copy or prepare the dataset again") from error

    def read(self, split: str, indices: np.ndarray) -> list[bytes]:
        """The records at `indices` [B] of a split, in that order."""
        if split not in self._readers:
            self._readers[split] = [
                ArrayRecordReader(str(self.folder / shard.file), "readahead_buffer_size:0")
                for shard in self.info.splits[split].shards
            ]
        starts = self._starts[split]
        shard_of = np.searchsorted(starts, indices, side="right") - 1
        order = np.argsort(shard_of, kind="stable")
        records: list[bytes] = [b""] * len(indices)
        for group in np.split(order, np.nonzero(np.diff(shard_of[order]))[0] + 1):
            shard = int(shard_of[group[0]])
            try:
                read = self._readers[split][shard].read((indices[group] - starts[shard]).tolist())
            except (RuntimeError, ValueError, IndexError) as error:
                file = self.folder / self.info.splits[split].shards[shard].file
                raise BertJaxError(f"{file}: cannot be read ({error}); copy or prepare the dataset again") from error
            for position, record in zip(group.tolist(), read, strict=True):
                records[position] = record
        return records

    def instances(self, split: str, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The unmasked instances at `indices` [B], laid out as [CLS] A [SEP] B [SEP] and padding.

        Returns `instance_ids` uint64 [B]; `input_ids`, `token_type_ids`, `positions`, `sequence_ids` int32 [B, L]
        (sequence 0 is padding); `maskable` bool [B, L], the tokens that are not special; `is_random_next` bool [B].
        """
        return decode(self.read(split, indices), self.info.seq_len, self.tokenizer)


def encode_headers(ids: np.ndarray, len_a: np.ndarray, len_b: np.ndarray, is_random_next: np.ndarray) -> np.ndarray:
    """Record headers [B] of `HEADER_DTYPE`; the bytes of each are followed by the tokens of A and B."""
    headers = np.zeros(len(ids), HEADER_DTYPE)
    headers["id"], headers["len_a"], headers["len_b"] = ids, len_a, len_b
    headers["flags"] = np.where(is_random_next, RANDOM_NEXT, 0)
    return headers


def decode(records: Sequence[bytes], seq_len: int, tokenizer: WordPieceTokenizer) -> dict[str, np.ndarray]:
    """Records to arrays, as `PreparedDataset.instances` returns them, with no loop over records."""
    dtype = token_dtype(tokenizer.vocab_size)
    data = b"".join(records)
    words = np.frombuffer(data, "<u2")
    tokens = np.frombuffer(data, dtype)
    sizes = np.fromiter(map(len, records), np.int64, len(records))
    starts = np.cumsum(sizes) - sizes
    headers = words[(starts // 2)[:, None] + np.arange(_HEADER_WORDS)].view(HEADER_DTYPE)[:, 0]

    column = np.arange(seq_len)
    len_a = headers["len_a"].astype(np.int64)[:, None]
    len_b = headers["len_b"].astype(np.int64)[:, None]
    first_sep = len_a + 1
    last_sep = first_sep + len_b + 1
    in_a = (column > 0) & (column < first_sep)
    in_b = (column > first_sep) & (column < last_sep)
    maskable = in_a | in_b
    source = ((starts + _HEADER.size) // dtype.itemsize)[:, None] + column - 1 - (column > first_sep)
    input_ids = np.where(maskable, tokens[np.where(maskable, source, 0)], tokenizer.pad_id).astype(np.int32)
    input_ids[:, 0] = tokenizer.cls_id
    np.copyto(input_ids, np.int32(tokenizer.sep_id), where=(column == first_sep) | (column == last_sep))
    real = column <= last_sep
    return {
        "instance_ids": headers["id"].astype(np.uint64),
        "input_ids": input_ids,
        "token_type_ids": ((column > first_sep) & real).astype(np.int32),
        "positions": np.broadcast_to(column.astype(np.int32), input_ids.shape),
        "sequence_ids": real.astype(np.int32),
        "maskable": maskable,
        "is_random_next": (headers["flags"] & RANDOM_NEXT) > 0,
    }
