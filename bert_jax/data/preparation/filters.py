"""Counts the lines of a corpus to find those that occur too often: the filter `max_line_repeats`."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bert_jax.data.preparation.sorted_runs import Run

LINE_PARTS = 256
"""Number of parts in which lines are counted, by the first byte of their hash, so that a part fits in memory."""

_COUNTED = np.dtype([("hash", "<u8"), ("count", "<u8")])


def repeated_lines(runs: Sequence[Run], limit: int, scratch: Path) -> np.ndarray:
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


def counted_lines(run: Run) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
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
