"""First pass of preparation: converts slices of the input to *runs*, tokenized documents sorted by hash."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bert_jax.data.corpora import corpus
from bert_jax.data.dataset import Counts
from bert_jax.data.hashing import key_from
from bert_jax.data.options import PrepareOptions
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

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Reads items [start, stop) of an array. A memory map would keep far more of the file in memory."""
        kind, offset, items = self.layout[name]
        size = np.dtype(kind).itemsize
        stop = items if stop is None else stop
        return np.frombuffer(remote.read_range(self.path, offset + start * size, offset + stop * size), kind)

    def hash_range(self, low: int, high: int) -> tuple[int, int]:
        """Returns the positions [first, last) of the hashes in [low, high]."""
        hashes = self.read("hashes")
        first, last = np.searchsorted(hashes, np.uint64(low)), np.searchsorted(hashes, np.uint64(high), side="right")
        return int(first), int(last)


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
    size = token_dtype(job.tokenizer.vocab_size).itemsize
    texts = _texts(pieces, job)
    batches = corpus.grouped(texts, lambda text: sum(len(line) for _, line in text[1]), SENTENCES_PER_BATCH)
    documents = itertools.chain.from_iterable(_encode(batch, job) for batch in batches)
    parts = corpus.grouped(documents, lambda document: sum(map(len, document.sentences)), TOKENS_PER_RUN * size)
    return [_write(f"{job.work}/{number:06d}-{part:04d}.run", held, job) for part, held in enumerate(parts)]


_Text = tuple[int, list[tuple[int, list[Any]]]]
"""A document: the hash of its text, and the hash and the sentences of each line, which are text, or ids as bytes."""


class _Document(NamedTuple):
    """Token ids of each sentence, the hash of its line, and True for the first sentence of a line."""

    text_hash: int
    sentences: list[bytes]
    lines: list[int]
    begins_line: list[bool]


def _texts(pieces: Sequence[corpus.Slice], job: Job) -> Iterator[_Text]:
    """Yields the documents of slices. Unless lines are needed, a document is one line; of ids, a sentence is a line."""
    options = job.options
    split: Callable[[str], list[str]] = sentences.lines
    if options.sentences == "split":
        split = partial(sentences.split, language=options.language)
    for piece in pieces:
        if options.ids_field:
            for ids in corpus.token_documents(piece.path, piece.start, piece.end, options.ids_field, job.tokenizer):
                text_hash, *hashes = (key_from(part.decode("latin-1")) for part in (b"".join(ids), *ids))
                yield text_hash, [(line_hash, [sentence]) for line_hash, sentence in zip(hashes, ids, strict=True)]
        else:
            for document in corpus.read(piece, options):
                lines = document.split("\n") if options.needs_lines else [document]
                yield key_from(document), [(key_from(line), split(line)) for line in lines]


def _encode(batch: list[_Text], job: Job) -> Iterator[_Document]:
    """Yields the documents that have tokens; sentences without are dropped."""
    found: list[Any] = [sentence for _, lines in batch for _, line in lines for sentence in line]
    encoded = iter(found if job.options.ids_field else word_cache(job.tokenizer).encode(found))
    for text_hash, lines in batch:
        document = _Document(text_hash, [], [], [])
        for line_hash, line in lines:
            kept = [ids for ids in itertools.islice(encoded, len(line)) if ids]
            document.sentences.extend(kept)
            document.lines.extend([line_hash] * len(kept))
            document.begins_line.extend(place == 0 for place in range(len(kept)))
        if document.sentences:
            yield document


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
