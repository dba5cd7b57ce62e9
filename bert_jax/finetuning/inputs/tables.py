"""Lines and rows of a task's files, each with the number of its line; and files of predictions, whole or not at all."""

import codecs
import csv
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from typing import Any

from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic
from bert_jax.files.line_reader import lines_from
from bert_jax.finetuning.inputs.bad_rows import BadRows

_MOST_LINES = 1000
_CHECKED_LINES = 100


def text_lines(path: str, bad_rows: BadRows) -> Iterator[tuple[int, str]]:
    r"""(number from 1, text) of each line of a file, compressed or not, without its "\n" or "\r\n".

    Lines that are not UTF-8 are bad rows. Only "\n" ends a line: what else Unicode calls a line's end is text.

    Raises:
      InputError: the file cannot be read, or is UTF-16.
    """
    for number, (_, line) in enumerate(lines_from(path, 0, None), start=1):
        if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise InputError(f"{path}:1: expected UTF-8, got UTF-16; {conversion(path, 'UTF-16')}")
        try:
            yield number, line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            byte = line[error.start]
            bad_rows.add(path, number, f"not valid UTF-8 (byte 0x{byte:02x}); {conversion(path)}")


def conversion(path: str | PathLike[str], encoding: str = "LATIN1") -> str:
    """Returns the command that makes a file UTF-8, for a message."""
    return f"convert the file, as by: iconv -f {encoding} -t UTF-8 {path} > NEW_FILE"


def parse_json(text: str) -> Any:
    """Returns the value of a JSON text, all of whose strings UTF-8 can hold.

    ValueError that says what is wrong: not JSON, nested too deeply, or half of a surrogate pair as in "\\ud83d".
    """
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise ValueError(f"half of a surrogate pair (\\u{half:04x}), which is no character: remove it") from error
    except RecursionError as error:
        raise ValueError("not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    return value


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
            header = _header(path, number, cells)
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
            header = _header(path, number, cells)
        elif len(cells) != len(header):
            bad_rows.add(path, number, f"{len(cells)} columns instead of {len(header)}" if cells else "an empty line")
        else:
            yield number, dict(zip(header, cells, strict=True))


def _header(path: str, number: int, names: list[str]) -> list[str]:
    """InputError where line 1 is not the header or two columns have one name; columns without one are not read."""
    if number > 1:
        raise InputError(
            f"{path}:1: the first line, which names the columns, cannot be read: it has to be UTF-8 and well-formed; "
            f"{conversion(path)}"
        )
    if twice := next((name for name in names if name and names.count(name) > 1), None):
        raise InputError(f"{path}: two columns are called {twice!r}")
    return names


def json_rows(path: str, bad_rows: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line of a file of JSON lines; empty lines are skipped.

    InputError for a file that is one JSON array.
    """
    is_first = True
    for number, line in text_lines(path, bad_rows):
        if not line.strip():
            continue
        if is_first and line.lstrip().startswith("["):
            raise InputError(
                f"{path}:{number}: expected JSON lines, an object each, got a JSON array; write its elements as lines, "
                f"as by: jq -c '.[]' {path} > NEW_FILE.jsonl"
            )
        is_first = False
        try:
            value = parse_json(line)
        except ValueError as error:
            bad_rows.add(path, number, error)
            continue
        if isinstance(value, dict):
            yield number, value
        else:
            bad_rows.add(path, number, f"a JSON {type(value).__name__} instead of an object")


def columns_of(path: str, *, comma: bool = False) -> list[str]:
    """The names of a file's columns, as its first line has them.

    Raises:
      InputError: the file is empty or cannot be read, or its first line cannot.
    """
    for number, line in text_lines(path, BadRows(quiet=True)):
        try:
            return _header(path, number, next(csv.reader([line], strict=True)) if comma else line.split("\t"))
        except csv.Error as error:
            raise InputError(
                f"{path}:{number}: the header cannot be read: {error}; expected names between commas, and lines that "
                'end in "\\n"'
            ) from error
    raise InputError(f"{path}: an empty file; its first line has to name the columns")


def write_lines(path: str | PathLike[str], lines: Iterable[str]) -> None:
    """Writes a text file, whole or not at all; its folder is made where it is missing."""
    final = epath.Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_whole(final, "".join(f"{line}\n" for line in lines).encode())
