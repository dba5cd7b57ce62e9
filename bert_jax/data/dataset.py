"""Prepared datasets: format of their folder, metadata, and random access to instances.

    dataset.json            metadata: format version, tokenizer, seq_len, seed, options, counts, shards, digests, hash
    tokenizer.json          the tokenizer; tokenizer_config.json names its special tokens, see `text/tokenizer.py`
    token_counts.npy        int64 [V]: number of occurrences of each token in the training documents
    train-lengths.npy       uint16 [N]: tokens in each sequence, special ones included, in order of shards; also eval-
    train-00000-of-00012.array_record, ...; eval-00000-of-00001.array_record
    provenance.json         the run that prepared it; neither hashed nor verified

A record is an instance, see `records.py`. The instances of a shard are sorted by instance id, which is a hash: reading
a shard sequentially yields shuffled instances. ArrayRecord has a checksum of every group of records. A dataset in a
store is first copied whole to the local disk, $BERT_JAX_CACHE (or ~/.cache/bert_jax)/datasets/DIGEST.
"""

import dataclasses
import fcntl
import functools
import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader
from etils import epath

from bert_jax.data.hashing import key_from
from bert_jax.data.records import Instances, decode, pad_batch
from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import atomic, remote
from bert_jax.sections import Must, Section, from_mapping
from bert_jax.text.tokenizer import FILE, SETTINGS, read_tokenizer

FORMAT_VERSION = 1
INFO_FILE = "dataset.json"
TOKEN_COUNTS_FILE = "token_counts.npy"
SPLITS = ("train", "eval")
TOKENIZER_FIELDS = ("kind", "lowercase", "vocab_size", "sha256", "ids_sha256")
"""Attributes of `Tokenizer` in `dataset.json`."""
_MAX_OPEN = 256  # readers of a dataset; each holds a file open, and the default limit of a process is 1,024

Count = Annotated[int, Must("in [0, 2**62)", lambda x: 0 <= x < 1 << 62)]
FileName = Annotated[str, Must("the name of a file", lambda name: re.fullmatch(r"\w[\w.-]{1,99}", name) is not None)]


def lengths_file(split: str) -> str:
    """Returns the name of the file with the sequence lengths of a split."""
    return f"{split}-lengths.npy"


class Shard(Section):
    """An ArrayRecord file: name, number of instances, digest of their records, bytes on disk, and digest of these."""

    file: FileName = "train-00000-of-00001.array_record"
    instances: Count = 0
    content: str = ""
    bytes: Count = 0
    digest: str = ""


class Counts(Section):
    """Amount of text, in three units."""

    documents: Count = 0
    sentences: Count = 0
    tokens: Count = 0

    def __add__(self, other: Self) -> Self:
        names = [field.name for field in dataclasses.fields(self)]
        return type(self)(**{name: getattr(self, name) + getattr(other, name) for name in names})


class SplitInfo(Counts):
    """Counts of a split. Documents, sentences and tokens are counted once for any `dupe_factor`.

    `used_tokens` are in at least one instance; the others were cut. `random_next` counts the instances whose second
    segment is random, `same_document` those of them that have it from the document of the first segment.
    """

    used_tokens: Count = 0
    instances: Count = 0
    random_next: Count = 0
    same_document: Count = 0
    shards: tuple[Shard, ...] = ()


class DatasetInfo(Section):
    """Contents of `dataset.json`. Datasets with equal hashes give equal batches; see `with_hash`."""

    tokenizer: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # by the names of `TOKENIZER_FIELDS`
    seq_len: Annotated[int, Must("in [1, 2**15]", lambda x: 1 <= x <= 1 << 15)] = 128
    seed: int = 0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    splits: Mapping[str, SplitInfo] = dataclasses.field(default_factory=lambda: dict.fromkeys(SPLITS, SplitInfo()))
    corpus: Counts = Counts()  # the text that was read, before filters
    dropped: Mapping[str, Counts] = dataclasses.field(default_factory=dict)  # by rule of `shards.RULES`
    arrays: Mapping[str, str] = dataclasses.field(default_factory=dict)  # digest of each .npy file
    format_version: int = FORMAT_VERSION
    hash: str = ""

    def with_hash(self) -> "DatasetInfo":
        """Returns a copy with the `hash` of the instances, the ids of the tokenizer, and the seed of evaluation masks.

        Counts, options and the bytes of files, which follow from compression, have no part in it.
        """
        records = [(name, shard.instances, shard.content) for name in SPLITS for shard in self.splits[name].shards]
        content = key_from(self.seq_len, self.seed, self.tokenizer["ids_sha256"], records)
        return replace(self, hash=f"{content:016x}")

    def to_json(self) -> str:
        """Returns the text of `dataset.json`."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def read(cls, folder: epath.Path) -> "DatasetInfo":
        """Reads `dataset.json`. Raises InputError if it is missing, damaged or of another format version."""
        path = folder / INFO_FILE
        if not remote.exists(path):
            raise InputError(f"{folder}: {INFO_FILE} not found; expected a dataset of `bert-jax prepare`")
        content = atomic.read_json(path, FORMAT_VERSION)
        arrays = {TOKEN_COUNTS_FILE, *map(lengths_file, SPLITS)}
        try:
            info = from_mapping(cls, content)
            names = {*info.splits} == {*SPLITS} and {*info.arrays} == arrays
            is_whole = names and {*info.tokenizer} >= {*TOKENIZER_FIELDS} and info == info.with_hash()
        except (InputError, UnicodeEncodeError) as error:
            raise InputError(f"{path}: {error}") from error
        if not is_whole:
            raise InputError(f"{path}: damaged; prepare the dataset again")
        return info


new_digest = functools.partial(hashlib.blake2b, digest_size=16)
"""Creates the hash object of digests, which are in hex."""


def digest(content: bytes | memoryview) -> str:
    """Returns the digest of a file's content."""
    return new_digest(content).hexdigest()


def file_digest(path: Path) -> str:
    """Returns the `digest` of a file, without holding it in memory."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, new_digest).hexdigest()


def array_bytes(array: np.ndarray) -> bytes:
    """Returns the content of the .npy file of an array."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


class PreparedDataset:
    """A prepared dataset, open for reading.

    The constructor copies one in a store to the local disk. It raises InputError for a missing or truncated file or
    another format version, and BertJaxError if the copy fails.
    """

    def __init__(self, path: str):
        self.folder = remote.parse_path(path)
        self.info = info = DatasetInfo.read(self.folder)
        shards = [shard for split in info.splits.values() for shard in split.shards]
        self._local = _local_copy(self.folder, info, [FILE, SETTINGS, *info.arrays], shards)
        self.tokenizer = read_tokenizer(self._local / FILE)
        if self.tokenizer.sha256 != info.tokenizer["sha256"]:
            raise InputError(f"{self.folder / FILE}: sha256 is not that of {INFO_FILE}; restore the file")
        self._ends = {name: np.cumsum([shard.instances for shard in split.shards], dtype=np.int64)
                      for name, split in info.splits.items()}  # fmt: skip
        self._reader = functools.lru_cache(_MAX_OPEN)(functools.partial(_open_reader, self._local))

    def size(self, split: str) -> int:
        """Returns the number of instances in a split."""
        return int(self._ends[split][-1]) if len(self._ends[split]) else 0

    @property
    def separators_per_sequence(self) -> int:
        """Number of [SEP] tokens in a sequence: 1 without pairs, else 2."""
        return 1 if self.info.options.get("pairs") == "none" else 2

    def token_counts(self) -> np.ndarray:
        """Returns int64 [V]: token counts of the training documents. Raises InputError for a damaged file."""
        return self._array(TOKEN_COUNTS_FILE)

    def lengths(self, split: str) -> np.ndarray:
        """Returns uint16 [N]: tokens in each sequence of a split, with special ones. InputError for a damaged file."""
        return self._array(lengths_file(split))

    def _array(self, name: str) -> np.ndarray:
        content = (self._local / name).read_bytes()
        if digest(content) != self.info.arrays[name]:
            raise InputError(f"{self._local / name}: damaged, or {INFO_FILE} is; {_way_out(self.folder)}")
        return np.load(io.BytesIO(content), allow_pickle=False)

    def read(self, split: str, indices: np.ndarray) -> Instances:
        """Reads the instances at `indices` int64 [N] of a split, in any order.

        Raises BertJaxError for a damaged shard.
        """
        shards, ends = self.info.splits[split].shards, self._ends[split]
        shard_of = np.searchsorted(ends, indices, side="right")
        records: list[bytes] = [b""] * len(indices)
        for number in np.unique(shard_of).tolist():
            places = np.flatnonzero(shard_of == number)
            inside = indices[places] - (ends[number] - shards[number].instances)
            try:
                found = self._reader(shards[number].file).read(inside.tolist())
            except (RuntimeError, ValueError, IndexError) as error:
                file = self._local / shards[number].file
                raise BertJaxError(f"{file}: cannot be read ({error}); {_way_out(self.folder)}") from error
            for place, record in zip(places.tolist(), found, strict=True):
                records[place] = record
        try:
            return decode(records, self.tokenizer.vocab_size)
        except ValueError as error:
            raise BertJaxError(f"{self.folder}: {error}; copy or prepare the dataset again") from error

    def instances(self, split: str, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the unmasked instances at `indices` [B] of a split as rows; raises the errors of `read`."""
        return pad_batch(self.read(split, indices), self.info.seq_len, self.tokenizer)


def _open_reader(folder: Path, file: str) -> ArrayRecordReader:
    return ArrayRecordReader(str(folder / file), "readahead_buffer_size:0")


def _local_copy(folder: epath.Path, info: DatasetInfo, files: Sequence[str], shards: Sequence[Shard]) -> Path:
    """Returns the local folder of a dataset whose shards have the right sizes; copies one in a store there first.

    Processes of a host share the copy; the first one makes it. The downloaded shards are verified by their digests.
    """
    local = Path(folder)
    if remote.is_remote(folder):
        local = remote.cache_folder() / "datasets" / digest(info.to_json().encode())
        partial = local.with_suffix(".partial")
        local.parent.mkdir(parents=True, exist_ok=True)
        with open(local.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not local.exists():
                partial.mkdir(exist_ok=True)
                names = [*files, *(shard.file for shard in shards)]
                store, path = remote.store_of(folder)
                with remote.store_errors(folder):
                    store.get([f"{path}/{name}" for name in names], [str(partial / name) for name in names])
                if corrupt := [shard.file for shard in shards if file_digest(partial / shard.file) != shard.digest]:
                    raise BertJaxError(f"{folder / corrupt[0]}: corrupt download; run the command again")
                partial.rename(local)
    for shard in shards:
        found = (local / shard.file).stat().st_size if (local / shard.file).exists() else 0
        if found != shard.bytes:
            problem = f"truncated or changed: got {found:,} bytes, {INFO_FILE} has {shard.bytes:,}"
            raise InputError(f"{local / shard.file}: {problem}; {_way_out(folder)}")
    return local


def _way_out(folder: epath.Path) -> str:
    return "delete it, to copy it again" if remote.is_remote(folder) else "copy or prepare the dataset again"
