"""Lines and rows of a task's files, each with the number of its line; and files of predictions, whole or not at all."""

import csv
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from typing import Any

from etils import epath

from bert_jax import whole_files
from bert_jax.data.file_lines import lines_from
from bert_jax.errors import InputError
from bert_jax.finetuning.bad_rows import BadRows

_MOST_LINES = 1000
_CHECKED_LINES = 100


def text_lines(path: str, bad_rows: BadRows) -> Iterator[tuple[int, str]]:
    r"""(number from 1, text) of each line of a file, compressed or not, without its "\n" or "\r\n".

    Lines that are not UTF-8 are bad rows. Only "\n" ends a line: what else Unicode calls a line's end is text.

    Raises:
      InputError: the file cannot be read.
    """
    for number, (_, line) in enumerate(lines_from(path, 0, None), start=1):
        try:
            yield number, line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            bad_rows.add(path, number, f"not valid UTF-8 (byte 0x{line[error.start]:02x})")


def tsv_rows(path: str, bad_rows: BadRows, header: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, value by column) of each row of tab-separated values, in which a quote is a character like others.

    Args:
      path: the file; its first line names the columns unless `header` does.
      bad_rows: gets the rows with another number of columns than the header.
      header: the names of the columns of a file whose first line is a row like others.
    """
    for number, line in text_lines(path, bad_rows):
        cells = line.split("\t")
        if header is None:
            header = _header(path, cells)
        elif cells == [""]:
            bad_rows.add(path, number, "an empty line")
        elif len(cells) != len(header):
            bad_rows.add(path, number, f"{len(cells)} columns instead of {len(header)}")
        else:
            yield number, dict(zip(header, cells, strict=True))


def csv_rows(path: str, bad_rows: BadRows) -> Iterator[tuple[int, dict[str, str]]]:
    """As `tsv_rows` of comma-separated values, quoted as in RFC 4180; a row is named by the line that it begins on.

    Where a row is not as it should be, its first line is a bad row, and the next line begins another one: a quote that
    nothing closes takes no more than its line. A row that has more columns than the header after `_CHECKED_LINES`
    lines, or more than `_MOST_LINES` lines, is such a row: else every line would be read to the end of the file.
    """
    source = text_lines(path, bad_rows)
    again: deque[tuple[int, str]] = deque()  # lines to be read once more
    taken: list[tuple[int, str]] = []  # the lines of the row that is being read

    def lines() -> Iterator[str]:
        while (now := again.popleft() if again else next(source, None)) is not None:
            taken.append(now)
            if len(taken) > _MOST_LINES or len(taken) % _CHECKED_LINES == 0:
                check()
            yield f"{now[1]}\n"

    def check() -> None:
        """Raises csv.Error where no further line can make a row of the lines that were taken."""
        if len(taken) > _MOST_LINES:
            raise csv.Error(f"a row of more than {_MOST_LINES} lines; is a quote missing?")
        columns = len(next(csv.reader(f"{line}\n" for _, line in taken), []))
        if header is not None and columns > len(header):
            raise csv.Error(f"{columns} columns instead of {len(header)} after {len(taken)} lines; is a quote missing?")

    header: list[str] | None = None
    reader = csv.reader(lines(), strict=True)
    while True:
        taken.clear()
        try:
            cells = next(reader, None)
        except csv.Error as error:
            bad_rows.add(path, taken[0][0], f"not as RFC 4180 has it: {error}")
            again.extendleft(reversed(taken[1:]))
            reader = csv.reader(lines(), strict=True)
            continue
        if cells is None:
            return
        number = taken[0][0]
        if header is None:
            header = _header(path, cells)
        elif len(cells) != len(header):
            bad_rows.add(path, number, f"{len(cells)} columns instead of {len(header)}" if cells else "an empty line")
        else:
            yield number, dict(zip(header, cells, strict=True))


def _header(path: str, names: list[str]) -> list[str]:
    """InputError where two columns have the same name; columns without one are not read."""
    if twice := next((name for name in names if name and names.count(name) > 1), None):
        raise InputError(f"{path}: two columns are called {twice!r}")
    return names


def json_rows(path: str, bad_rows: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line of a file of JSON lines; empty lines are skipped."""
    for number, line in text_lines(path, bad_rows):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            bad_rows.add(path, number, f"not JSON: {error}")
            continue
        if isinstance(value, dict):
            yield number, value
        else:
            bad_rows.add(path, number, f"a JSON {type(value).__name__} instead of an object")


def columns_of(path: str, bad_rows: BadRows, *, comma: bool = False) -> list[str]:
    """The names of a file's columns, as its first line has them.

    Raises:
      InputError: the file is empty or cannot be read.
    """
    for _, line in text_lines(path, bad_rows):
        return next(csv.reader([line])) if comma else line.split("\t")
    raise InputError(f"{path}: an empty file; its first line has to name the columns")


def write_lines(path: str | PathLike[str], lines: Iterable[str]) -> None:
    """Writes a text file, whole or not at all; its folder is made where it is missing."""
    final = epath.Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    whole_files.write_whole(final, "".join(f"{line}\n" for line in lines).encode())
