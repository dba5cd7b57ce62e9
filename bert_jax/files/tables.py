"""Rows of tables: JSON lines, CSV and TSV from lines, Parquet and Arrow by pyarrow.

A row is read whole, or it is a BadRow, in its place: its reader decides whether to refuse it or to count it. Lines are
(position, bytes) pairs; a row has the position of its first line. `read_table` reads all columns of a file of any of
these formats; corpora read slices of files, of one column.
"""

import csv
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import remote, text_files
from bert_jax.files.text_files import Utf8

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_BYTES = 4 << 20  # of a Parquet file that are decoded at once, on average
_BATCH_ROWS = 1024
_BUFFER_BYTES = 1 << 20  # of a column that is read at once, if row groups are larger than the next
_WHOLE_BYTES = 4 << 20  # a buffer is as large as a page claims to be, up to 2 GiB: small files are read without
_ARROW_FILE_MARK = b"ARROW1"

Lines = Iterable[tuple[int, bytes]]


@dataclass(frozen=True)
class BadRow:
    """Row that cannot be read; `problem` says why. `is_rest`: it is all that is left of the file."""

    problem: str
    is_rest: bool = False


def read_table(
    path: str, names: Sequence[str] = (), *, kind: str = ""
) -> Iterator[tuple[int | str, dict[str, Any] | BadRow]]:
    """Yields (position, value by column) of each row of a file; the position is a line, from 1, or such as "row 3".

    Args:
      path: the file; text may be compressed.
      names: the columns of a CSV or TSV without a header line.
      kind: the format; by default that of the file's name, see `text_files.named_format`.

    Raises:
      InputError: a name of no format; a file that cannot be read, is empty or is not UTF-8; a header with two columns
        of one name; or a quote that is never closed.
    """
    kind = kind or text_files.named_format(path)
    if not kind:
        raise InputError(
            f"{path}: unknown format; expected a name ending in .csv, .tsv, .jsonl, .parquet or .arrow; text may be "
            f"compressed ({', '.join(text_files.COMPRESSED)})"
        )
    if kind in ("parquet", "arrow"):
        with columnar_file(path, kind) as file:
            yield from file.rows()
        return
    text_files.text_format(path)  # refuses what is not text
    lines = ((number, line) for number, (_, line) in enumerate(text_files.lines_from(path, 0, None), 1))
    utf8 = Utf8()
    if kind == "json":
        yield from json_rows(lines, utf8)
        return
    quotes, separator = kind == "csv", "\t"
    if not names:
        _, header = next(lines, (1, b""))
        if not header.strip():
            raise InputError(f"{path}:1: the file is empty; expected a header line with the names of the columns")
        separator = separator_of(kind, header)
        try:
            names = column_names(header, separator, utf8, quotes=quotes)
        except ValueError as error:
            raise InputError(f"{path}:1: {error}") from error
    for line, row in separated_rows(lines, separator, names, utf8, quotes=quotes):
        if isinstance(row, BadRow) and row.is_rest:
            raise InputError(f"{path}:{line}: {row.problem}")
        yield line, row


# --- JSON lines ------------------------------------------------------------------------------------------------------


def json_rows(lines: Lines, utf8: Utf8) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Yields (position, object) of each line of JSON lines; blank lines are skipped."""
    for position, line in lines:
        if line and not line.isspace():
            yield position, _json_row(line, utf8)


def _json_row(line: bytes, utf8: Utf8) -> dict[str, Any] | BadRow:
    try:
        value: dict[str, Any] = json.loads(utf8.decode(line))
        if b"\\ud" in line.lower():  # JSON can escape half a surrogate pair, which UTF-8 cannot encode
            text = json.dumps(value, ensure_ascii=False)
            value = json.loads(utf8.decode(text.encode("utf-8", "surrogatepass")))
    except (ValueError, RecursionError) as error:
        return BadRow(f"not JSON ({error}); expected a JSON object on each line")
    if not isinstance(value, dict):
        kind = type(value).__name__
        return BadRow(f"got {kind}, expected a JSON object on each line; convert an array: jq -c '.[]' FILE")
    return value


# --- CSV and TSV -----------------------------------------------------------------------------------------------------


def separator_of(kind: str, header: bytes) -> str:
    """Returns the separator of "tsv", a tab, or of "csv": a comma, or a semicolon or tab if the header has no comma."""
    return "\t" if kind == "tsv" else next((mark for mark in ",;\t" if mark.encode() in header), ",")


def column_names(header: bytes, separator: str, utf8: Utf8, *, quotes: bool) -> list[str]:
    """Returns the names in a header line, without white space around them.

    Raises ValueError for a line that is not UTF-8 or not CSV, and for a duplicate name; "" is no name.
    """
    (_, cells), *_ = (_quoted if quotes else _unquoted)([(0, header)], separator, utf8)
    if isinstance(cells, BadRow):
        raise ValueError(cells.problem)
    names = [cell.strip() for cell in cells]
    if duplicate := next((name for name in names if name and names.count(name) > 1), None):
        raise ValueError(f'got two columns "{duplicate}", expected one; rename one of them')
    return names


def separated_rows(
    lines: Lines, separator: str, names: Sequence[str], utf8: Utf8, *, quotes: bool
) -> Iterator[tuple[int, dict[str, str] | BadRow]]:
    """Yields (position, value by column) of each row of CSV or TSV; empty lines are skipped.

    Args:
      lines: the lines after the header.
      separator: between fields.
      names: of the columns.
      utf8: decodes the fields.
      quotes: a field may be in double quotes, as in RFC 4180; else a line is a row, and a quote is text.
    """
    for position, row in (_quoted if quotes else _unquoted)(lines, separator, utf8):
        if isinstance(row, BadRow):
            yield position, row
        elif len(row) == len(names):
            yield position, dict(zip(names, row, strict=True))
        elif row not in ([], [""]):
            hint = "quote a field that contains a separator" if quotes else "a table with quotes is named .csv"
            yield position, BadRow(f"expected {len(names)} fields as in the header, got {len(row)}; {hint}")


def _unquoted(lines: Lines, separator: str, utf8: Utf8) -> Iterator[tuple[int, list[str] | BadRow]]:
    mark = separator.encode()
    for position, line in lines:
        try:
            yield position, list(map(utf8.decode, line.removesuffix(b"\r").split(mark)))
        except ValueError as error:
            yield position, BadRow(str(error))


def _quoted(lines: Lines, separator: str, utf8: Utf8) -> Iterator[tuple[int, list[str] | BadRow]]:
    """Yields rows by `csv`, not by pyarrow's reader.

    pyarrow takes a quote that is closed in a later row, or never, for one field: the rows between are merged silently.
    What is not CSV is the last row, because nobody knows where the next one begins.
    """
    begin, taken, invalid = 0, 0, ""  # of the current row

    def decoded() -> Iterator[str]:
        nonlocal begin, taken, invalid
        for position, line in lines:
            begin, taken = begin if taken else position, taken + 1
            try:
                text = utf8.decode(line)
            except ValueError as error:
                text = line.decode("utf-8", "replace")
                invalid = invalid or f"line {taken} of the row is {error}"
            yield text + "\n"

    csv.field_size_limit(text_files.MAX_LINE_BYTES // 4)  # characters; `csv` holds 4 bytes for each
    try:
        for row in csv.reader(decoded(), delimiter=separator, strict=True):
            yield begin, BadRow(invalid) if invalid else row
            taken, invalid = 0, ""
    except csv.Error as error:
        fix = 'close its quotes, and write a quote within a field as ""'
        yield begin, BadRow(f"not CSV ({error}, after {taken} line(s)); {fix}", is_rest=True)


# --- Parquet and Arrow -----------------------------------------------------------------------------------------------


class ColumnarFile:
    """Open Parquet or Arrow file, decoded in small batches; Arrow may be a stream, as `datasets` saves it.

    Memory holds a page of a column of Parquet at a time, not a row group, or a record batch of Arrow.

    Attributes:
      schema: the names and types of its columns.
      weights: the bytes of each row group; 1 for each record batch; empty for a stream, which has no index.
    """

    def __init__(self, source: Any, kind: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._source, self._groups = source, []
        if kind == "parquet":
            metadata = pq.read_metadata(source)
            self._groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            self.weights = [group.total_byte_size for group in self._groups]
            # pre_buffer would read the column of a whole row group into memory, whatever the size of the buffer.
            self._file = pq.ParquetFile(
                source, metadata=metadata, pre_buffer=False, page_checksum_verification=True,
                buffer_size=_BUFFER_BYTES if max(self.weights, default=0) > _WHOLE_BYTES else 0,
            )  # fmt: skip
            self.schema = self._file.schema_arrow
        else:
            is_file = source.read(len(_ARROW_FILE_MARK)) == _ARROW_FILE_MARK
            self._opener = pa.ipc.open_file if is_file else pa.ipc.open_stream
            reader = self._open()
            self.schema = reader.schema
            self.weights = [1] * getattr(reader, "num_record_batches", 0)

    def _open(self, options: Any = None) -> Any:
        self._source.seek(0)
        return self._opener(self._source, options=options)

    def batches(self, start: int, end: int | None, column: str) -> Iterator[tuple[str, int, "pa.Array"]]:
        """Yields parts of a column of the row groups, or record batches, [start, end); at most `_BATCH_ROWS` rows each.

        A part is (words before a row's number in messages, the number of its first row from 1, its values). Dots in
        `column` lead into structs, unless a column has the whole name.
        """
        import pyarrow as pa

        if self._groups:
            row = 1 + sum(group.num_rows for group in self._groups[:start])
            for number, group in enumerate(self._groups[start:end], start):
                mean = group.total_byte_size // max(1, group.num_rows)
                rows = min(max(_BATCH_BYTES // max(1, mean), 1), _BATCH_ROWS)
                for batch in self._file.iter_batches(rows, row_groups=[number], columns=[column], use_threads=False):
                    yield "row ", row, _column(batch, column)
                    row += len(batch)
            return
        index = self.schema.get_field_index(_path_of(column, self.schema)[0])
        reader = self._open(pa.ipc.IpcReadOptions(included_fields=[index]))
        numbers = range(len(self.weights))[start:end]
        batches = (reader.get_batch(number) for number in numbers) if self.weights else reader
        for number, batch in enumerate(batches, start + 1):
            values = _column(batch, column)
            for first in range(0, len(values), _BATCH_ROWS):
                yield f"record batch {number}, row ", first + 1, values.slice(first, _BATCH_ROWS)

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields ("row N", value by column) of each row."""
        if self._groups:
            batches: Iterable[pa.RecordBatch] = self._file.iter_batches(_BATCH_ROWS, use_threads=False)
        else:
            reader = self._open()
            batches = map(reader.get_batch, range(len(self.weights))) if self.weights else reader
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        return ((f"row {number}", row) for number, row in enumerate(rows, 1))


@contextmanager
def columnar_file(path: str, kind: str) -> Iterator[ColumnarFile]:
    """Context manager that opens a file of the kind "parquet" or "arrow".

    Raises InputError, also for what its block reads, if the file cannot be opened or is damaged.
    """
    import pyarrow as pa

    try:
        if remote.is_remote(path):
            source = pa.PythonFile(remote.open_to_read(path), mode="r")
        else:
            source = pa.OSFile(path) if kind == "parquet" else pa.memory_map(path)
        with source:
            yield ColumnarFile(source, kind)
    except BertJaxError:
        raise
    except (OSError, ValueError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"{path}: cannot be read as {kind.capitalize()} ({reason}); fetch or write it again"
        ) from error


def column_type(schema: "pa.Schema", column: str) -> "pa.DataType | None":
    """Returns the type of a column, or of a field of a struct; None if there is none of the name."""
    import pyarrow as pa

    found: Any = pa.struct([(field.name, field.type) for field in schema])
    for name in _path_of(column, schema):
        if not pa.types.is_struct(found) or found.get_field_index(name) < 0:
            return None
        found = found.field(name).type
    return found


def _path_of(column: str, schema: "pa.Schema") -> list[str]:
    return [column] if column in schema.names else column.split(".")


def _column(batch: "pa.RecordBatch", column: str) -> "pa.Array":
    import pyarrow.compute as pc

    first, *inner = _path_of(column, batch.schema)
    values = batch.column(batch.schema.get_field_index(first))
    return pc.struct_field(values, inner) if inner else values
