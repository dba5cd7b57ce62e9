"""What of a corpus is left out: duplicates, boilerplate, and documents too short or too long. All by option."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert_jax.data.preparation.sorted_runs import Run
from bert_jax.errors import InputError

LINE_PARTS = 256
"""The lines of a corpus are counted in so many parts, by the first byte of their hash: a part fits in memory."""

_COUNTED = np.dtype([("hash", "<u8"), ("count", "<u8")])


@dataclass(frozen=True)
class Hygiene:
    """The rules.

    Attributes:
      drop_duplicates: of documents with the same text one is kept.
      max_line_repeats: lines that stand in the corpus more often are dropped wherever they stand; 0: none are.
      min_document_tokens, max_document_tokens: documents outside are dropped; 0: there is no limit. Counted after
        lines were dropped, without special tokens.
    """

    drop_duplicates: bool = False
    max_line_repeats: int = 0
    min_document_tokens: int = 0
    max_document_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("max_line_repeats", "min_document_tokens", "max_document_tokens"):
            if getattr(self, name) < 0:
                raise InputError(f"--{name} is at least 0, not {getattr(self, name)}")
        if self.max_document_tokens and self.max_document_tokens < self.min_document_tokens:
            raise InputError(
                f"--max_document_tokens {self.max_document_tokens} is below --min_document_tokens "
                f"{self.min_document_tokens}: no document would be kept"
            )


def repeated_lines(runs: Sequence[Run], most: int, scratch: Path) -> np.ndarray:
    """Returns the hashes, uint64 and sorted, of the lines that occur in the runs more than `most` times.

    The lines are spread over LINE_PARTS files in a folder in `scratch`, and a part is counted at a time: 140 M lines
    take 2.2 GB there at most, and some 30 MB of memory.
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
            found.append(frequent(counted["hash"], counted["count"], most))
            path.unlink()
    return np.concatenate(found)


def counted_lines(run: Run) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(part, hashes uint64 [n], counts int64 [n]) of the distinct lines of a run, for each part that has any."""
    lines = np.asarray(run.array("lines"))[np.asarray(run.array("begins_line"))]
    hashes, counts = np.unique(lines, return_counts=True)
    parts, starts = np.unique(hashes >> np.uint64(56), return_index=True)
    stops = [*starts[1:].tolist(), len(hashes)]
    for part, start, stop in zip(parts.tolist(), starts.tolist(), stops, strict=True):
        yield part, hashes[start:stop], counts[start:stop]


def frequent(hashes: np.ndarray, counts: np.ndarray, most: int) -> np.ndarray:
    """Returns the distinct `hashes`, sorted, of which the `counts` come to more than `most`."""
    distinct, which = np.unique(hashes, return_inverse=True)
    return distinct[np.bincount(which, counts, minlength=len(distinct)) > most]
