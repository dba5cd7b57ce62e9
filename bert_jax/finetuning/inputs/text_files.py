"""The user's own text files for classification or regression: CSV, TSV or JSON lines with one or two texts and a label.

    .csv            a header line; quoted as in RFC 4180
    .tsv            a header line; no quoting
    .jsonl, .json   one object per line

Each may be compressed (.gz, .bz2, .xz, .zst).
"""

import dataclasses
import json
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from bert_jax.errors import InputError
from bert_jax.files.text_files import COMPRESSED
from bert_jax.finetuning.inputs.task_files import (
    MISSING_LABEL,
    UNKNOWN_LABEL,
    BadLabel,
    BadRows,
    csv_rows,
    json_rows,
    tsv_rows,
)
from bert_jax.text.sequences import TextExample

TEXT_FIELDS = (
    ("text",), ("text_a", "text_b"), ("sentence1", "sentence2"), ("premise", "hypothesis"),
    ("question1", "question2"), ("question", "sentence"), ("sentence",),
)  # fmt: skip
"""Default names of the text columns: the first of these that a file has."""

ID_FIELDS = ("id", "idx", "guid", "index")
"""Names of the column with a row's id: the first of these that has a value."""

_LISTED = 20  # maximum names in a message
_WHOLE = re.compile(r"(-?\d+)(\.0)?")

_FORMATS = {".csv": csv_rows, ".tsv": tsv_rows, ".jsonl": json_rows, ".json": json_rows}


@dataclass(frozen=True)
class TextFields:
    """The names of columns or keys.

    `texts` are one or two; if empty, the first of TEXT_FIELDS that is found. `id` is optional, see `row_id`.
    """

    texts: tuple[str, ...] = ()
    label: str = "label"
    id: str = "id"


def format_of(path: str | PathLike[str]) -> str:
    """Returns the extension of a file's name in lower case, ignoring that of its compression."""
    name = str(path).lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return name[name.rfind(".") :] if "." in name else ""


def row_id(row: Mapping[str, Any], name: str = "id") -> str:
    """Returns the value of the column `name`, else that of the first of ID_FIELDS with one; "" without any.

    A row without an id is known by its number from 1: the header is no row, a bad row is one.
    """
    found = (row.get(column) for column in (name, *ID_FIELDS))
    return next((str(value) for value in found if value not in (None, "")), "")


def find_fields(path: str | PathLike[str], fields: TextFields) -> TextFields:
    """Returns `fields` with empty `texts` replaced by the file's text columns, to read other files in the same way.

    A file without a row leaves `fields` unchanged. Raises InputError as `read_texts` does.
    """
    for line, row in _rows_of(path, BadRows(quiet=True)):
        texts = _choose_fields(f"{path}:{line}", row, fields, columns=False, labelled=False)
        return dataclasses.replace(fields, texts=texts)
    return fields


def read_texts(
    path: str | PathLike[str],
    bad_rows: BadRows,
    *,
    fields: TextFields = TextFields(),
    labels: Sequence[str] | None = None,
    regression: bool = False,
    labelled: bool = True,
) -> tuple[list[TextExample], tuple[str, ...]]:
    """Reads the examples of a file in its order, and the names of the classes.

    Args:
      path: a file in one of the formats above.
      bad_rows: collects rows that are malformed, lack a field, have an empty text, an unknown label, or, for a
        regression, a label that is not a finite number.
      fields: the names of the columns.
      labels: the classes in the order of their numbers; None takes those of the file, sorted (numerically if all are
        integers).
      regression: labels are scores.
      labelled: False for texts to predict: labels are ignored.

    Returns:
      The examples, and the classes: `labels` if given; empty for a regression or if `labelled` is False.

    Raises:
      InputError: unknown format, unreadable file, missing columns, or no usable row.
    """
    kind = format_of(path)
    found: list[tuple[int, str, list[str], Any]] = []  # line, id, texts, raw label
    names: tuple[str, ...] = ()
    for number, line, row in _numbered(_rows_of(path, bad_rows), path, bad_rows):
        if not names:
            names = _choose_fields(f"{path}:{line}", row, fields, columns=kind in (".csv", ".tsv"), labelled=labelled)
        try:
            texts = [_text(row, name) for name in names]
            label = _label(row, fields.label, regression=regression) if labelled else None
        except ValueError as error:
            bad_rows.add(path, line, error)
            continue
        found.append((line, row_id(row, fields.id) or str(number), texts, label))
    classified = labelled and not regression
    classes = _classes(found, labels) if classified else ()
    numbers = {name: number for number, name in enumerate(classes)}
    examples = []
    for line, identity, texts, given in found:
        value = given
        if classified and (value := numbers.get(_class_of(given, numbers))) is None:
            problem = f"unknown label {given!r:.60}; expected one of {_listed(classes)}"
            bad_rows.add(path, line, BadLabel(problem, UNKNOWN_LABEL))
            continue
        examples.append(TextExample(identity, texts[0], texts[1] if len(texts) > 1 else None, value))
    if not examples:
        required = [*(names or ("a text",)), *(["a label"] if labelled else [])]
        raise InputError(f"{path}: no usable row; a row requires {' and '.join(required)}")
    return examples, classes


def are_scores(labels: Iterable[str]) -> bool:
    """Returns True if labels are numbers and not all are integers."""
    try:
        numbers = [float(label) for label in labels]
    except ValueError:
        return False
    return not all(number.is_integer() for number in numbers)


def _rows_of(path: str | PathLike[str], bad_rows: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line, row) of a file in one of the formats."""
    if (kind := format_of(path)) not in _FORMATS:
        raise InputError(
            f"{path}: unknown format; expected a name ending in {', '.join(_FORMATS)}, compressed or not "
            f"({', '.join(COMPRESSED)})"
        )
    return _FORMATS[kind](str(path), bad_rows)


def _numbered(
    rows: Iterator[tuple[int, dict[str, Any]]], path: str | PathLike[str], bad_rows: BadRows
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yields (row number from 1, line, row). Malformed rows, which `rows` adds to `bad_rows`, are counted."""
    number, known = 0, bad_rows.counts.get(str(path), 0)
    for line, row in rows:
        number += 1 + bad_rows.counts.get(str(path), 0) - known
        yield number, line, row
        known = bad_rows.counts.get(str(path), 0)


def _listed(names: Iterable[str]) -> str:
    """Joins names, quoted to show spaces, and truncates a long list."""
    shown = [repr(name) for name in names]
    return ", ".join(shown if len(shown) <= _LISTED else [*shown[:_LISTED], f"... {len(shown)} in total"])


def _choose_fields(
    where: str, row: dict[str, Any], fields: TextFields, *, columns: bool, labelled: bool
) -> tuple[str, ...]:
    """Returns the names of the texts. In a file with columns, a missing one is an InputError."""
    available = _listed(row)
    if len(fields.texts) > 2:
        raise InputError(f"{', '.join(fields.texts)}: expected 1 or 2 text columns, got {len(fields.texts)}")
    names = fields.texts or next((names for names in TEXT_FIELDS if all(name in row for name in names)), ())
    if not names:
        raise InputError(f"{where}: text columns not found among {available}; name one or two")
    if columns:
        for name in (*names, *((fields.label,) if labelled else ())):
            if name not in row:
                raise InputError(f"{where}: missing column {name!r}; expected one of {available}")
    return names


def _text(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        raise ValueError(f"missing field {name!r}")
    if not isinstance(value, str):
        raise ValueError(f"{name!r} must be a string, got {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{name!r} is empty")
    return value


def _label(row: dict[str, Any], name: str, *, regression: bool) -> str | float:
    value = row.get(name)
    if value is None or value == "":
        raise BadLabel(f"missing label in {name!r}", MISSING_LABEL)
    if not isinstance(value, str | int | float):
        raise BadLabel(f"label must be a string or a number, got {type(value).__name__}", UNKNOWN_LABEL)
    if not regression:
        return value if isinstance(value, str) else json.dumps(value)
    try:
        score = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, OverflowError):  # a JSON number may have hundreds of digits
        score = math.nan
    if not math.isfinite(score):
        raise BadLabel(f"label {value!r:.60}: expected a finite number", UNKNOWN_LABEL)
    return score


def _class_of(label: str, classes: Container[str]) -> str:
    """Returns the class that is a label, or the same whole number: 1 and 1.0 are one class."""
    whole = _WHOLE.fullmatch(label)
    forms = (label, whole[1], f"{whole[1]}.0") if whole else (label,)
    return next((form for form in forms if form in classes), label)


def _classes(found: list[tuple[int, str, list[str], Any]], labels: Sequence[str] | None) -> tuple[str, ...]:
    if labels is not None:
        return tuple(labels)
    names = {label for *_, label in found}
    names -= {name for name in names if name.endswith(".0") and _WHOLE.fullmatch(name) and name[:-2] in names}
    try:
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    except ValueError:
        return tuple(sorted(names))
