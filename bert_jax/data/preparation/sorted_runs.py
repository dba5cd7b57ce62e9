"""First pass of preparation: converts slices of the input to *runs*, tokenized documents sorted by hash."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from bert_jax.data.corpora import corpus
from bert_jax.data.corpora.token_corpus import token_documents
from bert_jax.data.hashing import content_hash, key_from
from bert_jax.data.preparation.options import PrepareOptions
from bert_jax.data.preparation.scratch_folder import damaged, load_array, read_finished, save_array, write_finished
from bert_jax.text import sentences
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.word_cache import word_cache

SENTENCES_PER_BATCH = 2048  # per call of the tokenizer
_VERSION = 2  # of the format of a run and its .runs.json
TOKENS_PER_RUN = 8 << 20  # held in memory before a run is written


@dataclass(frozen=True)
class TokenizeTask:
    """Task that tokenizes slices of the input and writes their runs to the folder `scratch`.

    `fingerprints` identify the current content of the files. Runs that a task of the same `name` left in `scratch` are
    reused.
    """

    pieces: tuple[corpus.Slice, ...]
    fingerprints: tuple[str, ...]
    tokenizer: Tokenizer
    options: PrepareOptions
    scratch: Path

    @cached_property
    def name(self) -> str:
        options = self.options
        reading = (
            options.documents, options.errors, options.text_field, options.ids_field, options.tsv_quotes,
            options.max_document_bytes,
        )  # fmt: skip
        splitting = (options.sentences, options.language, bool(options.max_line_repeats))
        parts = (self.pieces, self.fingerprints, _VERSION, self.tokenizer.sha256, *reading, *splitting)
        return f"{key_from(*parts):016x}"


class SortedRun(Protocol):
    """Tokenized documents sorted by hash, as arrays.

    `hashes` [n] are those of the documents. `sentence_at` and `token_at` [n + 1] are the offsets of each document in
    `lengths`, the number of tokens of every sentence, and in `tokens`. Optional, for every sentence: `lines`, the hash
    of its line, and `begins_line`, True for the first sentence of a line.
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
class RunOnDisk:
    """A run on disk, as .npy files."""

    path: str
    documents: int
    tokens: int

    def array(self, name: str) -> np.ndarray:
        return load_array(Path(f"{self.path}.{name}.npy"))

    def part(self, name: str, start: int, stop: int) -> np.ndarray:
        """Reads `array(name)[start:stop]`. A memory map would keep far more of the file in memory."""
        path = Path(f"{self.path}.{name}.npy")
        with open(path, "rb") as file:
            try:
                np.lib.format.read_magic(file)
                _, _, dtype = np.lib.format.read_array_header_1_0(file)
            except Exception as error:
                raise damaged(path, error) from error
            items = np.fromfile(file, dtype, stop - start, offset=start * dtype.itemsize)
        if len(items) != stop - start:
            raise damaged(path, f"got {start + len(items):,} items, expected at least {stop:,}")
        return items


@dataclass(frozen=True)
class RunInMemory:
    """A run in memory."""

    arrays: dict[str, np.ndarray]
    documents: int
    tokens: int
    path: str = ""

    def array(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def part(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns `array(name)[start:stop]`."""
        return self.arrays[name][start:stop]


def hash_range_of(run: SortedRun, low: int, high: int, lines: bool) -> RunInMemory | None:
    """Returns the documents of a run with hashes in [low, high), with the arrays of `lines` if set; None if empty."""
    hashes = run.array("hashes")
    first, last = (_position(hashes, bound) for bound in (low, high))
    if first == last:
        return None
    sentence_at, token_at = (run.part(name, first, last + 1) for name in ("sentence_at", "token_at"))
    sentence_arrays = ("lengths", "lines", "begins_line") if lines else ("lengths",)
    arrays = {
        "hashes": hashes[first:last].copy(),
        "sentence_at": sentence_at - sentence_at[0],
        "token_at": token_at - token_at[0],
        "tokens": run.part("tokens", int(token_at[0]), int(token_at[-1])),
        **{name: run.part(name, int(sentence_at[0]), int(sentence_at[-1])) for name in sentence_arrays},
    }
    return RunInMemory(arrays, int(last - first), int(token_at[-1] - token_at[0]))


def _position(hashes: np.ndarray, bound: int) -> int:
    return len(hashes) if bound >= 2**64 else int(np.searchsorted(hashes, np.uint64(bound)))


def finished_runs(task: TokenizeTask) -> list[RunOnDisk] | None:
    """Returns the saved result of an earlier `tokenize` of the task; None if it is incomplete or damaged."""
    described = read_finished(_finished(task))
    if described is None:
        return None
    return [RunOnDisk(str(task.scratch / file), *counts) for file, *counts in described["runs"]]


def tokenize(task: TokenizeTask) -> list[RunOnDisk]:
    """Writes the runs of a task to its scratch folder and returns them."""
    files: list[Path] = []
    runs = [
        _store(task, number, run, files)  # one at a time in memory
        for number, run in enumerate(tokenized_runs(task.pieces, task.tokenizer, task.options))
    ]
    described = [(Path(run.path).name, run.documents, run.tokens) for run in runs]
    write_finished(_finished(task), {"runs": described}, files)
    return runs


def tokenized_runs(
    pieces: Sequence[corpus.Slice], tokenizer: Tokenizer, options: PrepareOptions
) -> Iterator[RunInMemory]:
    """Reads, splits and tokenizes slices; yields a run for every `TOKENS_PER_RUN` tokens.

    With `max_line_repeats`, a run has the hash of each sentence's line.

    Raises:
      InputError: as `corpus.read`.
    """
    words = word_cache(tokenizer)
    documents: list[_Document] = []
    held = 0
    batches = _token_batches(pieces, tokenizer, options) if options.ids_field else _batches(pieces, options)
    for batch in batches:
        found: list[Any] = [sentence for _, lines in batch for _, line in lines for sentence in line]
        encoded = iter(found if options.ids_field else words.encode(found))
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
        if held >= TOKENS_PER_RUN * words.dtype.itemsize:
            yield _run(documents, words.dtype, options)
            documents, held = [], 0
    if documents:
        yield _run(documents, words.dtype, options)


def _finished(task: TokenizeTask) -> Path:
    """Returns the path of the marker that commits a task and lists its runs."""
    return task.scratch / f"{task.name}.runs.json"


class _Document(NamedTuple):
    """Token ids of each sentence, the hash of its line, and True for the first sentence of a line."""

    text_hash: int
    sentences: list[bytes]
    lines: list[int]
    begins_line: list[bool]


def _batches(
    pieces: Sequence[corpus.Slice], options: PrepareOptions
) -> Iterator[list[tuple[int, list[tuple[int, list[str]]]]]]:
    """Yields lists of documents (hash, lines) with about `SENTENCES_PER_BATCH` sentences; a line is (hash, sentences).

    Without `max_line_repeats`, a document is one line.
    """
    split: Callable[[str], list[str]] = sentences.lines
    if options.sentences == "split":
        split = lambda text: sentences.split(text, options.language)  # noqa: E731
    batch: list[tuple[int, list[tuple[int, list[str]]]]] = []
    size = 0
    for document in itertools.chain.from_iterable(corpus.read(piece, options) for piece in pieces):
        if options.max_line_repeats:
            lines = [(content_hash(line), split(line)) for line in document.split("\n")]
        else:
            lines = [(0, split(document))]
        batch.append((content_hash(document), lines))
        size += sum(len(found) for _, found in lines)
        if size >= SENTENCES_PER_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _token_batches(
    pieces: Sequence[corpus.Slice], tokenizer: Tokenizer, options: PrepareOptions
) -> Iterator[list[tuple[int, list[tuple[int, list[bytes]]]]]]:
    """Yields documents of token ids as `_batches` those of text; a sentence is its ids, and a line of its own."""
    for piece in pieces:
        for document in token_documents(piece.path, piece.start, piece.end, options.ids_field, tokenizer):
            text_hash, *hashes = (content_hash(ids.decode("latin-1")) for ids in (b"".join(document), *document))
            yield [(text_hash, [(line_hash, [ids]) for line_hash, ids in zip(hashes, document, strict=True)])]


def _run(documents: list[_Document], dtype: np.dtype, options: PrepareOptions) -> RunInMemory:
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
    if options.max_line_repeats:
        arrays["lines"] = np.array([line for document in ordered for line in document.lines], np.uint64)
        arrays["begins_line"] = np.array([begins for document in ordered for begins in document.begins_line], bool)
    return RunInMemory(arrays, len(documents), int(lengths.sum()))


def _store(task: TokenizeTask, number: int, run: RunInMemory, files: list[Path]) -> RunOnDisk:
    """Writes a run, and appends the paths of its files to `files`."""
    path = str(task.scratch / f"{task.name}-{number:04d}")
    for name, array in run.arrays.items():
        files.append(Path(f"{path}.{name}.npy"))
        with open(files[-1], "wb") as file:
            save_array(file, array)
    return RunOnDisk(path, run.documents, run.tokens)
