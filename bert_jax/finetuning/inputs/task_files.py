"""Files of a task: finding them, reading their lines and rows, counting bad rows, and writing predictions."""

import codecs
import csv
import json
import logging
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

from etils import epath

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.files.text_files import lines_from

log = logging.getLogger(__name__)

_LOGGED = 5  # rows of each file that are logged one by one
_MAX_LINES = 20_000
_CHECKED_LINES = 100
csv.field_size_limit(max(csv.field_size_limit(), 1 << 26))  # characters; the default is some 40 pages

UNUSABLE = "unusable"
MISSING_LABEL = "missing_label"
UNKNOWN_LABEL = "unknown_label"
NO_GOLD_LABEL = "no_gold_label"


# --- Finding ----------------------------------------------------------------------------------------------------------


def split_files(config: FinetuneConfig, usual: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the path of each split found; `train` is required.

    Args:
      config: a run's config; `task.train`, `task.dev` and `task.test` name files, in `data.path` if relative.
      usual: file names of each split in downloads; the first that exists is used.

    Raises:
      InputError: training file not found.
    """
    found: dict[str, str] = {}
    for split, names in usual.items():
        if given := getattr(config.task, split):
            found[split] = os.path.join(config.data.path, given)
        else:
            found |= usual_files(config.data.path, {split: names})
    if "train" not in found:
        raise InputError(
            f"data.path={config.data.path}: found none of {', '.join(usual['train'])}; set the training file with "
            "--config.task.train=FILE"
        )
    return found


def usual_files(folder: str, usual: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the paths of a folder's splits, found by their usual names; the first name that exists is used."""
    found: dict[str, str] = {}
    for split, names in usual.items():
        paths = [os.path.join(folder, name) for name in names]
        if path := next((path for path in paths if remote.exists(remote.parse_path(path))), None):
            found[split] = path
    return found


# --- Bad rows ---------------------------------------------------------------------------------------------------------


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


# --- Lines and rows ---------------------------------------------------------------------------------------------------


def text_lines(path: str, bad_rows: BadRows) -> Iterator[tuple[int, str]]:
    r"""Yields (number from 1, text) of each line of a file, compressed or not, without its "\n" or "\r\n".

    Lines that are not UTF-8 are bad rows. Only "\n" ends a line; Unicode's other line separators are text.

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
    """Returns the command that converts a file to UTF-8, for a message."""
    return f"convert the file, e.g. with: iconv -f {encoding} -t UTF-8 {path} > NEW_FILE"


def parse_json(text: str) -> Any:
    """Parses JSON whose strings are all valid UTF-8.

    Raises ValueError: not JSON, nested too deeply, or a lone surrogate such as "\\ud83d".
    """
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise ValueError(f"lone surrogate (\\u{half:04x}), which is not a character; remove it") from error
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    return value


def tsv_rows(path: str, bad_rows: BadRows, header: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields (line number, value by column) of each row of tab-separated values, without quoting.

    Args:
      path: the file; its first line is the header unless `header` is given.
      bad_rows: collects rows whose number of columns differs from the header's.
      header: the column names of a file without a header line.
    """
    for number, line in text_lines(path, bad_rows):
        cells = line.split("\t")
        if header is None:
            header = _header(path, number, cells)
        elif cells == [""]:
            bad_rows.add(path, number, f"expected {len(header)} columns, got an empty line")
        elif len(cells) != len(header):
            bad_rows.add(path, number, f"expected {len(header)} columns, got {len(cells)}")
        else:
            yield number, dict(zip(header, cells, strict=True))


def csv_rows(path: str, bad_rows: BadRows) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields (number of the first line, value by column) of each row of comma-separated values (RFC 4180).

    If a row is malformed, only its first line is a bad row and the next line begins a new row, so that an unclosed
    quote costs one line. A row is also malformed if it has more columns than the header after `_CHECKED_LINES` lines,
    twice as many, and so on, or more than `_MAX_LINES` lines. Without these limits every line could be read to the end
    of the file.

    Raises InputError for a row of more than `_CHECKED_LINES` lines that are rows themselves: either a quote is not
    closed, or a text looks like rows.
    """
    source = text_lines(path, bad_rows)
    pending: deque[tuple[int, str]] = deque()  # lines to read a second time
    taken: list[tuple[int, str]] = []  # the lines of the current row

    def lines() -> Iterator[str]:
        while (now := pending.popleft() if pending else next(source, None)) is not None:
            taken.append(now)
            hundreds, rest = divmod(len(taken), _CHECKED_LINES)
            if len(taken) > _MAX_LINES or (rest == 0 and hundreds.bit_count() == 1):
                check()
            yield f"{now[1]}\n"

    def check() -> None:
        """Raises csv.Error if no further line can complete the current row."""
        if len(taken) > _MAX_LINES:
            raise csv.Error(f"a row of more than {_MAX_LINES} lines; add the missing closing quote")
        columns = len(next(csv.reader(f"{line}\n" for _, line in taken), []))
        if header is not None and columns > len(header):
            raise csv.Error(
                f"expected {len(header)} columns, got {columns} after {len(taken)} lines; add the missing closing quote"
            )

    header: list[str] | None = None
    reader = csv.reader(lines(), strict=True)
    while True:
        taken.clear()
        try:
            cells = next(reader, None)
        except csv.Error as error:
            bad_rows.add(path, taken[0][0], f"not valid CSV (RFC 4180): {error}")
            pending.extendleft(reversed(taken[1:]))
            reader = csv.reader(lines(), strict=True)
            continue
        if cells is None:
            return
        number = taken[0][0]
        if header is not None and _holds_rows([line for _, line in taken[1:-1]], len(header)):
            raise InputError(
                f"{path}:{number}: a row of {len(taken):,} lines, of which most are rows themselves; if its quote is "
                "not closed, close it, else write the file as JSON lines"
            )
        if header is None:
            header = _header(path, number, cells)
        elif len(cells) != len(header):
            bad_rows.add(path, number, f"expected {len(header)} columns, got {len(cells) or 'an empty line'}")
        else:
            yield number, dict(zip(header, cells, strict=True))


def _holds_rows(lines: Sequence[str], columns: int) -> bool:
    """Returns whether most lines of a long row have as many columns as a row."""
    if columns < 2 or len(lines) < _CHECKED_LINES:
        return False
    return sum(len(next(csv.reader([line]), [])) == columns for line in lines) > len(lines) / 2


def _header(path: str, number: int, names: list[str]) -> list[str]:
    """Returns the column names. InputError if line 1 is not the header or a name is duplicate; "" is no name."""
    if number > 1:
        raise InputError(f"{path}:1: the header cannot be read; expected UTF-8 and valid CSV; {conversion(path)}")
    if duplicate := next((name for name in names if name and names.count(name) > 1), None):
        raise InputError(f"{path}: duplicate column {duplicate!r}; rename one")
    return names


def json_rows(path: str, bad_rows: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, object) of each line of a JSON lines file; empty lines are skipped.

    Raises InputError for a file that is one JSON array.
    """
    is_first = True
    for number, line in text_lines(path, bad_rows):
        if not line.strip():
            continue
        if is_first and line.lstrip().startswith("["):
            raise InputError(
                f"{path}:{number}: expected JSON lines, one object per line, got a JSON array; convert it, e.g. with: "
                f"jq -c '.[]' {path} > NEW_FILE.jsonl"
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
            bad_rows.add(path, number, f"expected a JSON object, got {type(value).__name__}")


def columns_of(path: str, *, comma: bool = False) -> list[str]:
    """Returns the column names in a file's header line.

    Raises:
      InputError: the file is empty, or the file or its header cannot be read.
    """
    for number, line in text_lines(path, BadRows(quiet=True)):
        try:
            return _header(path, number, next(csv.reader([line], strict=True)) if comma else line.split("\t"))
        except csv.Error as error:
            raise InputError(
                f"{path}:{number}: the header cannot be read: {error}; expected comma-separated names, and lines that "
                'end in "\\n"'
            ) from error
    raise InputError(f"{path}: the file is empty; expected a header line with the column names")


def write_lines(path: str | PathLike[str], lines: Iterable[str]) -> None:
    """Writes a text file atomically, and creates its folder if missing."""
    final = epath.Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_whole(final, "".join(f"{line}\n" for line in lines).encode())
