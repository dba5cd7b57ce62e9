"""The prepared dataset: what is in its folder, and how batches of instances are read.

    dataset.json            what it is: format version, tokenizer, seq_len, seed, options, counts, shards, hash
    vocab.txt               the vocabulary, one piece a line
    token_counts.npy        int64 [V]: how often each token stands in the training documents
    train-lengths.npy       uint16 [N]: tokens in each sequence, special ones counted, shard after shard; also eval-
    train-00000-of-00012.array_record, ...; eval-00000-of-00001.array_record

A record is a block of instances, see `records.py`. Within a shard, instances are in order of instance id, which is a
hash: reading a shard from the front reads a shuffled one.
"""

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from etils import epath

from bert_jax import remote, whole_files
from bert_jax.data.hashing import key_from
from bert_jax.data.local_files import LocalFiles
from bert_jax.data.records import BLOCK, Instances, decode_block, join, lay_out
from bert_jax.data.tokenization import TokenizerRules, WordPieceTokenizer
from bert_jax.errors import BertJaxError, InputError

FORMAT_VERSION = 2
_FETCHES = 8  # shards that are fetched from a store at the same time
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
    """The contents of `dataset.json`."""

    tokenizer: dict[str, Any]  # kind, lowercase, vocab_size, sha256, and rules that are not the default
    seq_len: int
    seed: int
    options: dict[str, Any]
    splits: dict[str, SplitInfo]
    dropped: dict[str, int]  # what `hygiene` left out, by rule
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
        if not remote.exists(path):
            raise InputError(f"{folder} is not a prepared dataset (no {INFO_FILE}): make one with `bert-jax prepare`")
        text = whole_files.read_whole(path)
        try:
            content = json.loads(text)
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


class ShardWriter:
    """Writes one shard under a temporary name and gives it its own when it is whole."""

    def __init__(self, path: epath.Path):
        self._path = path
        self._partial = path.parent / (path.name + ".partial")
        # One record a group: random access then decompresses nothing but the record it wants.
        self._writer = ArrayRecordWriter(str(self._partial), "group_size:1")
        self._count = 0
        self._digest = hashlib.blake2b(digest_size=16)

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
        self._readers: dict[Shard, ArrayRecordReader] = {}
        self._blocks = {name: _block_sizes(split.shards) for name, split in self.info.splits.items()}
        self._first_blocks = {
            name: np.cumsum([0] + [-(-shard.instances // BLOCK) for shard in split.shards])
            for name, split in self.info.splits.items()
        }
        for split in self.info.splits.values():
            for shard in split.shards:
                self._check(shard)

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

    def block_sizes(self, split: str) -> np.ndarray:
        """int64 [blocks]: instances in each block of a split; none where there is no such split."""
        return self._blocks.get(split, np.zeros(0, np.int64))

    def token_counts(self) -> np.ndarray:
        """int64 [V]: how often each token stands in the training documents. InputError where the file is damaged."""
        return self._array(TOKEN_COUNTS_FILE)

    def lengths(self, split: str) -> np.ndarray:
        """uint16 [N]: tokens in each sequence of a split, special ones counted. InputError for a damaged file."""
        lengths = self._array(lengths_file(split))
        if lengths.shape != (self.size(split),):
            raise InputError(f"{self.folder / lengths_file(split)}: damaged; copy or prepare the dataset again")
        return lengths

    def _array(self, name: str) -> np.ndarray:
        path = self._files.open_path(name)
        try:
            return np.load(path)
        except (FileNotFoundError, ValueError, EOFError) as error:
            raise InputError(
                f"{self.folder / name}: missing or damaged ({error}); copy or prepare the dataset again"
            ) from error

    def read_blocks(self, split: str, blocks: np.ndarray) -> Instances:
        """The instances of `blocks` [n] of a split, n at least 1, one block after the other, in that order."""
        firsts, shards = self._first_blocks[split], self.info.splits[split].shards
        shard_of = np.searchsorted(firsts, blocks, side="right") - 1
        numbers = np.unique(shard_of).tolist()
        self._open([shards[number] for number in numbers])
        read: dict[int, Instances] = {}
        for shard in numbers:
            wanted = np.unique(blocks[shard_of == shard])
            try:
                records = self._readers[shards[shard]].read((wanted - firsts[shard]).tolist())
                for block, record in zip(wanted.tolist(), records, strict=True):
                    read[block] = decode_block(record, self.tokenizer.vocab_size)
                    if len(read[block]) != self._blocks[split][block]:
                        raise ValueError(f"block {block} has {len(read[block])} instances")
            except (RuntimeError, ValueError, IndexError) as error:
                file = self.folder / shards[shard].file
                raise BertJaxError(f"{file}: cannot be read ({error}); copy or prepare the dataset again") from error
        return join([read[block] for block in blocks.tolist()])

    def _open(self, shards: Sequence[Shard]) -> None:
        """Opens those that are not open yet, and fetches them first if they are remote: a window needs many at once."""
        missing = [shard for shard in shards if shard not in self._readers]
        if not missing:
            return
        with ThreadPoolExecutor(_FETCHES) as pool:
            paths = list(pool.map(lambda shard: self._files.open_path(shard.file, shard.digest), missing))
        for shard, path in zip(missing, paths, strict=True):
            self._readers[shard] = ArrayRecordReader(str(path), "readahead_buffer_size:0")

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
