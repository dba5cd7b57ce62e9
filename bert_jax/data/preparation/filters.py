"""Corpus filters, as `FilterOptions` has them: duplicate documents, repeated lines, and length limits of documents."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
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


def without_filters(options: PrepareOptions) -> PrepareOptions:
    """Returns the options with all filters off."""
    return replace(options, drop_duplicates=False, max_line_repeats=0, min_document_tokens=0, max_document_tokens=0)


def hash_ranges(low: int, high: int, tokens: int, bucket_tokens: int) -> list[tuple[int, int]]:
    """Splits [low, high) into equal ranges of about `bucket_tokens` tokens each, as hashes are uniform."""
    if high <= low:
        return []
    parts = max(1, -(-tokens // bucket_tokens))
    bounds = [low + (high - low) * i // parts for i in range(parts + 1)]
    return list(itertools.pairwise(bounds))


class Documents(NamedTuple):
    """Distinct documents: their `hashes`, numbers of `copies` and numbers of `sentences` [n].

    `arrays` has the `lengths` of all sentences in tokens, and other arrays of a run, in the same order. `dropped` has
    counts by rule of `RULES`; every copy of a document is counted.
    """

    hashes: np.ndarray
    copies: np.ndarray
    sentences: np.ndarray
    arrays: dict[str, np.ndarray]
    dropped: dict[str, Counts]


@dataclass(frozen=True)
class Filter:
    """Filters of documents: the `options`, and the sorted hashes of the `repeated` lines."""

    options: PrepareOptions
    repeated: np.ndarray

    def read(self, runs: Sequence[Run], low: int, high: int, *names: str) -> Documents:
        """Returns the filtered documents with hashes in [low, high), in the order of runs, then hashes.

        Memory is bounded by the distinct documents, and by one run.

        Args:
          runs: all runs.
          low, high: the range.
          names: arrays of the runs to read, `tokens` or those with an item for every sentence.
        """
        ranges = [run.hash_range(low, high) for run in runs]
        hashes = np.concatenate([run.part("hashes", *ends) for run, ends in zip(runs, ranges, strict=True)])
        _, first, copies = np.unique(hashes, return_index=True, return_counts=True)
        dropped: Counter[tuple[str, int]] = Counter()
        parts = [
            [run.part(name, 0, 0) for name in ("hashes", "token_at", "sentence_at", "lengths", *names)]
            for run in runs[:1]
        ]
        offset = 0
        for run, (start, stop) in zip(runs, ranges, strict=True):
            chosen = (first >= offset) & (first < offset + stop - start)
            if chosen.any():
                weights = np.zeros(stop - start, np.int64)
                weights[first[chosen] - offset] = copies[chosen]
                parts.append(self._read(run, start, stop, weights, dropped, names))
            offset += stop - start
        hashes, copies, sentences, *arrays = (np.concatenate(each) for each in zip(*parts, strict=True))
        counts = {rule: Counts(*(dropped[rule, unit] for unit in range(3))) for rule in RULES}
        return Documents(hashes, copies, sentences, dict(zip(("lengths", *names), arrays, strict=True)), counts)

    def _read(
        self,
        run: Run,
        start: int,
        stop: int,
        weights: np.ndarray,
        dropped: Counter[tuple[str, int]],
        names: Sequence[str],
    ) -> list[np.ndarray]:
        """Returns the arrays of `read` for the documents at [start, stop) of a run.

        `weights` int64 [n] are their numbers of copies in all runs, 0 for those that are read with another copy.
        """

        def count(rule: str, *units: np.ndarray) -> None:
            for unit, number in enumerate(units):
                dropped[rule, unit] += int(number.sum())

        def sizes(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """Returns the numbers of chosen sentences and of their tokens, each int64 [n]."""
            totals = (np.bincount(owner[chosen], values, stop - start) for values in (None, lengths[chosen]))
            number, size = (total.astype(np.int64) for total in totals)
            return number, size

        options = self.options
        sentence_at = run.part("sentence_at", start, stop + 1)
        first, last = sentence_at[[0, -1]].tolist()
        lengths = run.part("lengths", first, last)
        owner = np.repeat(np.arange(stop - start), np.diff(sentence_at))
        kept = weights > 0
        sentence = kept[owner]
        if options.drop_duplicates:
            number, size = sizes(sentence)
            extra = np.maximum(weights - 1, 0)
            count("duplicate_documents", extra, extra * number, extra * size)
            weights = np.minimum(weights, 1)
        if len(self.repeated):
            is_repeated = sentence & np.isin(run.part("lines", first, last), self.repeated)
            number, size = sizes(is_repeated)
            sentence &= ~is_repeated
            is_empty = kept & ~np.bincount(owner[sentence], minlength=stop - start).astype(bool)
            count("repeated_lines", weights * is_empty, weights * number, weights * size)
            kept &= ~is_empty
        number, size = sizes(sentence)
        too_short = kept & (size < options.min_document_tokens)
        too_long = kept & (size > (options.max_document_tokens or np.inf))
        for rule, wrong in (("short_documents", too_short), ("long_documents", too_long)):
            lost = weights * wrong
            count(rule, lost, lost * number, lost * size)
        kept &= ~too_short & ~too_long
        sentence &= kept[owner]
        found = [run.part("hashes", start, stop)[kept], weights[kept], number[kept], lengths[sentence]]
        for name in names:
            if name == "tokens":
                tokens = run.part(name, *run.part("token_at", start, stop + 1)[[0, -1]].tolist())
                found.append(tokens if sentence.all() else tokens[np.repeat(sentence, lengths)])
            else:
                found.append(run.part(name, first, last)[sentence])
        return found


def count_lines(job: Job, runs: Sequence[Run], task: tuple[int, tuple[int, int]]) -> Run:
    """Counts the lines of the documents in a range of hashes; of distinct ones, if duplicates are dropped.

    Args:
      job: the inputs of every task.
      runs: all runs.
      task: the number of the task, and the range of the documents' hashes.

    Returns:
      A run of the lines' `hashes`, sorted, and their `counts`.
    """
    number, (low, high) = task
    every = replace(job.options, min_document_tokens=0, max_document_tokens=0)
    documents = Filter(every, np.zeros(0, np.uint64)).read(runs, low, high, "lines", "begins_line")
    begins = documents.arrays["begins_line"]
    copies = np.repeat(documents.copies, documents.sentences)
    distinct, total = _sum(documents.arrays["lines"][begins], copies[begins])
    return write_run(f"{job.work}/lines-{number:06d}", Counts(), {"hashes": distinct, "counts": total})


def frequent_lines(job: Job, counted: Sequence[Run], task: tuple[int, int]) -> np.ndarray:
    """Returns the hashes, uint64 and sorted, of lines in a range that occur more than `max_line_repeats` times."""
    ranges = [run.hash_range(*task) for run in counted]
    hashes, counts = (
        np.concatenate([run.part(name, *ends) for run, ends in zip(counted, ranges, strict=True)])
        for name in ("hashes", "counts")
    )
    distinct, total = _sum(hashes, counts)
    return distinct[total > job.options.max_line_repeats]


def _sum(hashes: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct hashes, sorted, and the sums of their counts."""
    distinct, which = np.unique(hashes, return_inverse=True)
    return distinct, np.bincount(which, counts, len(distinct)).astype(np.int64)
