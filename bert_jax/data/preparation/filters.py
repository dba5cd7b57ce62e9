"""Corpus filters, as `FilterOptions` has them: duplicate documents, repeated lines, and length limits of documents."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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


def hash_ranges(low: int, high: int, tokens: int, bucket_tokens: int) -> list[tuple[int, int]]:
    """Splits [low, high) into equal ranges of about `bucket_tokens` tokens each, as hashes are uniform."""
    if high <= low:
        return []
    parts = max(1, -(-tokens // bucket_tokens))
    bounds = [low + (high - low) * i // parts for i in range(parts + 1)]
    return list(itertools.pairwise(bounds))


class Documents(NamedTuple):
    """Distinct documents: their `hashes` and number of `copies` [n], and their sentences in the same order.

    `sentences` [n] is the number of each document's sentences, `lengths` the tokens of every sentence. `dropped` has
    counts by rule of `RULES`; copies of a document are counted.
    """

    hashes: np.ndarray
    copies: np.ndarray
    sentences: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    dropped: dict[str, Counts]


@dataclass(frozen=True)
class Filter:
    """Filters of documents: the `options`, and the sorted hashes of the `repeated` lines."""

    options: PrepareOptions
    repeated: np.ndarray

    def read(self, runs: Sequence[Run], low: int, high: int, *, tokens: bool = True) -> Documents:
        """Returns the filtered documents with hashes in [low, high), sorted by run and hash; no `tokens` if False.

        Memory is bounded by the distinct documents, and by one run.
        """
        ranges = [run.hash_range(low, high) for run in runs]
        hashes = np.concatenate([run.part("hashes", *ends) for run, ends in zip(runs, ranges, strict=True)])
        _, first, copies = np.unique(hashes, return_index=True, return_counts=True)
        kind = runs[0].layout["tokens"][0]
        parts = [(np.zeros(0, np.uint64), *(np.zeros(0, np.int64) for _ in range(3)), np.zeros(0, kind))]
        dropped: Counter[tuple[str, int]] = Counter()
        offset = 0
        for run, (start, stop) in zip(runs, ranges, strict=True):
            chosen = (first >= offset) & (first < offset + stop - start)
            if chosen.any():
                is_first = np.zeros(stop - start, bool)
                is_first[first[chosen] - offset] = True
                parts.append(self._read(run, start, stop, is_first, copies[chosen], dropped, tokens))
            offset += stop - start
        counts = {rule: Counts(*(dropped[rule, unit] for unit in range(3))) for rule in RULES}
        arrays = [np.concatenate(each) for each in zip(*parts, strict=True)]
        return Documents(arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], counts)

    def _read(
        self,
        run: Run,
        start: int,
        stop: int,
        kept: np.ndarray,
        copies: np.ndarray,
        dropped: Counter[tuple[str, int]],
        tokens: bool,
    ) -> tuple[np.ndarray, ...]:
        """Returns the arrays of `Documents` for the `kept` bool [n] ones at [start, stop) of a run."""

        def count(rule: str, *units: np.ndarray) -> None:
            for unit, number in enumerate(units):
                dropped[rule, unit] += int(number.sum())

        options = self.options
        sentence_at = run.part("sentence_at", start, stop + 1)
        first, last = sentence_at[[0, -1]].tolist()
        lengths = run.part("lengths", first, last)
        owner = np.repeat(np.arange(stop - start), np.diff(sentence_at))
        weights = np.zeros(stop - start, np.int64)
        weights[kept] = copies

        def sizes(sentence: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """Returns the numbers of chosen sentences and of their tokens, each int64 [n]."""
            totals = (np.bincount(owner[sentence], values, stop - start) for values in (None, lengths[sentence]))
            number, size = (total.astype(np.int64) for total in totals)
            return number, size

        if options.drop_duplicates:
            number, size = sizes(kept[owner])
            extra = np.maximum(weights - 1, 0)
            count("duplicate_documents", extra, extra * number, extra * size)
            weights = np.minimum(weights, 1)
        sentence = kept[owner]
        if len(self.repeated):
            is_repeated = sentence & np.isin(run.part("lines", first, last), self.repeated)
            number, size = sizes(is_repeated)
            count("repeated_lines", np.zeros(1, np.int64), weights * number, weights * size)
            sentence &= ~is_repeated
        number, size = sizes(sentence)
        too_short = kept & (size < max(1, options.min_document_tokens))  # also documents without any line left
        too_long = kept & (size > (options.max_document_tokens or np.inf))
        for rule, wrong in (("short_documents", too_short), ("long_documents", too_long)):
            lost = weights * wrong
            count(rule, lost, lost * number, lost * size)
        kept = kept & ~too_short & ~too_long
        sentence &= kept[owner]
        ids = run.part("tokens", 0, 0)
        if tokens:
            ids = run.part("tokens", *run.part("token_at", start, stop + 1)[[0, -1]].tolist())
            if not sentence.all():
                ids = ids[np.repeat(sentence, lengths)]
        return run.part("hashes", start, stop)[kept], weights[kept], number[kept], lengths[sentence], ids


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
    lines, counts = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    seen = np.zeros(0, np.uint64)
    for run in runs:
        start, stop = run.hash_range(low, high)
        if start == stop:
            continue
        hashes = run.part("hashes", start, stop)
        sentence_at = run.part("sentence_at", start, stop + 1)
        first, last = sentence_at[[0, -1]].tolist()
        chosen = run.part("begins_line", first, last)
        if job.options.drop_duplicates:
            is_new = ~np.isin(hashes, seen) & np.concatenate([[True], hashes[1:] != hashes[:-1]])
            chosen = chosen & np.repeat(is_new, np.diff(sentence_at))
            seen = np.union1d(seen, hashes)
        distinct, found = np.unique(run.part("lines", first, last)[chosen], return_counts=True)
        lines.append(distinct)
        counts.append(found)
    distinct, total = _sum(np.concatenate(lines), np.concatenate(counts))
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
