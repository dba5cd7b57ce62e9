"""Files of predictions: JSON lines, or a table with a header line if the name ends in .csv or .tsv.

A table has the keys of the JSON objects as columns: an object or a list of numbers becomes a column per entry
(`probabilities` becomes `probability_LABEL`), and a list of words is joined by spaces. CSV is quoted as in RFC 4180;
TSV is not quoted, and has a space for each tab or line break in a text. Both are read again as files of texts.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

_SINGULAR = {"probabilities": "probability"}
_TSV_SPACES = str.maketrans("\t\r\n", "   ")


def write_predictions(file: IO[bytes], name: str, predictions: Sequence[Mapping[str, Any]]) -> None:
    """Writes predictions, JSON objects with equal keys, in the format of the file's name."""
    ending = name.lower().rpartition(".")[2]
    if ending not in ("csv", "tsv"):
        for prediction in predictions:
            file.write((json.dumps(prediction, ensure_ascii=False) + "\n").encode())
        return
    rows = [_cells(prediction) for prediction in predictions]
    header = list(dict.fromkeys(column for row in rows for column in row))
    lines = [header, *([row.get(column, "") for column in header] for row in rows)]
    file.write((_csv(lines) if ending == "csv" else _tsv(lines)).encode())


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


def _csv(lines: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def _tsv(lines: Iterable[Sequence[str]]) -> str:
    return "".join("\t".join(cell.translate(_TSV_SPACES) for cell in line) + "\n" for line in lines)
