"""Rows of tables: JSON lines, CSV and TSV, read line by line, and Parquet and Arrow, read by pyarrow.

A row is read whole, or it is a BadRow, in its place: its reader decides whether to refuse it or to count it.
"""

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import remote, text_files
from bert_jax.files.text_files import Utf8, lines_from

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_BYTES = 4 << 20  # of a Parquet file that are decoded at once, on average
_BATCH_ROWS = 1024
_BUFFER_BYTES = 1 << 20  # of a column that is read at once, if row groups are larger than the next
_WHOLE_BYTES = 4 << 20  # a buffer is as large as a page claims to be, up to 2 GiB: small files are read without
_ARROW_FILE_MARK = b"ARROW1"


@dataclass(frozen=True)
class BadRow:
    """Row that cannot be read; `problem` says why."""

    problem: str


# --- JSON lines ------------------------------------------------------------------------------------------------------


def json_rows(path: str, start: int, end: int | None, utf8: Utf8) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Yields (offset, object) of the lines that begin in bytes [start, end) of JSON lines; blank lines are skipped."""
    for offset, line in lines_from(path, start, end):
        if end is not None and offset >= end:
            return
        if line and not line.isspace():
            yield offset, _json_row(line, utf8)


def _json_row(line: bytes, utf8: Utf8) -> dict[str, Any] | BadRow:
    try:
        value = json.loads(utf8.decode(line))
    except (ValueError, RecursionError) as error:
        return BadRow(str(error) if str(error).startswith("not UTF-8") else f"not JSON ({error})")
    if not isinstance(value, dict):
        kind = type(value).__name__
        return BadRow(f"got {kind}, expected a JSON object on each line; convert an array: jq -c '.[]' FILE")
    return value


# --- CSV and TSV -----------------------------------------------------------------------------------------------------


def separated_rows(
    path: str, kind: str, start: int, end: int | None, utf8: Utf8, *, quotes: bool
) -> Iterator[tuple[int, dict[str, str] | BadRow]]:
    r"""Yields (offset of the first line, value by column) of each row of a CSV or TSV file; empty lines are skipped.

    The separator of TSV is a tab; that of CSV a comma, or a semicolon or tab if the header has no comma.

    Args:
      path: the file; its first line is the header. White space around its names is dropped.
      kind: "csv" or "tsv".
      start, end: the rows that begin in these bytes; 0 and None with `quotes`, as a line end may be in quotes.
      utf8: decodes the lines.
      quotes: a field may be in double quotes, as in RFC 4180; else a line is a row, and a quote is text.

    Raises:
      InputError: no valid header, or a duplicate column.
    """
    first = next(lines_from(path, 0, None), None)
    if first is None:
        return
    separator = "\t" if kind == "tsv" else next((mark for mark in ",;\t" if mark.encode() in first[1]), ",")
    cells = _quoted if quotes else _unquoted
    rows = cells(path, separator, start, end, utf8)
    _, header = next(rows if start == 0 else cells(path, separator, 0, None, utf8))
    if isinstance(header, BadRow):
        raise InputError(f"{path}:1: {header.problem}")
    names = [name.strip() for name in header]
    if duplicate := next((name for name in names if name and names.count(name) > 1), None):
        raise InputError(f'{path}:1: got two columns "{duplicate}", expected one; rename one of them')
    for offset, row in rows:
        if isinstance(row, BadRow):
            yield offset, row
        elif len(row) == len(names):
            yield offset, dict(zip(names, row, strict=True))
        elif row not in ([], [""]):
            hint = "quote a field that contains a separator" if quotes else "pass --tsv_quotes if fields are quoted"
            yield offset, BadRow(f"got {len(row)} fields, expected {len(names)} as in the header; {hint}")


def _unquoted(
    path: str, separator: str, start: int, end: int | None, utf8: Utf8
) -> Iterator[tuple[int, list[str] | BadRow]]:
    for offset, line in lines_from(path, start, end):
        if end is not None and offset >= end:
            return
        try:
            yield offset, list(map(utf8.decode, line.removesuffix(b"\r").split(separator.encode())))
        except ValueError as error:
            yield offset, BadRow(str(error))


def _quoted(
    path: str, separator: str, start: int, end: int | None, utf8: Utf8
) -> Iterator[tuple[int, list[str] | BadRow]]:
    """Yields the rows of a whole file by `csv`, not by pyarrow's reader.

    pyarrow takes a quote that is closed in a later row, or never, for one field: the rows between are merged silently.
    """
    offset, lines = 0, 0  # of the current row
    invalid = ""

    def decoded() -> Iterator[str]:
        nonlocal offset, lines, invalid
        for begin, line in lines_from(path, start, end):
            offset, lines = begin if not lines else offset, lines + 1
            try:
                text = utf8.decode(line)
            except ValueError as error:
                invalid, text = invalid or f"line {lines} of the row is {error}", line.decode("utf-8", "replace")
            yield text + "\n"

    csv.field_size_limit(text_files.MAX_LINE_BYTES // 4)  # characters; `csv` holds 4 bytes for each
    texts = decoded()
    reader = csv.reader(texts, delimiter=separator, strict=True)
    while True:
        lines, invalid = 0, ""
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            fix = 'close its quotes, and write a quote within a field as ""'
            yield offset, BadRow(f"not a row of CSV ({error}, after {lines} lines); {fix}")
            reader = csv.reader(texts, delimiter=separator, strict=True)
            continue
        yield offset, BadRow(invalid) if invalid else row


# --- Parquet and Arrow -----------------------------------------------------------------------------------------------


class ColumnarFile:
    """Open Parquet or Arrow file.

    Attributes:
      schema: the names and types of its columns.
      weights: the bytes of each row group of Parquet; 1 for each record batch of Arrow; empty for an Arrow stream, such
        as `datasets.Dataset.save_to_disk` writes, which has no index.
    """

    schema: "pa.Schema"
    weights: list[int]

    def batches(self, start: int, end: int | None, column: str) -> Iterator[tuple[str, int, "pa.Array"]]:
        """Yields parts of a column of the row groups or record batches [start, end), each of at most `_BATCH_ROWS`.

        A part is (words before a row's number in messages, the number of its first row from 1, its values). Dots in
        `column` lead into structs, unless a column has the whole name.
        """
        raise NotImplementedError


class _ParquetFile(ColumnarFile):
    """Decodes small batches, so that memory holds a page of a column at a time, not a row group."""

    def __init__(self, source: Any) -> None:
        import pyarrow.parquet as pq

        metadata = pq.read_metadata(source)
        self._groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self.weights = [group.total_byte_size for group in self._groups]
        # pre_buffer would read the column of a whole row group into memory, whatever the size of the buffer.
        self._file = pq.ParquetFile(
            source, metadata=metadata, buffer_size=_BUFFER_BYTES if max(self.weights, default=0) > _WHOLE_BYTES else 0,
            pre_buffer=False, page_checksum_verification=True,
        )  # fmt: skip
        self.schema = self._file.schema_arrow

    def batches(self, start: int, end: int | None, column: str) -> Iterator[tuple[str, int, "pa.Array"]]:
        row = 1 + sum(group.num_rows for group in self._groups[:start])
        for number, group in enumerate(self._groups[start:end], start):
            mean = group.total_byte_size // max(1, group.num_rows)
            rows = min(max(_BATCH_BYTES // max(1, mean), 1), _BATCH_ROWS)
            for batch in self._file.iter_batches(rows, row_groups=[number], columns=[column], use_threads=False):
                yield "row ", row, _column(batch, column)
                row += len(batch)


class _ArrowFile(ColumnarFile):
    """Holds a record batch in memory, of one column."""

    def __init__(self, source: Any) -> None:
        self._source = source
        reader = self._open()
        self.schema = reader.schema
        self.weights = [1] * getattr(reader, "num_record_batches", 0)

    def _open(self, options: Any = None) -> Any:
        import pyarrow as pa

        self._source.seek(0)
        is_file = self._source.read(len(_ARROW_FILE_MARK)) == _ARROW_FILE_MARK
        self._source.seek(0)
        return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(self._source, options=options)

    def batches(self, start: int, end: int | None, column: str) -> Iterator[tuple[str, int, "pa.Array"]]:
        import pyarrow as pa

        index = self.schema.get_field_index(_path_of(column, self.schema)[0])
        reader = self._open(pa.ipc.IpcReadOptions(included_fields=[index]))
        numbers = range(len(self.weights))[start:end]
        batches = (reader.get_batch(number) for number in numbers) if self.weights else reader
        for number, batch in enumerate(batches, start + 1):
            values = _column(batch, column)
            for first in range(0, len(values), _BATCH_ROWS):
                yield f"record batch {number}, row ", first + 1, values.slice(first, _BATCH_ROWS)


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
            yield _ParquetFile(source) if kind == "parquet" else _ArrowFile(source)
    except BertJaxError:
        raise
    except (OSError, ValueError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"{path}: cannot be read as {kind.capitalize()} ({reason}); fetch it or write it again"
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
