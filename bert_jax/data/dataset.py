"""The prepared dataset: what is in its folder, and how batches of instances are read.

    dataset.json            what it is: format version, tokenizer, seq_len, seed, options, counts, shards, hash, digests
    vocab.txt               the vocabulary, one piece a line
    token_counts.npy        int64 [V]: how often each token stands in the training documents
    train-lengths.npy       uint16 [N]: tokens in each sequence, special ones counted, shard after shard; also eval-
    train-00000-of-00012.array_record, ...; eval-00000-of-00001.array_record

A record is a block of instances, see `records.py`. Within a shard, instances are in order of instance id, which is a
hash: reading a shard from the front reads a shuffled one.

Each file is verified, by its digest in dataset.json, when it is first opened; see `digests.py`. Datasets of format
version 2 have digests of their shards' records alone: of their other files, sizes and sums are verified.
"""

import errno
import json
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from etils import epath

from bert_jax.data.dataset_cache import LocalFiles, cache_folder
from bert_jax.data.dataset_fields import check_fields
from bert_jax.data.file_digests import Expected, new_digest, records_digest
from bert_jax.data.hashing import key_from
from bert_jax.data.records import BLOCK, Instances, decode_block, join, lay_out
from bert_jax.data.shard_readers import READERS
from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import atomic, remote
from bert_jax.text.tokenization import TokenizerRules, WordPieceTokenizer

log = logging.getLogger(__name__)

FORMAT_VERSION = 3
_READABLE = (2, FORMAT_VERSION)
_IDENTITY_VERSION = 2  # in the hash of every version: the same instances keep their hash, and so their order and masks
_UNHASHED = ("hash", "files", "checksum")
_FETCHES = 8  # shards that are fetched from a store, or verified, at the same time
_LONG_SECONDS = 2.0  # of verifying, to be logged
INFO_FILE = "dataset.json"
VOCABULARY_FILE = "vocab.txt"
TOKEN_COUNTS_FILE = "token_counts.npy"


def lengths_file(split: str) -> str:
    """The file with the lengths of a split's sequences."""
    return f"{split}-lengths.npy"


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
    """The contents of `dataset.json`.

    `hash` is of all that decides the instances: equal hashes are equal datasets. `files` has the digest of each shard
    and .npy file, and `checksum` is of everything else; version 2 has neither.
    """

    tokenizer: dict[str, Any]  # kind, lowercase, vocab_size, sha256, and rules that are not the default
    seq_len: int
    seed: int
    options: dict[str, Any]
    splits: dict[str, SplitInfo]
    dropped: dict[str, int]  # what `hygiene` left out, by rule
    files: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    hash: str = ""
    checksum: str = ""

    def with_hash(self) -> "DatasetInfo":
        """Returns the same with `hash` and `checksum` set from everything else."""
        hashed = replace(self, hash=_hash(asdict(self)))
        return replace(hashed, checksum=_checksum(asdict(hashed)))

    def to_json(self) -> str:
        """The text of `dataset.json`."""
        content = asdict(self)
        if self.format_version < 3:
            del content["files"], content["checksum"]
        return json.dumps(content, indent=2) + "\n"

    @classmethod
    def read(cls, folder: epath.Path) -> "DatasetInfo":
        """Reads `dataset.json`; InputError where there is none or another version wrote it."""
        path = folder / INFO_FILE
        if not remote.exists(path):
            raise InputError(f"{folder} is not a prepared dataset (no {INFO_FILE}): make one with `bert-jax prepare`")
        text = atomic.read_whole(path)
        try:
            content = json.loads(text)
            version = content["format_version"]
            if version not in _READABLE:
                raise InputError(
                    f"{path}: got format version {version!r:.40}, expected 2 or {FORMAT_VERSION}: prepare the dataset "
                    "again, or install the version of bert_jax that wrote it"
                )
            if content["hash"] != _hash(content):
                raise InputError(f"{path}: damaged (its hash is another); copy or prepare the dataset again")
            if version > 2 and content["checksum"] != _checksum(content):
                raise InputError(f"{path}: damaged (its checksum is another); copy or prepare the dataset again")
            if version == 2 and (later := {"files", "checksum"} & set(content)):
                raise ValueError(f"format version 2 has no {' and no '.join(sorted(later))}")
            check_fields(content)
            content["splits"] = {
                name: SplitInfo(**{**split, "shards": tuple(Shard(**shard) for shard in split["shards"])})
                for name, split in content["splits"].items()
            }
            info = cls(**content)
            if version > 2:
                info._check_all_named()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path}: damaged ({_said(error)}); prepare the dataset again") from error
        return info

    def _check_all_named(self) -> None:
        """Raises ValueError where `files` lacks a file, which would then not be verified."""
        shards = [shard.file for split in self.splits.values() for shard in split.shards]
        for name in (TOKEN_COUNTS_FILE, *map(lengths_file, self.splits), *shards):
            if name not in self.files:
                raise ValueError(f"files: no digest of {name}")

    def expected(self, name: str, shard: Shard | None = None) -> Expected | None:
        """The digest that a file must have; None for an array file of a dataset of version 2."""
        if name in self.files:
            return Expected(self.files[name])
        return Expected(shard.digest, records_digest) if shard else None


def _said(error: Exception) -> str:
    return f"no field {error}" if isinstance(error, KeyError) else f"{error!s:.200}"


def _hash(content: dict[str, Any]) -> str:
    hashed = {key: value for key, value in content.items() if key not in _UNHASHED}
    return f"{key_from(json.dumps({**hashed, 'format_version': _IDENTITY_VERSION}, sort_keys=True)):016x}"


def _checksum(content: dict[str, Any]) -> str:
    summed = {key: value for key, value in content.items() if key != "checksum"}
    return f"{key_from(json.dumps(summed, sort_keys=True)):016x}"


class ShardWriter:
    """Writes one shard under a temporary name and gives it its own when it is whole."""

    def __init__(self, path: epath.Path):
        self._path = path
        self._partial = path.parent / (path.name + ".partial")
        # One record a group: random access then decompresses nothing but the record it wants.
        self._writer = ArrayRecordWriter(str(self._partial), "group_size:1")
        self._count = 0
        self._digest = new_digest()

    def write(self, record: bytes) -> None:
        """Appends one record."""
        self._writer.write(record)
        self._digest.update(record)
        self._count += 1

    def close(self, instances: int) -> Shard:
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
        self._partial.replace(self._path)
        return Shard(self._path.name, instances, size, self._digest.hexdigest())


class PreparedDataset:
    """A prepared dataset, open for reading.

    Raises InputError, before anything is read, where a file is missing, truncated or of another version.
    """

    def __init__(self, path: str):
        self.folder = remote.named(path)
        self.info = DatasetInfo.read(self.folder)
        self._files = LocalFiles(self.folder, self.info.hash)
        self.tokenizer = WordPieceTokenizer.from_file(
            str(self._files.open_path(VOCABULARY_FILE)),
            lowercase=self.info.tokenizer["lowercase"],
            rules=TokenizerRules.from_json(self.info.tokenizer),
        )
        if self.tokenizer.sha256 != self.info.tokenizer["sha256"]:
            raise InputError(
                f"{self.folder / VOCABULARY_FILE} is not the vocabulary that {INFO_FILE} names: restore it"
            )
        if self.tokenizer.vocab_size != self.info.tokenizer["vocab_size"]:
            raise InputError(
                f"{self.folder / INFO_FILE}: damaged (tokenizer.vocab_size: got {self.info.tokenizer['vocab_size']}, "
                f"expected {self.tokenizer.vocab_size}); prepare the dataset again"
            )
        for split in self.info.splits.values():
            for shard in split.shards:
                self._check(shard)
        self._token = object()  # names this dataset's readers
        self._paths: dict[str, Path] = {}  # of the shards that were fetched and verified
        self._blocks = {name: _block_sizes(split.shards) for name, split in self.info.splits.items()}
        self._first_blocks = {
            name: np.cumsum([0] + [-(-shard.instances // BLOCK) for shard in split.shards])
            for name, split in self.info.splits.items()
        }

    def _check(self, shard: Shard) -> None:
        path, size = self.folder / shard.file, self._files.size(shard.file)
        if size is None:
            raise InputError(f"{path}: the shard is missing; copy the dataset again or prepare it again")
        if size != shard.bytes:
            raise InputError(
                f"{path}: {size:,} bytes where {INFO_FILE} says {shard.bytes:,}: the shard is truncated "
                "or was changed; copy the dataset again or prepare it again"
            )

    def size(self, split: str) -> int:
        """Instances in a split."""
        return int(self.block_sizes(split).sum())

    @property
    def separators_per_sequence(self) -> int:
        """[SEP]s in a sequence: 1 without pairs, else 2."""
        return 1 if self.info.options.get("pairs") == "none" else 2

    def block_sizes(self, split: str) -> np.ndarray:
        """int64 [blocks]: instances in each block of a split; none where there is no such split."""
        return self._blocks.get(split, np.zeros(0, np.int64))

    def token_counts(self) -> np.ndarray:
        """int64 [V]: how often each token stands in the training documents. InputError where the file is damaged."""
        counts = self._array(TOKEN_COUNTS_FILE, np.dtype(np.int64), self.tokenizer.vocab_size)
        total, expected = int(counts.sum()), self.info.splits["train"].tokens
        if total != expected or counts.min() < 0:
            raise self._damaged(TOKEN_COUNTS_FILE, f"got {total} tokens, expected {expected}")
        return counts

    def lengths(self, split: str) -> np.ndarray:
        """uint16 [N]: tokens in each sequence of a split, special ones counted. InputError for a damaged file."""
        name = lengths_file(split)
        lengths = self._array(name, np.dtype(np.uint16), self.size(split))
        if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= self.info.seq_len:
            raise self._damaged(
                name, f"got lengths of {lengths.min()} to {lengths.max()} tokens, expected 1 to {self.info.seq_len}"
            )
        return lengths

    def _array(self, name: str, dtype: np.dtype, size: int) -> np.ndarray:
        """The array [size] in a .npy file."""
        path = self._files.open_path(name, self.info.expected(name))
        try:
            array = np.load(path, mmap_mode="r" if size else None)  # which allocates nothing that the file has not
        except Exception as error:  # a damaged header raises anything, tokenize.TokenError among others
            raise self._damaged(name, f"missing or damaged ({error!s:.200})") from error
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != (size,):
            got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else "several arrays"
            raise self._damaged(name, f"got {got}, expected {dtype} ({size},)")
        return np.array(array)

    def _damaged(self, name: str, problem: str) -> InputError:
        return InputError(f"{self.folder / name}: damaged ({problem}); copy or prepare the dataset again")

    def read_blocks(self, split: str, blocks: np.ndarray) -> Instances:
        """The instances of `blocks` [n] of a split, n at least 1, one block after the other, in that order."""
        firsts, shards = self._first_blocks[split], self.info.splits[split].shards
        shard_of = np.searchsorted(firsts, blocks, side="right") - 1
        numbers = np.unique(shard_of).tolist()
        self._verify([shards[number] for number in numbers])
        read: dict[int, Instances] = {}
        for shard in numbers:
            wanted = np.unique(blocks[shard_of == shard])
            try:
                reader = READERS.open((self._token, shards[shard].file), self._paths[shards[shard].file])
                if (count := reader.num_records()) != firsts[shard + 1] - firsts[shard]:
                    raise ValueError(f"got {count} blocks, expected {firsts[shard + 1] - firsts[shard]}")
                records = reader.read((wanted - firsts[shard]).tolist())
                for block, record in zip(wanted.tolist(), records, strict=True):
                    read[block] = decode_block(record, self.tokenizer.vocab_size)
                    if len(read[block]) != self._blocks[split][block]:
                        raise ValueError(f"block {block} has {len(read[block])} instances")
            except (RuntimeError, ValueError, IndexError) as error:
                file = self.folder / shards[shard].file
                if os.strerror(errno.EMFILE) in str(error):
                    raise BertJaxError(
                        f"{file}: cannot be opened ({error}); raise the limit, `ulimit -n 4096`"
                    ) from error
                raise BertJaxError(f"{file}: cannot be read ({error}); copy or prepare the dataset again") from error
        return join([read[block] for block in blocks.tolist()])

    def _verify(self, shards: Sequence[Shard]) -> None:
        """Fetches and verifies shards before their first use, several at once: a window needs many."""
        new = [shard for shard in shards if shard.file not in self._paths]
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
                "%s: opened and verified %d shards (%.2f GB) in %.1f s; this is remembered in %s",
                self.folder, len(new), sum(shard.bytes for shard in new) / 1e9, seconds, cache_folder(),
            )  # fmt: skip
        self._paths.update(zip((shard.file for shard in new), paths, strict=True))

    def instances(self, split: str, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The unmasked instances at `indices` [B] of a split, as `records.lay_out` returns them."""
        sizes = self.block_sizes(split)
        starts = np.cumsum(sizes) - sizes
        block_of = np.searchsorted(starts, indices, side="right") - 1
        blocks, which = np.unique(block_of, return_inverse=True)
        read = np.cumsum(sizes[blocks]) - sizes[blocks]
        return lay_out(
            self.read_blocks(split, blocks),
            read[which] + indices - starts[block_of],
            self.info.seq_len,
            self.tokenizer,
        )


def _block_sizes(shards: tuple[Shard, ...]) -> np.ndarray:
    """int64: instances in each block, shard after shard."""
    sizes = [np.zeros(0, np.int64)]
    for shard in shards:
        whole, rest = divmod(shard.instances, BLOCK)
        sizes.append(np.array([BLOCK] * whole + [rest] * (rest > 0), np.int64))
    return np.concatenate(sizes)
