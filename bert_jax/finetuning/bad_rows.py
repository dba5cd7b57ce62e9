"""Rows of a task's files that cannot be used: named by file and line, counted, and refused on request."""

import logging
from os import PathLike

from bert_jax.errors import InputError

log = logging.getLogger(__name__)

_NAMED = 5  # of each file, one by one


class BadRows:
    """Collects what is wrong with rows; with `strict` the first one is an InputError."""

    def __init__(self, *, strict: bool = False):
        self.counts: dict[str, int] = {}  # by file
        self._strict = strict

    def add(self, path: str | PathLike[str], line: int | None, problem: str) -> None:
        """A row that is left out. `line` is counted from 1; `problem` says what is wrong with it.

        Where lines mean nothing, as in JSON, `line` is None and `problem` says where it is as well.
        """
        where = f"{path}: {problem}" if line is None else f"{path}:{line}: {problem}"
        if self._strict:
            raise InputError(where)
        count = self.counts[str(path)] = self.counts.get(str(path), 0) + 1
        if count <= _NAMED:
            log.warning("left out: %s", where)

    def report(self) -> None:
        """Logs how many there were of each file."""
        for path, count in self.counts.items():
            if count > _NAMED:
                log.warning("left out of %s: %d rows in all", path, count)
