"""Prepared datasets: format of their folder, metadata, and random access to instances.

    dataset.json            metadata: format version, tokenizer, seq_len, seed, options, counts, shards, hash, digests
    vocab.txt               the vocabulary, one piece a line; sentencepiece.model of a SentencePiece vocabulary
    token_counts.npy        int64 [V]: number of occurrences of each token in the training documents
    train-lengths.npy       uint16 [N]: tokens in each sequence, special ones included, in order of shards; also eval-
    train-00000-of-00012.array_record, ...; eval-00000-of-00001.array_record
    provenance.json         the run that prepared it; neither hashed nor verified

A record is a block of instances, see `records.py`. The instances of a shard are sorted by instance id, which is a hash:
reading a shard sequentially yields shuffled instances.

Each file is verified against its digest in dataset.json when it is first opened, see `file_digests.py`. Datasets of
format version 2 have digests of the shards' records only; of their other files, sizes and sums are verified.
"""

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from etils import epath

from bert_jax.data.dataset_cache import LocalFiles
from bert_jax.data.dataset_fields import check_fields
from bert_jax.data.file_digests import Expected, new_digest, records_digest
from bert_jax.data.hashing import key_from
from bert_jax.data.records import BLOCK, Instances, Unmasked, decode_block, join, pad_batch, sequence_lengths
from bert_jax.data.shard_readers import READERS
from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import atomic, remote
from bert_jax.files.remote import cache_folder
from bert_jax.text.tokenizer_files import open_described, tokenizer_class

log = logging.getLogger(__name__)

FORMAT_VERSION = 3
_READABLE = (2, FORMAT_VERSION)
_IDENTITY_VERSION = 2  # hashed for every version: equal instances keep their hash, and so their order and masks
_UNHASHED = ("hash", "files", "checksum")
_FETCHES = 8  # shards that are downloaded or verified concurrently
_LONG_SECONDS = 2.0  # of verification, beyond which it is logged
INFO_FILE = "dataset.json"
TOKEN_COUNTS_FILE = "token_counts.npy"


def lengths_file(split: str) -> str:
    """Returns the name of the file with the sequence lengths of a split."""
    return f"{split}-lengths.npy"


@dataclass(frozen=True)
class Shard:
    """Metadata of an ArrayRecord file: name, number of instances, bytes on disk, and digest of its records."""

    file: str
    instances: int
    bytes: int
    digest: str


@dataclass(frozen=True)
class SplitInfo:
    """Counts of a split. Documents, sentences and tokens are counted once for any `dupe_factor`."""

    documents: int
    sentences: int
    tokens: int
    instances: int
    random_next: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class DatasetInfo:
    """Contents of `dataset.json`.

    `hash` covers everything that determines the instances: datasets with equal hashes are equal. `files` holds the
    digest of each shard and .npy file, and `checksum` covers all other fields; version 2 has neither.
    """

    tokenizer: dict[str, Any]  # kind, lowercase, vocab_size, sha256, and rules that are not the default
    seq_len: int
    seed: int
    options: dict[str, Any]
    splits: dict[str, SplitInfo]
    dropped: dict[str, int]  # counts of filtered documents and lines, by rule of `filters.py`
    files: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    hash: str = ""
    checksum: str = ""

    def with_hash(self) -> "DatasetInfo":
        """Returns a copy with `hash` and `checksum` computed from the other fields."""
        hashed = replace(self, hash=_hash(asdict(self)))
        return replace(hashed, checksum=_checksum(asdict(hashed)))

    def to_json(self) -> str:
        """Returns the text of `dataset.json`."""
        content = asdict(self)
        if self.format_version < 3:
            del content["files"], content["checksum"]
        return json.dumps(content, indent=2) + "\n"

    @classmethod
    def read(cls, folder: epath.Path) -> "DatasetInfo":
        """Reads `dataset.json`. Raises InputError if it is missing, damaged or of an unsupported format version."""
        path = folder / INFO_FILE
        if not remote.exists(path):
            raise InputError(f"{folder}: {INFO_FILE} not found; expected a dataset of `bert-jax prepare`")
        text = atomic.read_whole(path)
        try:
            content = json.loads(text)
            version = content["format_version"]
            if version not in _READABLE:
                raise InputError(
                    f"{path}: format_version={version!r:.40}: expected 2 or {FORMAT_VERSION}; prepare the dataset "
                    "again, or install the version of bert_jax that wrote it"
                )
            if content["hash"] != _hash(content):
                raise InputError(f"{path}: damaged (hash mismatch); copy or prepare the dataset again")
            if version > 2 and content["checksum"] != _checksum(content):
                raise InputError(f"{path}: damaged (checksum mismatch); copy or prepare the dataset again")
            if version == 2 and (later := {"files", "checksum"} & set(content)):
                raise ValueError(f"format_version=2: unknown fields {', '.join(sorted(later))}")
            check_fields(content)
            content["splits"] = {
                name: SplitInfo(**{**split, "shards": tuple(Shard(**shard) for shard in split["shards"])})
                for name, split in content["splits"].items()
            }
            info = cls(**content)
            if version > 2:
                info._check_digests()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path}: damaged ({_message(error)}); prepare the dataset again") from error
        return info

    def _check_digests(self) -> None:
        """Raises ValueError if `files` lacks a digest, without which a file would not be verified."""
        shards = [shard.file for split in self.splits.values() for shard in split.shards]
        for name in (TOKEN_COUNTS_FILE, *map(lengths_file, self.splits), *shards):
            if name not in self.files:
                raise ValueError(f"files: missing digest of {name}")

    def expected(self, name: str, shard: Shard | None = None) -> Expected | None:
        """Returns the expected digest of a file; None for a .npy file of format version 2."""
        if name in self.files:
            return Expected(self.files[name])
        return Expected(shard.digest, records_digest) if shard else None


def _message(error: Exception) -> str:
    return f"missing field {error}" if isinstance(error, KeyError) else f"{error!s:.200}"


def _hash(content: dict[str, Any]) -> str:
    hashed = {key: value for key, value in content.items() if key not in _UNHASHED}
    return f"{key_from(json.dumps({**hashed, 'format_version': _IDENTITY_VERSION}, sort_keys=True)):016x}"


def _checksum(content: dict[str, Any]) -> str:
    summed = {key: value for key, value in content.items() if key != "checksum"}
    return f"{key_from(json.dumps(summed, sort_keys=True)):016x}"


class ShardWriter:
    """Writes one shard under a temporary name and renames it when it is complete."""

    def __init__(self, path: epath.Path):
        self._path = path
        self._partial = path.parent / (path.name + ".partial")
        # One record a group, so that random access decompresses only the requested record.
        self._writer = ArrayRecordWriter(str(self._partial), "group_size:1")
        self._count = 0
        self._digest = new_digest()

    def write(self, record: bytes) -> None:
        """Appends one record."""
        self._writer.write(record)
        self._digest.update(record)
        self._count += 1

    def close(self, instances: int) -> Shard:
        """Finishes the file, verifies its number of records and renames it. Raises OSError for an incomplete write."""
        try:
            self._writer.close()
            reader = ArrayRecordReader(str(self._partial))
            count = reader.num_records()
            reader.close()
        except (RuntimeError, ValueError) as error:
            raise OSError(f"{self._path}: could not be written ({error})") from error
        if count != self._count:
            raise OSError(f"{self._path}: got {count} records on disk, expected {self._count}")
        size = self._partial.stat().length
        self._partial.replace(self._path)
        return Shard(self._path.name, instances, size, self._digest.hexdigest())


class PreparedDataset:
    """A prepared dataset, open for reading.

    The constructor raises InputError for a missing or truncated file or another format version.
    """

    def __init__(self, path: str):
        self.folder = remote.parse_path(path)
        self.info = DatasetInfo.read(self.folder)
        self._files = LocalFiles(self.folder, self.info.hash)
        vocabulary = tokenizer_class(self.info.tokenizer["kind"]).vocabulary_file
        self.tokenizer = open_described(str(self._files.open_path(vocabulary)), self.info.tokenizer)
        if self.tokenizer.sha256 != self.info.tokenizer["sha256"]:
            raise InputError(f"{self.folder / vocabulary}: sha256 is not that of {INFO_FILE}; restore the vocabulary")
        if self.tokenizer.vocab_size != self.info.tokenizer["vocab_size"]:
            raise InputError(
                f"{self.folder / INFO_FILE}: damaged (tokenizer.vocab_size: got {self.info.tokenizer['vocab_size']}, "
                f"expected {self.tokenizer.vocab_size}); prepare the dataset again"
            )
        for split in self.info.splits.values():
            for shard in split.shards:
                self._check(shard)
        self._token = object()  # key of this dataset's readers
        self._paths: dict[str, Path] = {}  # local paths of shards already downloaded and verified
        self._blocks = {name: _block_sizes(split.shards) for name, split in self.info.splits.items()}
        self._first_blocks = {
            name: np.cumsum([0] + [-(-shard.instances // BLOCK) for shard in split.shards])
            for name, split in self.info.splits.items()
        }

    def _check(self, shard: Shard) -> None:
        path, size = self.folder / shard.file, self._files.size(shard.file)
        if size is None:
            raise InputError(f"{path}: not found; copy or prepare the dataset again")
        if size != shard.bytes:
            raise InputError(
                f"{path}: truncated or changed: got {size:,} bytes, {INFO_FILE} has {shard.bytes:,}; copy or "
                "prepare the dataset again"
            )

    def size(self, split: str) -> int:
        """Returns the number of instances in a split."""
        return int(self.block_sizes(split).sum())

    @property
    def separators_per_sequence(self) -> int:
        """Number of [SEP] tokens in a sequence: 1 without pairs, else 2."""
        return 1 if self.info.options.get("pairs") == "none" else 2

    def block_sizes(self, split: str) -> np.ndarray:
        """Returns int64 [blocks]: instances in each block of a split; empty for a missing split."""
        return self._blocks.get(split, np.zeros(0, np.int64))

    def token_counts(self) -> np.ndarray:
        """Returns int64 [V]: token counts of the training documents. Raises InputError for a damaged file."""
        counts = self._array(TOKEN_COUNTS_FILE, np.dtype(np.int64), self.tokenizer.vocab_size)
        total, expected = int(counts.sum()), self.info.splits["train"].tokens
        if total != expected or counts.min() < 0:
            raise self._damaged(TOKEN_COUNTS_FILE, f"got {total} tokens, expected {expected}")
        return counts

    def lengths(self, split: str) -> np.ndarray:
        """Returns uint16 [N]: tokens in each sequence of a split, with special ones. InputError for a damaged file."""
        name = lengths_file(split)
        lengths = self._array(name, np.dtype(np.uint16), self.size(split))
        if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= self.info.seq_len:
            raise self._damaged(
                name, f"got lengths of {lengths.min()} to {lengths.max()} tokens, expected 1 to {self.info.seq_len}"
            )
        return lengths

    def _array(self, name: str, dtype: np.dtype, size: int) -> np.ndarray:
        """Reads and validates the array [size] of a .npy file."""
        path = self._files.open_path(name, self.info.expected(name))
        try:
            array = np.load(path, mmap_mode="r" if size else None)  # allocates no more than the file holds
        except Exception as error:  # a damaged header raises any class, such as tokenize.TokenError
            raise self._damaged(name, f"missing or damaged ({error!s:.200})") from error
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != (size,):
            got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else "several arrays"
            raise self._damaged(name, f"got {got}, expected {dtype} ({size},)")
        return np.array(array)

    def _damaged(self, name: str, problem: str) -> InputError:
        return InputError(f"{self.folder / name}: damaged ({problem}); copy or prepare the dataset again")

    def read_blocks(self, split: str, blocks: np.ndarray) -> Instances:
        """Reads the instances of `blocks` [n] of a split (n at least 1), concatenated in that order."""
        firsts, shards = self._first_blocks[split], self.info.splits[split].shards
        shard_of = np.searchsorted(firsts, blocks, side="right") - 1
        numbers = np.unique(shard_of).tolist()
        self._fetch([shards[number] for number in numbers])
        read: dict[int, Instances] = {}
        for shard in numbers:
            in_shard = np.unique(blocks[shard_of == shard])
            try:
                reader = self._open(shards[shard])
                if (count := reader.num_records()) != firsts[shard + 1] - firsts[shard]:
                    raise ValueError(f"got {count} blocks, expected {firsts[shard + 1] - firsts[shard]}")
                records = reader.read((in_shard - firsts[shard]).tolist())
                for block, record in zip(in_shard.tolist(), records, strict=True):
                    read[block] = decode_block(record, self.tokenizer.vocab_size)
                    self._check_range(shards[shard], block, read[block])
                    if len(read[block]) != self._blocks[split][block]:
                        raise ValueError(
                            f"block {block}: got {len(read[block])} instances, expected {self._blocks[split][block]}"
                        )
            except (RuntimeError, ValueError, IndexError) as error:
                file = self.folder / shards[shard].file
                if os.strerror(errno.EMFILE) in str(error):
                    raise BertJaxError(
                        f"{file}: cannot be opened ({error}); raise the limit of open files: ulimit -n 4096"
                    ) from error
                raise BertJaxError(f"{file}: cannot be read ({error}); copy or prepare the dataset again") from error
        return join([read[block] for block in blocks.tolist()])

    def _check_range(self, shard: Shard, block: int, instances: Instances) -> None:
        """Raises InputError for a token id or a length out of range: devices clamp indices without an error."""
        top, longest = int(instances.tokens.max(initial=0)), int(sequence_lengths(instances.headers).max(initial=0))
        for name, got, limit in (
            ("a token id", top, self.tokenizer.vocab_size - 1),
            ("a sequence of", longest, self.info.seq_len),
        ):
            if got > limit:
                raise InputError(
                    f"{self.folder / shard.file}: block {block}: got {name} {got}, expected at most {limit}; prepare "
                    "the dataset again"
                )

    @property
    def is_remote(self) -> bool:
        """True if shards are downloaded before they are read."""
        return remote.is_remote(self.folder)

    def fetch_blocks(self, split: str, blocks: np.ndarray) -> None:
        """Downloads the shards of `blocks` [n] of a split, unless they are cached. Raises as `read_blocks` does."""
        numbers = np.unique(np.searchsorted(self._first_blocks[split], blocks, side="right") - 1).tolist()
        for first in range(0, len(numbers), _FETCHES):
            if threading.main_thread().is_alive():  # else the program waits for this thread to end
                self._fetch([self.info.splits[split].shards[number] for number in numbers[first : first + _FETCHES]])

    def _open(self, shard: Shard) -> ArrayRecordReader:
        key, expected = (self._token, shard.file), self.info.expected(shard.file, shard)
        reader = READERS.find(key)
        if reader is None:
            with self._files.held(shard.file, expected) as path:
                return READERS.open(key, path)
        self._files.mark_used(shard.file, expected)
        return reader

    def _is_here(self, shard: Shard) -> bool:
        """Returns whether a shard was verified; a remote one may have been deleted from the cache since."""
        if shard.file not in self._paths:
            return False
        return not self.is_remote or self._paths[shard.file].exists()

    def _fetch(self, shards: Sequence[Shard]) -> None:
        """Downloads and verifies shards before their first use, several concurrently: a window needs many."""
        new = [shard for shard in shards if not self._is_here(shard)]
        if not new:
            return
        began = time.monotonic()
        with ThreadPoolExecutor(_FETCHES) as pool:
            paths = list(
                pool.map(
                    lambda shard: self._files.open_path(shard.file, self.info.expected(shard.file, shard)),
                    new,
                )
            )
        if (seconds := time.monotonic() - began) > _LONG_SECONDS:
            log.info(
                "Opened and verified %d shards (%.2f GB) of %s in %.1f s; results are cached in %s",
                len(new), sum(shard.bytes for shard in new) / 1e9, self.folder, seconds, cache_folder(),
            )  # fmt: skip
        self._paths.update(zip((shard.file for shard in new), paths, strict=True))

    def instances(self, split: str, indices: np.ndarray) -> Unmasked:
        """Returns the unmasked instances at `indices` [B] of a split."""
        sizes = self.block_sizes(split)
        starts = np.cumsum(sizes) - sizes
        block_of = np.searchsorted(starts, indices, side="right") - 1
        blocks, which = np.unique(block_of, return_inverse=True)
        read = np.cumsum(sizes[blocks]) - sizes[blocks]
        return pad_batch(
            self.read_blocks(split, blocks),
            read[which] + indices - starts[block_of],
            self.info.seq_len,
            self.tokenizer,
        )


def _block_sizes(shards: tuple[Shard, ...]) -> np.ndarray:
    """Returns int64 [blocks]: instances in each block, in order of shards."""
    sizes = [np.zeros(0, np.int64)]
    for shard in shards:
        full, rest = divmod(shard.instances, BLOCK)
        sizes.append(np.array([BLOCK] * full + [rest] * (rest > 0), np.int64))
    return np.concatenate(sizes)
