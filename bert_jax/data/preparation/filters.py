"""Corpus filters, as `FilterOptions` has them: repeated lines, duplicate documents, and length limits of documents."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bert_jax.data.preparation.options import FilterOptions
from bert_jax.data.preparation.sorted_runs import SortedRun

LINE_PARTS = 256
"""Number of parts in which lines are counted, by the first byte of their hash, so that a part fits in memory."""

_COUNTED = np.dtype([("hash", "<u8"), ("count", "<u8")])


def repeated_lines(runs: Sequence[SortedRun], limit: int, scratch: Path) -> np.ndarray:
    """Returns the hashes, uint64 and sorted, of the lines that occur in the runs more than `limit` times.

    The hashes are partitioned into LINE_PARTS files in a folder in `scratch`, and counted one part at a time: 140 M
    lines need at most 2.2 GB of disk and some 30 MB of memory.
    """
    with tempfile.TemporaryDirectory(dir=scratch, prefix="lines-") as folder:
        paths = [Path(folder) / str(part) for part in range(LINE_PARTS)]
        with ExitStack() as stack:
            files = [stack.enter_context(open(path, "wb")) for path in paths]
            for run in runs:
                for part, hashes, counts in counted_lines(run):
                    counted = np.empty(len(hashes), _COUNTED)
                    counted["hash"], counted["count"] = hashes, counts
                    files[part].write(counted.tobytes())
        found = [np.zeros(0, np.uint64)]
        for path in paths:
            counted = np.fromfile(path, _COUNTED)
            found.append(frequent(counted["hash"], counted["count"], limit))
            path.unlink()
    return np.concatenate(found)


def counted_lines(run: SortedRun) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yields (part, hashes uint64 [n], counts int64 [n]) of the distinct lines of a run, for each part that has any."""
    lines = np.asarray(run.array("lines"))[np.asarray(run.array("begins_line"))]
    hashes, counts = np.unique(lines, return_counts=True)
    parts, starts = np.unique(hashes >> np.uint64(56), return_index=True)
    stops = [*starts[1:].tolist(), len(hashes)]
    for part, start, stop in zip(parts.tolist(), starts.tolist(), stops, strict=True):
        yield part, hashes[start:stop], counts[start:stop]


def frequent(hashes: np.ndarray, counts: np.ndarray, limit: int) -> np.ndarray:
    """Returns the distinct `hashes`, sorted, whose `counts` sum to more than `limit`."""
    distinct, which = np.unique(hashes, return_inverse=True)
    return distinct[np.bincount(which, counts, minlength=len(distinct)) > limit]


def filter_documents(
    order: np.ndarray, hashes: np.ndarray, documents: list[list[int]], options: FilterOptions, dropped: dict[str, int]
) -> np.ndarray:
    """Filters the documents in `order` and adds the counts of dropped ones to `dropped`."""
    if options.drop_duplicates:
        is_first = np.concatenate([[True], np.diff(hashes[order]) > 0])[: len(order)]
        dropped["duplicate_documents"] = int((~is_first).sum())
        order = order[is_first]
    sizes = np.array([documents[i][-1] - documents[i][0] for i in order.tolist()], np.int64)
    too_short = sizes < max(1, options.min_document_tokens)  # also documents without any line left
    too_long = sizes > (options.max_document_tokens or np.inf)
    dropped["short_documents"], dropped["long_documents"] = int(too_short.sum()), int(too_long.sum())
    return order[~(too_short | too_long)]
