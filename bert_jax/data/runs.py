"""The first pass of preparing: slices of the input to *runs*, tokenized documents in order of hash."""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np

from bert_jax.data import corpus, sentences
from bert_jax.data.hashing import content_hash, key_from
from bert_jax.data.tokenization import WordPieceTokenizer
from bert_jax.data.word_cache import word_cache
from bert_jax.whole_files import write_whole

SENTENCES_A_BATCH = 2048  # tokenized in one call
_VERSION = 1  # of what a run holds
TOKENS_A_RUN = 8 << 20  # held in memory before they are written out


@dataclass(frozen=True)
class Tokenizing:
    """How slices of the input are split and tokenized. With `lines`, runs tell which line each sentence is of."""

    reading: corpus.CorpusOptions
    tokenizer: WordPieceTokenizer
    sentences: str
    language: str
    lines: bool


@dataclass(frozen=True)
class TokenizeTask:
    """A slice of the input and how it is tokenized; its runs go to the folder `scratch`.

    `fingerprint` stands for the file as it is now: what a task of the same `name` has left in `scratch` is its result.
    """

    piece: corpus.Slice
    fingerprint: str
    how: Tokenizing
    scratch: Path

    @cached_property
    def name(self) -> str:
        how = self.how
        words = (_VERSION, how.reading, how.tokenizer.sha256, how.sentences, how.language, how.lines)
        rules = how.tokenizer.rules.to_json()
        return f"{key_from(self.piece, self.fingerprint, *words, *sorted(rules.items())):016x}"


class Run(Protocol):
    """Tokenized documents in order of hash, as arrays.

    `hashes` [n] of the documents; `sentence_at` and `token_at` [n + 1], where each document begins in `lengths`, the
    tokens of every sentence, and in `tokens`. On request, for every sentence, `lines`, the hash of its line, and
    `begins_line`, whether it is the first of it.
    """

    @property
    def path(self) -> str: ...
    @property
    def documents(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    def array(self, name: str) -> np.ndarray: ...
    def part(self, name: str, start: int, stop: int) -> np.ndarray: ...


@dataclass(frozen=True)
class StoredRun:
    """A run on disk, as .npy files."""

    path: str
    documents: int
    tokens: int

    def array(self, name: str) -> np.ndarray:
        return np.load(f"{self.path}.{name}.npy")

    def part(self, name: str, start: int, stop: int) -> np.ndarray:
        """`array(name)[start:stop]`, read: of a memory map the system keeps far more than what is wanted."""
        with open(f"{self.path}.{name}.npy", "rb") as file:
            np.lib.format.read_magic(file)
            _, _, dtype = np.lib.format.read_array_header_1_0(file)
            return np.fromfile(file, dtype, stop - start, offset=start * dtype.itemsize)


@dataclass(frozen=True)
class HeldRun:
    """A run in memory."""

    arrays: dict[str, np.ndarray]
    documents: int
    tokens: int
    path: str = ""

    def array(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def part(self, name: str, start: int, stop: int) -> np.ndarray:
        """`array(name)[start:stop]`."""
        return self.arrays[name][start:stop]


def part_of(run: Run, low: int, high: int, lines: bool) -> HeldRun | None:
    """The documents of a run with hashes in [low, high), on request with what tells of `lines`; None without any."""
    hashes = run.array("hashes")
    first, last = (_position(hashes, bound) for bound in (low, high))
    if first == last:
        return None
    sentence_at, token_at = (run.part(name, first, last + 1) for name in ("sentence_at", "token_at"))
    of_sentence = ("lengths", "lines", "begins_line") if lines else ("lengths",)
    arrays = {
        "hashes": hashes[first:last].copy(),
        "sentence_at": sentence_at - sentence_at[0],
        "token_at": token_at - token_at[0],
        "tokens": run.part("tokens", int(token_at[0]), int(token_at[-1])),
        **{name: run.part(name, int(sentence_at[0]), int(sentence_at[-1])) for name in of_sentence},
    }
    return HeldRun(arrays, int(last - first), int(token_at[-1] - token_at[0]))


def _position(hashes: np.ndarray, bound: int) -> int:
    return len(hashes) if bound >= 2**64 else int(np.searchsorted(hashes, np.uint64(bound)))


def finished_runs(task: TokenizeTask) -> list[StoredRun] | None:
    """What `tokenize` has returned for the task before, None where it has not."""
    path = _finished(task)
    if not path.exists():
        return None
    return [StoredRun(str(task.scratch / file), *counts) for file, *counts in json.loads(path.read_text())]


def tokenize(task: TokenizeTask) -> list[StoredRun]:
    """Leaves the runs of a slice in the task's folder."""
    store = partial(_store, task)
    runs = list(map(store, itertools.count(), tokenized(task.piece, task.how)))  # one at a time in memory
    described = [(Path(run.path).name, run.documents, run.tokens) for run in runs]
    write_whole(_finished(task), json.dumps(described).encode())
    return runs


def tokenized(piece: corpus.Slice, how: Tokenizing) -> Iterator[HeldRun]:
    """Reads, splits and tokenizes a slice; several runs where it has more than `TOKENS_A_RUN` tokens.

    Raises:
      InputError: as `corpus.read`.
    """
    words = word_cache(how.tokenizer)
    documents: list[_Document] = []
    held = 0
    for batch in _batches(piece, how):
        encoded = iter(words.encode([sentence for _, lines in batch for _, line in lines for sentence in line]))
        for text_hash, lines in batch:
            document = _Document(text_hash, [], [], [])
            for line_hash, line in lines:
                begins = True
                for ids in itertools.islice(encoded, len(line)):
                    if ids:
                        document.sentences.append(ids)
                        document.lines.append(line_hash)
                        document.begins_line.append(begins)
                        begins = False
            if document.sentences:
                documents.append(document)
                held += sum(map(len, document.sentences))
        if held >= TOKENS_A_RUN * words.dtype.itemsize:
            yield _run(documents, words.dtype, how.lines)
            documents, held = [], 0
    if documents:
        yield _run(documents, words.dtype, how.lines)


def _finished(task: TokenizeTask) -> Path:
    """The file that says that a task is done, and what its runs are."""
    return task.scratch / f"{task.name}.runs.json"


class _Document(NamedTuple):
    """Token ids of each sentence, the hash of the line it is in, and whether it is the first there."""

    text_hash: int
    sentences: list[bytes]
    lines: list[int]
    begins_line: list[bool]


def _batches(piece: corpus.Slice, how: Tokenizing) -> Iterator[list[tuple[int, list[tuple[int, list[str]]]]]]:
    """(hash, lines) of documents in lists of some `SENTENCES_A_BATCH` sentences; a line is (hash, sentences).

    Where lines are not told apart, a document is one line.
    """
    split: Callable[[str], list[str]] = sentences.lines
    if how.sentences == "split":
        split = lambda text: sentences.split(text, how.language)  # noqa: E731
    batch: list[tuple[int, list[tuple[int, list[str]]]]] = []
    size = 0
    for document in corpus.read(piece, how.reading):
        if how.lines:
            lines = [(content_hash(line), split(line)) for line in document.split("\n")]
        else:
            lines = [(0, split(document))]
        batch.append((content_hash(document), lines))
        size += sum(len(found) for _, found in lines)
        if size >= SENTENCES_A_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _run(documents: list[_Document], dtype: np.dtype, lines: bool) -> HeldRun:
    keys = np.array([document.text_hash for document in documents], np.uint64)
    order = np.argsort(keys, kind="stable")
    ordered = [documents[i] for i in order.tolist()]
    found = [sentence for document in ordered for sentence in document.sentences]
    lengths = np.array([len(sentence) // dtype.itemsize for sentence in found], np.int64)
    sentence_at = np.cumsum([0, *(len(document.sentences) for document in ordered)])
    arrays = {
        "hashes": keys[order],
        "sentence_at": sentence_at,
        "token_at": np.concatenate([[0], np.cumsum(lengths)])[sentence_at],
        "lengths": lengths,
        "tokens": np.frombuffer(b"".join(found), dtype),
    }
    if lines:
        arrays["lines"] = np.array([line for document in ordered for line in document.lines], np.uint64)
        arrays["begins_line"] = np.array([begins for document in ordered for begins in document.begins_line], bool)
    return HeldRun(arrays, len(documents), int(lengths.sum()))


def _store(task: TokenizeTask, number: int, run: HeldRun) -> StoredRun:
    path = str(task.scratch / f"{task.name}-{number:04d}")
    for name, array in run.arrays.items():
        with open(f"{path}.{name}.npy", "wb") as file:
            save_array(file, array)
    return StoredRun(path, run.documents, run.tokens)


def save_array(file: BinaryIO, array: np.ndarray) -> None:
    """What `np.save` does, but on a full disk the OSError says so: that of `ndarray.tofile` has no errno."""
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(np.ascontiguousarray(array).data)
