"""The first pass of preparing: slices of the input to *runs*, tokenized documents on disk in order of hash."""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from bert_jax.data import corpus, sentences
from bert_jax.data.hashing import content_hash, key_from
from bert_jax.data.tokenization import WordPieceTokenizer
from bert_jax.data.word_cache import word_cache

SENTENCES_A_BATCH = 2048  # tokenized in one call
_VERSION = 1  # of what a run holds
TOKENS_A_RUN = 8 << 20  # held in memory before they are written out


@dataclass(frozen=True)
class TokenizeTask:
    """A slice of the input and how it is split and tokenized; its runs go to the folder `scratch`.

    With `lines`, runs tell which line each sentence is of. `fingerprint` stands for the file as it is now: what a task
    of the same `name` has left in `scratch` is its result.
    """

    piece: corpus.Slice
    fingerprint: str
    reading: corpus.CorpusOptions
    tokenizer: WordPieceTokenizer
    sentences: str
    language: str
    lines: bool
    scratch: Path

    @cached_property
    def name(self) -> str:
        how = (_VERSION, self.reading, self.tokenizer.sha256, self.sentences, self.language, self.lines)
        return f"{key_from(self.piece, self.fingerprint, *how):016x}"


@dataclass(frozen=True)
class Run:
    """Tokenized documents on disk in order of hash, as .npy files.

    `hashes` [n] of the documents; `sentence_at` and `token_at` [n + 1], where each document begins in `lengths`, the
    tokens of every sentence, and in `tokens`. On request, for every sentence, `lines`, the hash of its line, and
    `begins_line`, whether it is the first of it.
    """

    path: str
    documents: int
    tokens: int

    def array(self, name: str) -> np.ndarray:
        return np.load(f"{self.path}.{name}.npy", mmap_mode="r")


def finished_runs(task: TokenizeTask) -> list[Run] | None:
    """What `tokenize` has returned for the task before, None where it has not."""
    path = _finished(task)
    if not path.exists():
        return None
    return [Run(str(task.scratch / file), *counts) for file, *counts in json.loads(path.read_text())]


def tokenize(task: TokenizeTask) -> list[Run]:
    """Reads, splits and tokenizes a slice; several runs where it has more than `TOKENS_A_RUN` tokens."""
    words = word_cache(task.tokenizer)
    runs: list[Run] = []
    documents: list[_Document] = []
    held = 0
    for batch in _batches(task):
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
            runs.append(_write_run(task, len(runs), documents, words.dtype))
            documents, held = [], 0
    if documents:
        runs.append(_write_run(task, len(runs), documents, words.dtype))
    described = [(Path(run.path).name, run.documents, run.tokens) for run in runs]
    write_whole(_finished(task), json.dumps(described).encode())
    return runs


def _finished(task: TokenizeTask) -> Path:
    """The file that says that a task is done, and what its runs are."""
    return task.scratch / f"{task.name}.runs.json"


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that is there whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)


class _Document(NamedTuple):
    """Token ids of each sentence, the hash of the line it is in, and whether it is the first there."""

    text_hash: int
    sentences: list[bytes]
    lines: list[int]
    begins_line: list[bool]


def _batches(task: TokenizeTask) -> Iterator[list[tuple[int, list[tuple[int, list[str]]]]]]:
    """(hash, lines) of documents in lists of some `SENTENCES_A_BATCH` sentences; a line is (hash, sentences).

    Where lines are not told apart, a document is one line.
    """
    split: Callable[[str], list[str]] = sentences.lines
    if task.sentences == "split":
        split = lambda text: sentences.split(text, task.language)  # noqa: E731
    batch: list[tuple[int, list[tuple[int, list[str]]]]] = []
    size = 0
    for document in corpus.read(task.piece, task.reading):
        if task.lines:
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


def _write_run(task: TokenizeTask, number: int, documents: list[_Document], dtype: np.dtype) -> Run:
    path = str(task.scratch / f"{task.name}-{number:04d}")
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
    if task.lines:
        arrays["lines"] = np.array([line for document in ordered for line in document.lines], np.uint64)
        arrays["begins_line"] = np.array([begins for document in ordered for begins in document.begins_line], bool)
    for name, array in arrays.items():
        with open(f"{path}.{name}.npy", "wb") as file:
            save_array(file, array)
    return Run(path, len(documents), int(lengths.sum()))


def save_array(file: BinaryIO, array: np.ndarray) -> None:
    """What `np.save` does, but on a full disk the OSError says so: that of `ndarray.tofile` has no errno."""
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(np.ascontiguousarray(array).data)
