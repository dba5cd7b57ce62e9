"""Classification or regression of one's own texts: CSV, TSV or JSON lines with a text or two, and a label.

    .csv            a header line; quoted as in RFC 4180
    .tsv            a header line; a quote is a character like others
    .jsonl, .json   one object a line

each also as .gz, .bz2 or .zst.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from bert_jax.errors import InputError
from bert_jax.files.line_reader import COMPRESSED
from bert_jax.finetuning.inputs.bad_rows import MISSING_LABEL, UNKNOWN_LABEL, BadLabel, BadRows
from bert_jax.finetuning.inputs.tables import csv_rows, json_rows, tsv_rows, write_lines
from bert_jax.text.examples import TextExample

TEXT_FIELDS = (
    ("text",), ("text_a", "text_b"), ("sentence1", "sentence2"), ("premise", "hypothesis"),
    ("question1", "question2"), ("question", "sentence"), ("sentence",),
)  # fmt: skip
"""What texts are called where nobody says: the first of these that a file has."""

_LISTED = 20  # names in a message

_FORMATS = {".csv": csv_rows, ".tsv": tsv_rows, ".jsonl": json_rows, ".json": json_rows}


@dataclass(frozen=True)
class TextFields:
    """The names of columns or keys.

    `texts` are one or two; where there is none, the first of TEXT_FIELDS that is found. `id` need not be there: the
    number of the line, from 1, stands in for it.
    """

    texts: tuple[str, ...] = ()
    label: str = "label"
    id: str = "id"


def format_of(path: str | PathLike[str]) -> str:
    """The ending of a file's name, in lower case, without that of its compression."""
    name = str(path).lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return name[name.rfind(".") :] if "." in name else ""


def find_fields(path: str | PathLike[str], fields: TextFields) -> TextFields:
    """`fields` with the texts that a file has where they name none, for other files of the same kind.

    Raises InputError as `read_texts` does; of a file without a row it tells nothing.
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
    """The examples of a file in its order, and the names of the classes.

    Args:
      path: a file in one of the formats above.
      bad_rows: gets rows that are not of the format, lack a field, have an empty text, an unknown label, or, for a
        regression, a label that is not a finite number.
      fields: what the columns are called.
      labels: the classes, in the order of their numbers; where None, those of the file, sorted (as numbers where all
        of them are).
      regression: whether labels are scores.
      labelled: False for texts to be predicted: a label is not looked at.

    Returns:
      The examples, and the classes: `labels` where given, and none for a regression or where `labelled` is False.

    Raises:
      InputError: an unknown format, a file that cannot be read, no such columns in it, or no usable row.
    """
    kind = format_of(path)
    found: list[tuple[int, str, list[str], Any]] = []  # line, id, texts, label as it is written
    names: tuple[str, ...] = ()
    for line, row in _rows_of(path, bad_rows):
        if not names:
            names = _choose_fields(f"{path}:{line}", row, fields, columns=kind in (".csv", ".tsv"), labelled=labelled)
        try:
            texts = [_text(row, name) for name in names]
            label = _label(row, fields.label, regression=regression) if labelled else None
        except ValueError as error:
            bad_rows.add(path, line, error)
            continue
        identity = row.get(fields.id)
        found.append((line, str(line if identity in (None, "") else identity), texts, label))
    classified = labelled and not regression
    classes = _classes(found, labels) if classified else ()
    numbers = {name: number for number, name in enumerate(classes)}
    examples = []
    for line, identity, texts, label in found:
        if classified and label not in numbers:
            problem = f"unknown label {label!r:.60}; there are: {_listed(classes)}"
            bad_rows.add(path, line, BadLabel(problem, UNKNOWN_LABEL))
            continue
        value = numbers[label] if classified else label
        examples.append(TextExample(identity, texts[0], texts[1] if len(texts) > 1 else None, value))
    if not examples:
        wanted = [*(names or ("a text",)), *(["a label"] if labelled else [])]
        raise InputError(f"{path}: no usable row; rows need {' and '.join(wanted)}")
    return examples, classes


def write_predictions(path: str | PathLike[str], ids: Iterable[str], predictions: Iterable[object]) -> None:
    """Writes `id TAB prediction` lines under a header; predictions are names of classes, or scores."""
    rows = (f"{identity}\t{prediction}" for identity, prediction in zip(ids, predictions, strict=True))
    write_lines(path, ["id\tprediction", *rows])


def are_scores(labels: Iterable[str]) -> bool:
    """Whether labels are numbers that are not all whole."""
    try:
        numbers = [float(label) for label in labels]
    except ValueError:
        return False
    return not all(number.is_integer() for number in numbers)


def _rows_of(path: str | PathLike[str], bad_rows: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, row) of a file in one of the formats."""
    if (kind := format_of(path)) not in _FORMATS:
        raise InputError(f"{path}: the name has to end in {', '.join(_FORMATS)}, or in that and .gz, .bz2 or .zst")
    return _FORMATS[kind](str(path), bad_rows)


def _listed(names: Iterable[str]) -> str:
    """In quotes, which show spaces, and not all of many."""
    shown = [repr(name) for name in names]
    return ", ".join(shown if len(shown) <= _LISTED else [*shown[:_LISTED], f"... {len(shown)} in all"])


def _choose_fields(
    where: str, row: dict[str, Any], fields: TextFields, *, columns: bool, labelled: bool
) -> tuple[str, ...]:
    """The names of the texts; where all rows have the same columns, what is missing is an error at once."""
    there = _listed(row)
    if len(fields.texts) > 2:
        raise InputError(f"{', '.join(fields.texts)}: the model reads one text or two, not {len(fields.texts)}")
    names = fields.texts or next((names for names in TEXT_FIELDS if all(name in row for name in names)), ())
    if not names:
        raise InputError(f"{where}: which of {there} are texts? Name the one or the two that are")
    if columns:
        for name in (*names, *((fields.label,) if labelled else ())):
            if name not in row:
                raise InputError(f"{where}: no column {name!r}; there are: {there}")
    return names


def _text(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        raise ValueError(f"no field {name!r}")
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is a {type(value).__name__} instead of a text")
    if not value.strip():
        raise ValueError(f"{name!r} is empty")
    return value


def _label(row: dict[str, Any], name: str, *, regression: bool) -> str | float:
    value = row.get(name)
    if value is None or value == "":
        raise BadLabel(f"no label in {name!r}", MISSING_LABEL)
    if not isinstance(value, str | int | float):
        raise BadLabel(f"the label is a {type(value).__name__} instead of a text or a number", UNKNOWN_LABEL)
    if not regression:
        return value if isinstance(value, str) else json.dumps(value)
    try:
        score = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, OverflowError):  # a JSON number may have hundreds of digits
        score = math.nan
    if not math.isfinite(score):
        raise BadLabel(f"the label {value!r:.60} is no finite number", UNKNOWN_LABEL)
    return score


def _classes(found: list[tuple[int, str, list[str], Any]], labels: Sequence[str] | None) -> tuple[str, ...]:
    if labels is not None:
        return tuple(labels)
    names = {label for *_, label in found}
    try:
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    except ValueError:
        return tuple(sorted(names))
