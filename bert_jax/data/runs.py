"""The first pass of preparing: slices of the input to *runs*, tokenized documents on disk in order of hash."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from bert_jax.data import corpus, sentences
from bert_jax.data.dataset import token_dtype
from bert_jax.data.hashing import content_hash
from bert_jax.data.tokenization import WordPieceTokenizer

SENTENCES_A_BATCH = 2048  # tokenized in one call
TOKENS_A_RUN = 8 << 20  # held in memory before they are written out


@dataclass(frozen=True)
class TokenizeTask:
    """A slice of the input and how it is split and tokenized; its runs go to the folder `scratch`."""

    number: int
    piece: corpus.Slice
    reading: corpus.CorpusOptions
    tokenizer: WordPieceTokenizer
    sentences: str
    language: str
    scratch: Path


@dataclass(frozen=True)
class Run:
    """Tokenized documents on disk in order of hash, as .npy files.

    `hashes` [n] of the documents; `sentence_at` and `token_at` [n + 1], where each document begins in `lengths`, the
    tokens of every sentence, and in `tokens`.
    """

    path: str
    documents: int
    tokens: int

    def array(self, name: str) -> np.ndarray:
        return np.load(f"{self.path}.{name}.npy", mmap_mode="r")


def tokenize(task: TokenizeTask) -> list[Run]:
    """Reads, splits and tokenizes a slice; several runs where it has more than `TOKENS_A_RUN` tokens."""
    split: Callable[[str], list[str]] = sentences.lines
    if task.sentences == "split":
        split = lambda text: sentences.split(text, task.language)  # noqa: E731
    dtype = token_dtype(task.tokenizer.vocab_size)
    runs: list[Run] = []
    hashes: list[int] = []
    documents: list[list[np.ndarray]] = []
    held = 0
    for batch in _batches(corpus.read(task.piece, task.reading), split):
        encoded = iter(task.tokenizer.encode_batch([sentence for _, found in batch for sentence in found]))
        for text_hash, found in batch:
            tokenized = [np.array(ids, dtype) for ids in itertools.islice(encoded, len(found)) if ids]
            if tokenized:
                hashes.append(text_hash)
                documents.append(tokenized)
                held += sum(map(len, tokenized))
        if held >= TOKENS_A_RUN:
            runs.append(_write_run(task, len(runs), hashes, documents, held))
            hashes, documents, held = [], [], 0
    if documents:
        runs.append(_write_run(task, len(runs), hashes, documents, held))
    return runs


def _batches(documents: Iterable[str], split: Callable[[str], list[str]]) -> Iterator[list[tuple[int, list[str]]]]:
    """(hash, sentences) of documents, in lists of some `SENTENCES_A_BATCH` sentences."""
    batch: list[tuple[int, list[str]]] = []
    size = 0
    for document in documents:
        found = split(document)
        batch.append((content_hash(document), found))
        size += len(found)
        if size >= SENTENCES_A_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_run(
    task: TokenizeTask, number: int, hashes: list[int], documents: list[list[np.ndarray]], tokens: int
) -> Run:
    path = str(task.scratch / f"{task.number:06d}-{number:04d}")
    keys = np.array(hashes, np.uint64)
    order = np.argsort(keys, kind="stable")
    ordered = [documents[i] for i in order.tolist()]
    sentence_arrays = [sentence for document in ordered for sentence in document]
    lengths = np.array([len(sentence) for sentence in sentence_arrays], np.int64)
    sentence_at = np.cumsum([0, *(len(document) for document in ordered)])
    arrays = {
        "hashes": keys[order],
        "sentence_at": sentence_at,
        "token_at": np.concatenate([[0], np.cumsum(lengths)])[sentence_at],
        "lengths": lengths,
        "tokens": np.concatenate(sentence_arrays),
    }
    for name, array in arrays.items():
        with open(f"{path}.{name}.npy", "wb") as file:
            save_array(file, array)
    return Run(path, len(documents), tokens)


def save_array(file: BinaryIO, array: np.ndarray) -> None:
    """What `np.save` does, but on a full disk the OSError says so: that of `ndarray.tofile` has no errno."""
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(np.ascontiguousarray(array).data)
