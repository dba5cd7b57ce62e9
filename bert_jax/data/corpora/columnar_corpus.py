"""Reads documents from Parquet and Arrow files, one a row, with pyarrow; only the column of text is read.

A slice of a Parquet file is a range of its row groups, one of an Arrow file a range of its record batches. Row groups
are decoded in small batches, so that memory holds a page of a column at a time, not a row group; of an Arrow file it
holds a record batch. A row whose text is null has no document. An Arrow stream, such as
`datasets.Dataset.save_to_disk` writes, has no index, and is one slice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from bert_jax.data.corpora.corpus_options import CorpusOptions
from bert_jax.data.corpora.documents import documents_of
from bert_jax.data.corpora.fields import missing_field
from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import remote, text_files

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_BYTES = 4 << 20  # of text that is decoded at once, on average
_BATCH_ROWS = 1024
_BUFFER_BYTES = 1 << 20  # of a column that is read at once, if row groups are larger than the next
_WHOLE_BYTES = 4 << 20  # a buffer is as large as a page claims to be, up to 2 GiB: small files are read without
_FILE_MARK = b"ARROW1"

Text = tuple[str, str]
"""Location in a file, such as "row 3", and text."""


def columnar_documents(path: str, kind: str, start: int, end: int | None, options: CorpusOptions) -> Iterator[str]:
    """Yields the documents of the row groups or record batches [start, end) of a file; None is the last.

    Raises:
      InputError: a damaged file, no column `text_field`, or one of another type than strings and bytes; or, with the
        row from 1, invalid UTF-8 or a text of more than MAX_LINE_BYTES.
    """
    texts = _parquet_texts if kind == "parquet" else _arrow_texts
    return documents_of(texts(path, start, end, options), options, lambda where: f"{path}: {where}")


def columnar_slices(path: str, kind: str, size: int, slice_bytes: int) -> list[tuple[int, int | None, int]]:
    """Returns (start, end, bytes) of slices of about `slice_bytes`, which cover a file of `size` bytes.

    Raises:
      InputError: a damaged file.
    """
    weights = _parquet_weights(path) if kind == "parquet" else _arrow_weights(path)
    if not weights:
        return [(0, None, size)]
    cuts = [(0, 0)]
    for number, weight in enumerate(accumulate(weights), 1):
        position = size * weight // max(1, sum(weights))
        if position - cuts[-1][1] >= slice_bytes or number == len(weights):
            cuts.append((number, position))
    return [(start, end, after - before) for (start, before), (end, after) in pairwise(cuts)]


# --- Parquet ---------------------------------------------------------------------------------------------------------


def _parquet_weights(path: str) -> list[int]:
    """Returns the bytes of each row group."""
    with _parquet(path) as file:
        return [group.total_byte_size for group in _row_groups(file.metadata)]


def _parquet_texts(path: str, start: int, end: int | None, options: CorpusOptions) -> Iterator[Text]:
    with _parquet(path) as file:
        column = _Column(path, file.schema_arrow, options)
        groups = _row_groups(file.metadata)
        row = 1 + sum(group.num_rows for group in groups[:start])
        for number in range(start, len(groups) if end is None else end):
            mean = groups[number].total_byte_size // max(1, groups[number].num_rows)
            rows = min(max(_BATCH_BYTES // max(1, mean), 1), _BATCH_ROWS)
            batches = file.iter_batches(rows, row_groups=[number], columns=[column.field], use_threads=False)
            for batch in batches:
                yield from column.texts(batch, "row ", row)
                row += len(batch)


@contextmanager
def _parquet(path: str) -> Iterator[Any]:
    """Context manager that opens a Parquet file; errors of reading it are raised as InputError."""
    import pyarrow.parquet as pq

    with _damage_named(path, "Parquet"), _opened(path, mapped=False) as source:
        metadata = pq.read_metadata(source)
        largest = max((group.total_byte_size for group in _row_groups(metadata)), default=0)
        # pre_buffer would read the column of a whole row group into memory, whatever the size of the buffer.
        yield pq.ParquetFile(
            source, metadata=metadata, buffer_size=_BUFFER_BYTES if largest > _WHOLE_BYTES else 0, pre_buffer=False,
            page_checksum_verification=True,
        )  # fmt: skip


def _row_groups(metadata: Any) -> list[Any]:
    return [metadata.row_group(number) for number in range(metadata.num_row_groups)]


# --- Arrow -----------------------------------------------------------------------------------------------------------


def _arrow_weights(path: str) -> list[int]:
    """Returns 1 for each record batch of a file, whose sizes are unknown; nothing for a stream."""
    with _arrow(path) as reader:
        return [1] * getattr(reader, "num_record_batches", 0)


def _arrow_texts(path: str, start: int, end: int | None, options: CorpusOptions) -> Iterator[Text]:
    import pyarrow as pa

    with _arrow(path) as reader:
        column = _Column(path, reader.schema, options)
    selected = pa.ipc.IpcReadOptions(included_fields=[column.index])
    with _arrow(path, selected) as reader:
        if hasattr(reader, "num_record_batches"):
            stop = reader.num_record_batches if end is None else end
            batches: Any = ((number, reader.get_batch(number)) for number in range(start, stop))
        else:
            batches = enumerate(reader)
        for number, batch in batches:
            for first in range(0, len(batch), _BATCH_ROWS):
                part = batch.slice(first, _BATCH_ROWS)
                yield from column.texts(part, f"record batch {number + 1}, row ", first + 1)


@contextmanager
def _arrow(path: str, options: Any = None) -> Iterator[Any]:
    """Context manager that opens an Arrow file, or a stream if it does not begin as a file does."""
    import pyarrow as pa

    with _damage_named(path, "Arrow"), _opened(path, mapped=True) as source:
        is_file = source.read(len(_FILE_MARK)) == _FILE_MARK
        source.seek(0)
        yield (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source, options=options)


# --- Both ------------------------------------------------------------------------------------------------------------


class _Column:
    """The column of text of a table.

    Attributes:
      field: its name; dots lead into structs, unless a column has the whole name.
      index: the index of the column, or of the struct that contains it.
    """

    def __init__(self, path: str, schema: "pa.Schema", options: CorpusOptions) -> None:
        self.path = path
        self.field = options.text_field
        self.errors = options.errors
        first, *inner = [self.field] if self.field in schema.names else self.field.split(".")
        if schema.names.count(first) > 1:
            raise InputError(f'{path}: got two columns "{first}", expected one; rename one of them')
        if first not in schema.names:
            raise missing_field(path, self.field, _names(schema))
        self.index = schema.get_field_index(first)
        self._inner = inner
        self._check_type(schema)

    def texts(self, batch: "pa.RecordBatch", where: str, first: int) -> Iterator[Text]:
        """Yields the location, `where` and a number counted from `first`, and the text of each row that has one."""
        import pyarrow as pa
        import pyarrow.compute as pc

        array = batch.column(0)
        if self._inner:
            array = pc.struct_field(array, self._inner)
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        for row, value in enumerate(array.cast(pa.large_binary()).to_pylist(), first):
            if value is not None:
                yield f"{where}{row}", self._decode(value, f"{self.path}: {where}{row}")

    def _check_type(self, schema: "pa.Schema") -> None:
        import pyarrow as pa

        found: Any = schema.field(self.index).type
        for name in self._inner:
            if not pa.types.is_struct(found) or found.get_field_index(name) < 0:
                raise missing_field(self.path, self.field, _names(schema))
            found = found.field(name).type
        if not _is_text(found):
            usable = ", ".join(field.name for field in schema if _is_text(field.type))
            raise InputError(
                f'{self.path}: column "{self.field}" is of type {found}, expected strings; columns of strings: '
                f"{usable or 'none'}; pass --text_field NAME"
            )

    def _decode(self, value: bytes, where: str) -> str:
        if len(value) > text_files.MAX_LINE_BYTES:
            raise InputError(
                f"{where}: got a text of {len(value):,} bytes, expected at most {text_files.MAX_LINE_BYTES:,}; split "
                "it into several rows"
            )
        try:
            return value.decode("utf-8", self.errors)
        except UnicodeDecodeError as error:
            raise InputError(
                f"{where}: invalid UTF-8 (byte 0x{value[error.start]:02x}); fix it or pass --errors replace"
            ) from error


def _is_text(found: Any) -> bool:
    import pyarrow as pa

    kind = found.value_type if pa.types.is_dictionary(found) else found
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_binary)
    return any(check(kind) for check in (*checks, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_null))


def _names(schema: "pa.Schema") -> list[str]:
    """Returns the names of all columns; those of a struct's fields follow it, joined by dots."""
    import pyarrow as pa

    def below(field: Any, prefix: str) -> Iterator[str]:
        yield f"{prefix}{field.name}"
        if pa.types.is_struct(field.type):
            for inner in field.type:
                yield from below(inner, f"{prefix}{field.name}.")

    return [name for field in schema for name in below(field, "")]


@contextmanager
def _opened(path: str, mapped: bool) -> Iterator[Any]:
    """Context manager that opens a file for pyarrow; a local one as a memory map if `mapped`."""
    import pyarrow as pa

    if remote.is_remote(path):
        source = pa.PythonFile(remote.open_to_read(path), mode="r")
    else:
        source = pa.memory_map(path) if mapped else pa.OSFile(path)
    with source:
        yield source


@contextmanager
def _damage_named(path: str, kind: str) -> Iterator[None]:
    """Context manager that raises errors of pyarrow as an InputError with the file."""
    try:
        yield
    except BertJaxError:
        raise
    except (OSError, ValueError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{path}: cannot be read as {kind} ({reason}); fetch it or write it again") from error
