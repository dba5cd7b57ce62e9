"""Rows of a task's files that cannot be used: named by file and line, counted, and refused on request."""

import logging
from collections import Counter
from collections.abc import Mapping
from os import PathLike

from bert_jax.errors import InputError

log = logging.getLogger(__name__)

_NAMED = 5  # of each file, one by one

UNUSABLE = "unusable"
MISSING_LABEL = "missing_label"
UNKNOWN_LABEL = "unknown_label"
NO_GOLD_LABEL = "no_gold_label"


class BadLabel(ValueError):
    """A row that can be read, but not scored. `reason` is MISSING_LABEL, UNKNOWN_LABEL or NO_GOLD_LABEL."""

    def __init__(self, problem: str, reason: str):
        super().__init__(problem)
        self.reason = reason


class BadRows:
    """Collects the problems of rows; with `strict` the first one is an InputError."""

    def __init__(self, *, strict: bool = False, strict_labels: bool = False, quiet: bool = False):
        """Makes an empty collection.

        Args:
          strict: whether every bad row is an InputError.
          strict_labels: whether a missing or an unknown label is one.
          quiet: True for a look at a file that is read again: nothing is named, counted or refused.
        """
        self.counts: dict[str, int] = {}  # by file
        self._strict, self._quiet = strict, quiet
        self._refused = {MISSING_LABEL, UNKNOWN_LABEL} if strict_labels else set()
        self._reasons: Counter[str] = Counter()

    def add(self, path: str | PathLike[str], line: int | None, problem: str | Exception) -> None:
        """Adds a row that is left out. `line` is counted from 1; `problem` says what is wrong, a BadLabel also why.

        Where lines mean nothing, as in JSON, `line` is None and `problem` says where it is as well.
        """
        if self._quiet:
            return
        where = f"{path}: {problem}" if line is None else f"{path}:{line}: {problem}"
        where = where.encode("utf-8", "backslashreplace").decode()  # no log can hold half of a surrogate pair
        reason = problem.reason if isinstance(problem, BadLabel) else UNUSABLE
        if self._strict or reason in self._refused:
            raise InputError(where)
        self._reasons[reason] += 1
        count = self.counts[str(path)] = self.counts.get(str(path), 0) + 1
        if count <= _NAMED:
            log.warning("left out: %s", where)

    def take_reasons(self) -> Mapping[str, int]:
        """Returns how many rows were added since the last call, by reason: those of the split that was just read."""
        reasons, self._reasons = dict(self._reasons), Counter()
        return reasons

    def report(self) -> None:
        """Logs how many there were of each file."""
        for path, count in self.counts.items():
            if count > _NAMED:
                log.warning("left out of %s: %d rows in all", path, count)
