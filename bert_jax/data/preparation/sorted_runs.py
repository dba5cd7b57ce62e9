"""First pass of preparation: converts slices of the input to *runs*, tokenized documents sorted by hash."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bert_jax.data.corpora import corpus
from bert_jax.data.corpora.record_corpus import token_documents
from bert_jax.data.dataset import Counts
from bert_jax.data.hashing import content_hash
from bert_jax.data.preparation.options import PrepareOptions
from bert_jax.files import atomic, remote
from bert_jax.text import sentences
from bert_jax.text.tokenizer import Tokenizer, token_dtype
from bert_jax.text.word_cache import word_cache

SENTENCES_PER_BATCH = 2048  # per call of the tokenizer
TOKENS_PER_RUN = 8 << 20  # held in memory before a run is written


@dataclass(frozen=True)
class Job:
    """Inputs of every task: temporary files are in the folder `work`, shards in `output`, both local or in a store."""

    tokenizer: Tokenizer
    options: PrepareOptions
    seed: int
    work: str
    output: str


@dataclass(frozen=True)
class Run:
    """Sorted arrays in a file, by default those of tokenized documents.

    `hashes` [n] are those of the documents. `sentence_at` and `token_at` [n + 1] are the offsets of each document in
    `lengths`, the number of tokens of every sentence, and in `tokens`. Optional, for every sentence: `lines`, the hash
    of its line, and `begins_line`, True for the first sentence of a line.

    Attributes:
      path: the file.
      counts: of its documents.
      layout: the type, offset in bytes and number of items of each array.
      unknown: the number of [UNK] among its tokens.
    """

    path: str
    counts: Counts
    layout: Mapping[str, tuple[str, int, int]]
    unknown: int = 0

    def array(self, name: str) -> np.ndarray:
        """Reads an array."""
        return self.part(name, 0, self.layout[name][2])

    def part(self, name: str, start: int, stop: int) -> np.ndarray:
        """Reads `array(name)[start:stop]`. A memory map would keep far more of the file in memory."""
        kind, offset, _ = self.layout[name]
        size = np.dtype(kind).itemsize
        return np.frombuffer(remote.read_range(self.path, offset + start * size, offset + stop * size), kind)

    def hash_range(self, low: int, high: int) -> tuple[int, int]:
        """Returns the positions [first, last) of the hashes in [low, high)."""
        hashes = self.array("hashes")
        first, last = (
            len(hashes) if bound >= 2**64 else int(np.searchsorted(hashes, np.uint64(bound))) for bound in (low, high)
        )
        return first, last


def write_run(path: str, counts: Counts, arrays: Mapping[str, np.ndarray], unknown: int = 0) -> Run:
    """Writes arrays to a file; for the other arguments see `Run`."""
    layout, offset = {}, 0
    with atomic.whole_file(path) as file:
        for name, array in arrays.items():
            layout[name] = (array.dtype.str, offset, len(array))
            offset += file.write(array.tobytes())
    return Run(path, counts, layout, unknown)


def tokenize(job: Job, task: tuple[int, Sequence[corpus.Slice]]) -> list[Run]:
    """Reads, splits and tokenizes slices; writes a run for every `TOKENS_PER_RUN` tokens and returns the runs.

    Args:
      job: the inputs of every task.
      task: the number of the task, and its slices.

    Raises:
      InputError: as `corpus.read`.
    """
    number, pieces = task
    documents = _documents(pieces, job.tokenizer, job.options)
    paths = (f"{job.work}/{number:06d}-{part:04d}.run" for part in itertools.count())
    return [_write(path, held, job) for path, held in zip(paths, documents, strict=False)]


class _Document(NamedTuple):
    """Token ids of each sentence, the hash of its line, and True for the first sentence of a line."""

    text_hash: int
    sentences: list[bytes]
    lines: list[int]
    begins_line: list[bool]


def _documents(
    pieces: Sequence[corpus.Slice], tokenizer: Tokenizer, options: PrepareOptions
) -> Iterator[list[_Document]]:
    """Yields lists of documents with about `TOKENS_PER_RUN` tokens."""
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
            yield documents
            documents, held = [], 0
    if documents:
        yield documents


def _batches(
    pieces: Sequence[corpus.Slice], options: PrepareOptions
) -> Iterator[list[tuple[int, list[tuple[int, list[str]]]]]]:
    """Yields lists of documents (hash, lines) with about `SENTENCES_PER_BATCH` sentences; a line is (hash, sentences).

    Unless lines are needed, a document is one line.
    """
    split: Callable[[str], list[str]] = sentences.lines
    if options.sentences == "split":
        split = lambda text: sentences.split(text, options.language)  # noqa: E731
    batch: list[tuple[int, list[tuple[int, list[str]]]]] = []
    size = 0
    for document in itertools.chain.from_iterable(corpus.read(piece, options) for piece in pieces):
        if options.needs_lines:
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


def _write(path: str, documents: list[_Document], job: Job) -> Run:
    dtype = token_dtype(job.tokenizer.vocab_size)
    keys = np.array([document.text_hash for document in documents], np.uint64)
    order = np.argsort(keys, kind="stable")
    ordered = [documents[i] for i in order.tolist()]
    encoded = [sentence for document in ordered for sentence in document.sentences]
    lengths = np.array([len(sentence) // dtype.itemsize for sentence in encoded], np.int64)
    sentence_at = np.cumsum([0, *(len(document.sentences) for document in ordered)])
    tokens = np.frombuffer(b"".join(encoded), dtype)
    arrays = {
        "hashes": keys[order],
        "sentence_at": sentence_at,
        "token_at": np.concatenate([[0], np.cumsum(lengths)])[sentence_at],
        "lengths": lengths,
        "tokens": tokens,
    }
    if job.options.needs_lines:
        arrays["lines"] = np.array([line for document in ordered for line in document.lines], np.uint64)
        arrays["begins_line"] = np.array([begins for document in ordered for begins in document.begins_line], bool)
    counts = Counts(len(documents), len(encoded), len(tokens))
    return write_run(path, counts, arrays, int((tokens == job.tokenizer.unk_id).sum()))
