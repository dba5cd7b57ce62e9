"""Corpus filters, as `FilterOptions` has them: duplicate documents, repeated lines, and length limits of documents."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bert_jax.data.dataset import Counts
from bert_jax.data.preparation.options import PrepareOptions
from bert_jax.data.preparation.sorted_runs import Job, Run, write_run

RULES = {
    "duplicate_documents": "drop_duplicates",
    "repeated_lines": "max_line_repeats",
    "short_documents": "min_document_tokens",
    "long_documents": "max_document_tokens",
}
"""Option of each rule, by the name of what it drops."""

Hashes = tuple[int, int]
"""A range [low, high) of hashes."""

EVERY: Hashes = (0, 2**64)
NO_HASHES = np.zeros(0, np.uint64)


def hash_ranges(hashes: Hashes, tokens: int, bucket_tokens: int) -> list[Hashes]:
    """Splits a range into equal ranges of about `bucket_tokens` tokens each, as hashes are uniform."""
    low, high = hashes
    if high <= low:
        return []
    parts = max(1, -(-tokens // bucket_tokens))
    return list(itertools.pairwise(low + (high - low) * i // parts for i in range(parts + 1)))


class Documents(NamedTuple):
    """Filtered documents: their `hashes` and numbers of `sentences` [n], and what was `dropped`, by rule of `RULES`.

    `arrays` has the `lengths` of all sentences in tokens, and other arrays of a run, in the same order.
    """

    hashes: np.ndarray
    sentences: np.ndarray
    arrays: dict[str, np.ndarray]
    dropped: dict[str, Counts]


def read_documents(
    runs: Sequence[Run], options: PrepareOptions, repeated: np.ndarray, hashes: Hashes, *names: str,
    lines: Hashes = EVERY,
) -> Documents:  # fmt: skip
    """Returns the filtered documents with hashes in a range, in the order of runs, then hashes.

    Memory is bounded by the documents that stay, and by one run.

    Args:
      runs: all runs.
      options: those of the filters.
      repeated: the sorted hashes of lines to drop.
      hashes: the range.
      names: arrays of the runs to read, `tokens` or those with an item for every sentence.
      lines: the hashes of lines to read; documents without any are none, and are not counted as dropped.
    """
    ranges = [run.hash_range(*hashes) for run in runs]
    found = [run.part("hashes", *ends) for run, ends in zip(runs, ranges, strict=True)]
    seen = np.zeros(sum(map(len, found)), bool)
    if options.drop_duplicates:
        seen[:] = True
        seen[np.unique(np.concatenate(found), return_index=True)[1]] = False
    duplicates = np.split(seen, np.cumsum([len(each) for each in found])[:-1])
    dropped = dict.fromkeys(RULES, Counts())
    parts = [
        _read(run, ends, duplicate, options, repeated, lines, names, dropped)
        for run, ends, duplicate in zip(runs, ranges, duplicates, strict=True)
    ]
    kept, sentences, *arrays = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Documents(kept, sentences, dict(zip(("lengths", *names), arrays, strict=True)), dropped)


def _read(
    run: Run, ends: tuple[int, int], duplicate: np.ndarray, options: PrepareOptions, repeated: np.ndarray,
    lines: Hashes, names: Sequence[str], dropped: dict[str, Counts],
) -> list[np.ndarray]:  # fmt: skip
    """Returns the arrays of `read_documents` for the documents at `ends` of a run; adds what it drops to `dropped`.

    `duplicate` bool [n] are the documents that are read elsewhere.
    """
    start, stop = ends
    sentence_at = run.part("sentence_at", start, stop + 1)
    first, last = sentence_at[[0, -1]].tolist()
    lengths = run.part("lengths", first, last)
    owner = np.repeat(np.arange(stop - start), np.diff(sentence_at))
    kept, sentence = np.ones(stop - start, bool), np.ones(last - first, bool)

    def count(values: np.ndarray | None = None) -> np.ndarray:
        """Returns the number, or the sum of values, of the kept sentences of each document."""
        weights = None if values is None else values[sentence]
        return np.bincount(owner[sentence], weights, stop - start).astype(np.int64)

    def drop(rule: str, documents: np.ndarray) -> None:
        lost = sentence & documents[owner]
        dropped[rule] += Counts(int(documents.sum()), int(lost.sum()), int(lengths[lost].sum()))
        kept[documents], sentence[lost] = False, False

    drop("duplicate_documents", duplicate)
    if len(repeated):
        lost = sentence & np.isin(run.part("lines", first, last), repeated)
        dropped["repeated_lines"] += Counts(0, int(lost.sum()), int(lengths[lost].sum()))
        sentence[lost] = False
        drop("repeated_lines", kept & (count() == 0))
    drop("short_documents", kept & (count(lengths) < options.min_document_tokens))
    if options.max_document_tokens:
        drop("long_documents", kept & (count(lengths) > options.max_document_tokens))
    if lines != EVERY:
        line = run.part("lines", first, last)
        sentence &= line >= np.uint64(lines[0])
        if lines[1] < EVERY[1]:
            sentence &= line < np.uint64(lines[1])
        kept &= count() > 0
    arrays = [run.part("hashes", start, stop)[kept], count()[kept], lengths[sentence]]
    for name in names:
        if name == "tokens":
            tokens = run.part(name, *run.part("token_at", start, stop + 1)[[0, -1]].tolist())
            arrays.append(tokens if sentence.all() else tokens[np.repeat(sentence, lengths)])
        else:
            arrays.append(run.part(name, first, last)[sentence])
    return arrays


def count_lines(job: Job, runs: Sequence[Run], task: tuple[int, Hashes]) -> Run:
    """Counts the lines of the documents in a range of hashes; of distinct ones, if duplicates are dropped.

    Args:
      job: the inputs of every task.
      runs: all runs.
      task: the number of the task, and the range of the documents' hashes.

    Returns:
      A run of the lines' `hashes`, sorted, and their `counts`.
    """
    number, hashes = task
    every = replace(job.options, min_document_tokens=0, max_document_tokens=0)
    arrays = read_documents(runs, every, NO_HASHES, hashes, "lines", "begins_line").arrays
    distinct, counts = np.unique(arrays["lines"][arrays["begins_line"]], return_counts=True)
    return write_run(f"{job.work}/lines-{number:06d}", Counts(), {"hashes": distinct, "counts": counts})


def frequent_lines(job: Job, counted: Sequence[Run], task: Hashes) -> np.ndarray:
    """Returns the hashes, uint64 and sorted, of lines in a range that occur more than `max_line_repeats` times."""
    ranges = [run.hash_range(*task) for run in counted]
    hashes, counts = (
        np.concatenate([run.part(name, *ends) for run, ends in zip(counted, ranges, strict=True)])
        for name in ("hashes", "counts")
    )
    distinct, which = np.unique(hashes, return_inverse=True)
    result: np.ndarray = distinct[np.bincount(which, counts, len(distinct)) > job.options.max_line_repeats]
    return result
