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

from bert_jax.errors import InputError
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


def read_table(path: str, names: Sequence[str] = ()) -> Iterator[tuple[int | str, dict[str, Any] | BadRow]]:
    """Yields (position, value by column) of each row of a file; the position is a line, from 1, or such as "row 3".

    Args:
      path: the file, in the format of its name; text may be compressed.
      names: the columns of a TSV without a header line.

    Raises:
      InputError: a name of no format; a file that cannot be read or is not UTF-8; a header with two columns
        of one name; or a quote that is never closed.
    """
    kind = text_files.named_format(path)
    if not kind:
        raise InputError(f"{path}: unknown format; expected a name ending in .csv, .tsv, .jsonl, .parquet or .arrow")
    text_files.text_format(path)  # refuses what is not text, and a pipe
    if kind in ("parquet", "arrow"):
        with columnar_file(path, kind) as file:
            for first, batch in file.batches():
                for number, row in enumerate(batch.to_pylist(), first):
                    yield f"row {number}", row
        return
    lines = ((number, line) for number, (_, line) in enumerate(text_files.lines_from(path, 0, None), 1))
    for line, row in text_rows(path, kind, lines, Utf8(), names, starts=not names):
        if isinstance(row, BadRow) and row.is_rest:
            raise InputError(f"{path}:{line}: {row.problem}")
        yield line, row


def text_rows(
    path: str, kind: str, lines: Lines, utf8: Utf8, names: Sequence[str] = (), *, starts: bool
) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Yields (position, value by column) of each row of JSON lines, CSV or TSV; empty lines are skipped.

    Args:
      path: the file, whose first line has the names of the columns of CSV and TSV.
      kind: "json"; "csv", whose fields may be in double quotes, as in RFC 4180; or "tsv", where a quote is text.
      lines: those to read.
      utf8: decodes them.
      names: the columns of a TSV without a header line.
      starts: whether `lines` begin with the header line.

    Raises:
      InputError: a header that is not CSV, or has two columns of one name.
    """
    if kind == "json":
        yield from ((position, _json_row(line, utf8)) for position, line in lines if line and not line.isspace())
        return
    header = next(text_files.lines_from(path, 0, None), (0, b""))[1]
    quotes = kind == "csv"
    separator = "\t" if not quotes else next((mark for mark in ",;\t" if mark.encode() in header), ",")
    if not names:
        cells = next((row for _, row in _separated([(0, header)], separator, utf8, quotes=quotes)), [])
        if isinstance(cells, BadRow):
            raise InputError(f"{path}:1: {cells.problem}")
        names = [cell.strip() for cell in cells]
        if duplicate := next((name for name in names if name and names.count(name) > 1), None):
            raise InputError(f'{path}:1: got two columns "{duplicate}", expected one; rename one of them')
    for position, row in _separated(itertools.islice(lines, starts, None), separator, utf8, quotes=quotes):
        if isinstance(row, BadRow):
            yield position, row
        elif len(row := row or [""]) == len(names):
            yield position, dict(zip(names, row, strict=True))
        elif row != [""]:
            hint = "quote a field that contains a separator" if quotes else "a table with quotes is named .csv"
            yield position, BadRow(f"expected {len(names)} fields as in the header, got {len(row)}; {hint}")


def _json_row(line: bytes, utf8: Utf8) -> dict[str, Any] | BadRow:
    try:
        value: dict[str, Any] = json.loads(utf8.decode(line))
        if b"\\ud" in line.lower():  # JSON can escape half a surrogate pair, which UTF-8 cannot encode
            text = json.dumps(value, ensure_ascii=False)
            value = json.loads(utf8.decode(text.encode("utf-8", "surrogatepass")))
    except (ValueError, RecursionError) as error:
        return BadRow(f"not JSON ({error}); expected a JSON object on each line", is_rest=line.strip() == b"[")
    is_object = isinstance(value, dict)
    return value if is_object else BadRow(f"got {type(value).__name__}, expected a JSON object on each line")


def _separated(lines: Lines, separator: str, utf8: Utf8, *, quotes: bool) -> Iterator[tuple[int, list[str] | BadRow]]:
    """Yields rows: with `quotes` by `csv`, not by pyarrow's reader, and otherwise each line as a row.

    pyarrow takes a quote that is closed in a later row, or never, for one field: the rows between are merged silently.
    What is not CSV, or not UTF-8, is the last row of CSV, because nobody knows where the next one begins.
    """
    if not quotes:
        for position, line in lines:
            try:
                yield position, utf8.decode(line).removesuffix("\r").split(separator)
            except ValueError as error:
                yield position, BadRow(str(error))
        return
    begin, taken = 0, 0  # of the current row

    def decoded() -> Iterator[str]:
        nonlocal begin, taken
        for position, line in lines:
            begin, taken = begin if taken else position, taken + 1
            yield utf8.decode(line) + "\n"

    csv.field_size_limit(text_files.MAX_LINE_BYTES // 4)  # characters; `csv` holds 4 bytes for each
    try:
        for row in csv.reader(decoded(), delimiter=separator, strict=True):
            yield begin, row
            taken = 0
    except ValueError as error:
        yield begin, BadRow(str(error), is_rest=True)
    except csv.Error as error:
        fix = 'close its quotes, and write a quote within a field as ""'
        yield begin, BadRow(f"not CSV ({error}, after {taken} line(s)); {fix}", is_rest=True)


# --- Parquet and Arrow -----------------------------------------------------------------------------------------------


class ColumnarFile:
    """Open Parquet or Arrow file, decoded in small batches; Arrow may be a stream, as `datasets` saves it.

    Memory holds a page of a column of Parquet at a time, not a row group, or a record batch of Arrow.

    Attributes:
      schema: the names and types of its columns.
      weights: the bytes of each row group of Parquet; empty for Arrow.
    """

    def __init__(self, source: Any, kind: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._parquet: Any = None
        self._groups: list[Any] = []
        if kind == "parquet":
            metadata = pq.read_metadata(source)
            self._groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            is_large = any(group.total_byte_size > _WHOLE_BYTES for group in self._groups)
            # pre_buffer would read the column of a whole row group into memory, whatever the size of the buffer.
            self._parquet = pq.ParquetFile(
                source, metadata=metadata, pre_buffer=False, page_checksum_verification=True,
                buffer_size=_BUFFER_BYTES if is_large else 0,
            )  # fmt: skip
            self.schema = self._parquet.schema_arrow
        else:
            is_file = source.read(len(_ARROW_FILE_MARK)) == _ARROW_FILE_MARK
            source.seek(0)
            reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source)
            self._arrow = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            self.schema = reader.schema
        self.weights = [group.total_byte_size for group in self._groups]

    def batches(self, start: int = 0, end: int | None = None, column: str = "") -> Iterator[tuple[int, Any]]:
        """Yields parts of the row groups [start, end) of Parquet, or of all of Arrow; at most `_BATCH_ROWS` rows each.

        A part is (the number of its first row from 1, its rows). The rows are the values of a column, or else a record
        batch. Dots in `column` lead into structs, unless a column has the whole name.
        """
        row = 1 + sum(group.num_rows for group in self._groups[:start])
        for batch in self._arrow if self._parquet is None else self._decoded(start, end, column):
            values = _values(batch, column) if column else batch
            for first in range(0, len(values), _BATCH_ROWS):
                yield row + first, values.slice(first, _BATCH_ROWS)
            row += len(values)

    def _decoded(self, start: int, end: int | None, column: str) -> "Iterator[pa.RecordBatch]":
        columns = [column] if column else None
        for number, group in itertools.islice(enumerate(self._groups), start, end):
            mean = group.total_byte_size // max(1, group.num_rows)
            rows = min(max(_BATCH_BYTES // max(1, mean), 1), _BATCH_ROWS)
            yield from self._parquet.iter_batches(rows, row_groups=[number], columns=columns, use_threads=False)


@contextmanager
def columnar_file(path: str, kind: str) -> Iterator[ColumnarFile]:
    """Context manager that opens a file of the kind "parquet" or "arrow".

    Raises InputError, also for what its block reads, if the file cannot be opened or is damaged.
    """
    import pyarrow as pa

    with text_files.read_errors(path):
        source = pa.PythonFile(remote.open_to_read(path), mode="r") if remote.is_remote(path) else pa.OSFile(path)
        with source:
            yield ColumnarFile(source, kind)


def column_type(schema: "pa.Schema", column: str) -> "pa.DataType | None":
    """Returns the type of a column, or of a field of a struct; None if there is none of the name, or several."""
    import pyarrow as pa

    try:
        return _values(schema.empty_table(), column).type
    except (KeyError, TypeError, pa.ArrowException):
        return None


def _values(rows: "pa.RecordBatch | pa.Table", column: str) -> Any:
    import pyarrow.compute as pc

    first, *inner = [column] if column in rows.schema.names else column.split(".")
    return pc.struct_field(rows.column(first), inner) if inner else rows.column(first)
