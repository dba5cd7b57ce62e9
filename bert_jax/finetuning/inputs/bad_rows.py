"""Bad rows of a task's files: logged with file and line, counted, skipped, or refused on request."""

import logging
from collections import Counter
from collections.abc import Mapping
from os import PathLike

from bert_jax.errors import InputError

log = logging.getLogger(__name__)

_LOGGED = 5  # rows of each file that are logged one by one

UNUSABLE = "unusable"
MISSING_LABEL = "missing_label"
UNKNOWN_LABEL = "unknown_label"
NO_GOLD_LABEL = "no_gold_label"


class BadLabel(ValueError):
    """A row without a usable label. `reason` is MISSING_LABEL, UNKNOWN_LABEL or NO_GOLD_LABEL."""

    def __init__(self, problem: str, reason: str):
        super().__init__(problem)
        self.reason = reason


class BadRows:
    """Collects bad rows; with `strict` the first one is an InputError."""

    def __init__(self, *, strict: bool = False, strict_labels: bool = False, quiet: bool = False):
        """Creates an empty collection.

        Args:
          strict: raise InputError for any bad row.
          strict_labels: raise InputError for a missing or unknown label.
          quiet: log, count and refuse nothing; for inspecting a file that is read again later.
        """
        self.counts: dict[str, int] = {}  # by file
        self._strict, self._quiet = strict, quiet
        self._refused = {MISSING_LABEL, UNKNOWN_LABEL} if strict_labels else set()
        self._reasons: Counter[str] = Counter()

    def add(self, path: str | PathLike[str], line: int | None, problem: str | Exception) -> None:
        """Adds a skipped row. `line` is numbered from 1; `problem` is the message, or a BadLabel with its reason.

        For formats without meaningful lines, such as JSON, `line` is None and `problem` includes the position.
        """
        if self._quiet:
            return
        where = f"{path}: {problem}" if line is None else f"{path}:{line}: {problem}"
        where = where.encode("utf-8", "backslashreplace").decode()  # a lone surrogate cannot be logged
        reason = problem.reason if isinstance(problem, BadLabel) else UNUSABLE
        if self._strict or reason in self._refused:
            raise InputError(where)
        self._reasons[reason] += 1
        count = self.counts[str(path)] = self.counts.get(str(path), 0) + 1
        if count <= _LOGGED:
            log.warning("Skipped a bad row: %s", where)

    def take_reasons(self) -> Mapping[str, int]:
        """Returns the number of rows added since the last call, by reason: those of the split that was just read."""
        reasons, self._reasons = dict(self._reasons), Counter()
        return reasons

    def report(self) -> None:
        """Logs the number of skipped rows of each file."""
        for path, count in self.counts.items():
            if count > _LOGGED:
                log.warning("Skipped %d bad rows of %s in total", count, path)
