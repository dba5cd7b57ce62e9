"""What of a corpus is left out: duplicates, boilerplate, and documents too short or too long. All by option."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bert_jax.data.runs import Run
from bert_jax.errors import InputError

_COUNTERS = 1 << 24


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


def repeated_lines(runs: Sequence[Run], most: int) -> np.ndarray:
    """The hashes, sorted, of the lines that stand in the runs more than `most` times.

    Two passes: many lines share a counter, and only those whose counter says that they may be frequent are counted.
    """
    counters = np.zeros(_COUNTERS, np.int64)
    for run in runs:
        counters += np.bincount(lines_of(run) % np.uint64(_COUNTERS), minlength=_COUNTERS)
    candidates = [np.zeros(0, np.uint64)]
    for run in runs:
        lines = lines_of(run)
        candidates.append(lines[counters[lines % np.uint64(_COUNTERS)] > most])
    hashes, counts = np.unique(np.concatenate(candidates), return_counts=True)
    return hashes[counts > most]


def lines_of(run: Run) -> np.ndarray:
    """The hash of each line of a run."""
    return np.asarray(run.array("lines"))[np.asarray(run.array("begins_line"))]
