"""Rows of a task's files, the bad ones counted; and the files of predictions.

A row is used whole or skipped. A skipped one keeps its number, counts by reason, and is logged with its place.
"""

import csv
import io
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic
from bert_jax.files.tables import BadRow, read_table

log = logging.getLogger(__name__)

_LOGGED = 5  # rows of each file that are logged one by one

UNUSABLE = "unusable"
MISSING_LABEL = "missing_label"
UNKNOWN_LABEL = "unknown_label"
NO_GOLD_LABEL = "no_gold_label"

ID_FIELDS = ("id", "idx", "guid", "index")
"""Names of the column with a row's id: the first of these that has a value."""

Row = tuple[int, int | str, dict[str, Any]]
"""(number of the row from 1, its place in the file, value by column)."""


# --- Bad rows ---------------------------------------------------------------------------------------------------------


class BadLabel(ValueError):
    """A row without a usable label. `reason` is MISSING_LABEL, UNKNOWN_LABEL or NO_GOLD_LABEL."""

    def __init__(self, problem: str, reason: str):
        super().__init__(problem)
        self.reason = reason


class BadRows:
    """Collects bad rows; with `strict` the first one is an InputError."""

    def __init__(self, *, strict: bool = False, strict_labels: bool = False):
        """Creates an empty collection.

        Args:
          strict: raise InputError for any bad row.
          strict_labels: raise InputError for a missing or unknown label.
        """
        self.counts: Counter[str] = Counter()  # by file
        self._first: dict[str, str] = {}
        self._strict = strict
        self._refused = {MISSING_LABEL, UNKNOWN_LABEL} if strict_labels else set()
        self._reasons: Counter[str] = Counter()

    def add(self, path: str | PathLike[str], place: int | str, problem: str | Exception) -> None:
        """Adds a skipped row. `place` is its line, from 1, or text such as "row 3"."""
        where = describe(path, place, problem)
        reason = problem.reason if isinstance(problem, BadLabel) else UNUSABLE
        if self._strict or reason in self._refused:
            raise InputError(where)
        self._reasons[reason] += 1
        self.counts[str(path)] += 1
        self._first.setdefault(str(path), where)
        if self.counts[str(path)] <= _LOGGED:
            log.warning("Skipped a bad row: %s", where)

    def warn_of_labels(self, path: str | PathLike[str], problem: str) -> None:
        """Logs a problem with labels of rows that are used, "" for none; raises it with `strict_labels`."""
        if problem and self._refused:
            raise InputError(f"{path}: {problem}")
        if problem:
            log.warning("%s: %s", path, problem)

    def check_usable(self, path: str | PathLike[str], examples: Sequence[Any], expected: str) -> None:
        """Raises InputError, with the first bad row, for a file without an example."""
        if not examples:
            first = self._first.get(str(path))
            raise InputError(f"{path}: no usable row; expected {expected}" + (f"; the first: {first}" if first else ""))

    def take_reasons(self) -> Mapping[str, int]:
        """Returns the number of rows added since the last call, by reason: those of the split that was just read."""
        reasons, self._reasons = dict(self._reasons), Counter()
        return reasons

    def report(self) -> None:
        """Logs the number of skipped rows of each file."""
        for path, count in self.counts.items():
            if count > _LOGGED:
                log.warning("Skipped %d bad rows of %s in total", count, path)


def describe(path: str | PathLike[str], place: int | str, problem: object) -> str:
    """Returns a message with the place of its problem, without half surrogate pairs, which cannot be logged."""
    where = f"{path}:{place}: {problem}" if isinstance(place, int) else f"{path}: {place}: {problem}"
    return where.encode("utf-8", "backslashreplace").decode()


# --- Rows -------------------------------------------------------------------------------------------------------------


def read_rows(
    path: str | PathLike[str], bad_rows: BadRows, names: Sequence[str] = (), *, kind: str = ""
) -> Iterator[Row]:
    """Yields the rows of a file. Takes the arguments of `read_table` and raises as it does."""
    for number, (place, row) in enumerate(read_table(str(path), names, kind=kind), 1):
        if isinstance(row, BadRow):
            bad_rows.add(path, place, row.problem)
        else:
            yield number, place, row


def row_id(row: Mapping[str, Any], number: int, name: str = "id") -> str:
    """Returns the value of the column `name`, else that of the first of ID_FIELDS with one, else the row's number."""
    found = (row.get(column) for column in (name, *ID_FIELDS))
    return next((str(value) for value in found if value not in (None, "")), str(number))


def text_in(row: Mapping[str, Any], name: str, *, may_be_empty: bool = False) -> str:
    """Returns the text in a column. Raises ValueError for a missing or an empty one, and for another type."""
    value = row.get(name)
    if value is None:
        raise ValueError(f"missing field {name!r}")
    if not isinstance(value, str):
        raise ValueError(f"{name!r} must be a string, got {type(value).__name__}")
    if not may_be_empty and not value.strip():
        raise ValueError(f"{name!r} is empty")
    return value


# --- Predictions ------------------------------------------------------------------------------------------------------

_SINGULAR = {"probabilities": "probability"}
_TSV_SPACES = str.maketrans("\t\r\n", "   ")


def format_predictions(name: str, predictions: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns the file of predictions, JSON objects with equal keys: JSON lines, or a table with a header line.

    It is a table if the name ends in .csv or .tsv. A table has the keys as columns: an object or a list of numbers
    becomes a column per entry (`probabilities` becomes `probability_LABEL`), and a list of words is joined by spaces.
    CSV is quoted as in RFC 4180; TSV is not quoted, and has a space for each tab or line break in a text. `read_table`
    reads all of them.
    """
    ending = name.lower().rpartition(".")[2]
    if ending not in ("csv", "tsv"):
        return "".join(json.dumps(prediction, ensure_ascii=False) + "\n" for prediction in predictions).encode()
    rows = [_cells(prediction) for prediction in predictions]
    header = list(dict.fromkeys(column for row in rows for column in row))
    line = _csv_line if ending == "csv" else _tsv_line
    return "".join(map(line, [header, *([row.get(column, "") for column in header] for row in rows)])).encode()


def _cells(prediction: Mapping[str, Any]) -> dict[str, str]:
    cells: dict[str, str] = {}
    for key, value in prediction.items():
        if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
            cells[key] = " ".join(value)
        elif isinstance(value, list | Mapping):
            entries = value.items() if isinstance(value, Mapping) else enumerate(value)
            cells |= {f"{_SINGULAR.get(key, key)}_{name}": _text(entry) for name, entry in entries}
        else:
            cells[key] = _text(value)
    return cells


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def _csv_line(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(cells)  # which quotes a lone "\r" as well
    return text.getvalue().removesuffix("\r\n") + "\n"


def _tsv_line(cells: Sequence[str]) -> str:
    return "\t".join(cell.translate(_TSV_SPACES) for cell in cells) + "\n"


def write_lines(path: str | PathLike[str], lines: Iterable[str]) -> None:
    """Writes a text file atomically, and creates its folder if missing."""
    final = epath.Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_whole(final, "".join(f"{line}\n" for line in lines).encode())
