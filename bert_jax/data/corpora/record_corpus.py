"""Reads documents from records: a line of JSON, or a row of CSV, TSV, Parquet or Arrow, whose text is in one field.

Parquet and Arrow may have token ids in place of text: a row is a list of sentences, which are lists of ids; or one list
of ids, a document of one sentence. A slice of JSON lines, or of TSV, is a range of bytes, one of a Parquet file a range
of its row groups. Other files are one slice.
"""

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_jax.data.options import CorpusOptions
from bert_jax.errors import InputError
from bert_jax.files.tables import BadRow, column_type, columnar_file, text_rows
from bert_jax.files.text_files import Utf8, lines_from, locate, named_format
from bert_jax.text.tokenizer import Tokenizer, token_dtype

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNAR = ("parquet", "arrow")
_SHOWN_CHARACTERS = 500  # of the names of columns
_MISSING = object()


def columnar_slices(path: str, kind: str, size: int, slice_bytes: int) -> list[tuple[int, int | None, int]]:
    """Returns (start, end, bytes) of slices of about `slice_bytes`, which cover a file of `size` bytes.

    Raises InputError for a damaged file.
    """
    with columnar_file(path, kind) as file:
        weights = file.weights
    if not weights:
        return [(0, None, size)]
    cuts = [(0, 0)]
    for number, weight in enumerate(itertools.accumulate(weights), 1):
        position = size * weight // max(1, sum(weights))
        if position - cuts[-1][1] >= slice_bytes or number == len(weights):
            cuts.append((number, position))
    return [(start, end, after - before) for (start, before), (end, after) in itertools.pairwise(cuts)]


def columnar_texts(
    path: str, kind: str, start: int, end: int | None, options: CorpusOptions, utf8: Utf8
) -> Iterator[str]:
    """Yields the text of each row in the row groups [start, end) of a Parquet file, or of an Arrow file.

    A row whose text is null is skipped. Raises InputError for a damaged file, no column `text_field`, or one of another
    type than strings and bytes; or, with the row, for invalid UTF-8.
    """
    import pyarrow as pa

    field = options.text_field
    with columnar_file(path, kind) as file:
        found = _type_of(path, file.schema, field, "--text_field")
        try:
            pa.nulls(0, found).cast(pa.large_binary())
        except pa.ArrowNotImplementedError as error:
            problem = f'column "{field}" is of type {found}, expected strings; see --text_field'
            raise InputError(f"{path}: {problem}") from error
        for first, values in file.batches(start, end, field):
            for row, value in enumerate(values.cast(pa.large_binary()).to_pylist(), first):
                if value is not None:
                    try:
                        yield utf8.decode(value)
                    except ValueError as error:
                        raise InputError(f"{path}: row {row}: {error}") from error


def row_texts(path: str, kind: str, start: int, end: int | None, options: CorpusOptions, utf8: Utf8) -> Iterator[str]:
    """Yields the text of each row that begins in bytes [start, end) of JSON lines, CSV or TSV.

    A row whose text is null is skipped. Raises InputError, with the line, for a row that is invalid or has no string in
    the field `text_field`.
    """
    field = options.text_field
    lines = itertools.takewhile(lambda line: end is None or line[0] < end, lines_from(path, start, end))
    for offset, row in text_rows(path, kind, lines, utf8, starts=start == 0):
        if isinstance(row, BadRow):
            raise InputError(f"{locate(path, offset)}: {row.problem}")
        text = _lookup(row, field)
        if isinstance(text, str):
            yield text
        elif text is _MISSING:
            where = locate(path, offset) if kind == "json" else f"{path}:1"
            raise _missing_field(where, field, row, "--text_field")
        elif text is not None:
            raise InputError(f'{locate(path, offset)}: "{field}" is of type {type(text).__name__}, expected a string')


def _type_of(path: str, schema: "pa.Schema", column: str, option: str) -> "pa.DataType":
    """Returns the type of a column. Raises InputError for none, or two, of the name; `option` chooses it."""
    found = column_type(schema, column)
    if found is None:
        raise _missing_field(path, column, schema.names, option)
    return found


def _lookup(row: Mapping[str, Any], field: str) -> Any:
    """Returns the value of a field, or `_MISSING`; dots in its name lead into objects, unless a field has that name."""
    if field in row:
        return row[field]
    value: Any = row
    for name in field.split("."):
        if not isinstance(value, dict) or name not in value:
            return _MISSING
        value = value[name]
    return value


def _missing_field(where: str, field: str, found: Iterable[str], option: str) -> InputError:
    names = textwrap.shorten(", ".join(found), _SHOWN_CHARACTERS, placeholder=" and more")
    return InputError(
        f'{where}: no field "{field}", or several; found {names or "none"}; pass {option} NAME, or NAME.NAME for a '
        "field within a field, and give a table without names a header"
    )


def token_documents(path: str, start: int, end: int | None, column: str, tokenizer: Tokenizer) -> Iterator[list[bytes]]:
    """Yields the sentences of each document in the row groups [start, end) of a Parquet file, or in an Arrow file.

    A sentence is its ids as bytes of `token_dtype`; empty sentences and documents are dropped.

    Raises:
      InputError: the file is no Parquet or Arrow file, is damaged, or has no such column of lists of integers; or, with
        the row, an id is null, not in the vocabulary, or that of a special token other than [UNK].
    """
    kind = named_format(path)
    if kind not in COLUMNAR:
        raise InputError(f"ids_field={column}: got {path}, expected only Parquet or Arrow files (.parquet, .arrow)")
    special = {tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id}
    known = set(range(tokenizer.vocab_size)) - special
    dtype = token_dtype(tokenizer.vocab_size)
    with columnar_file(path, kind) as file:
        has_sentences = _has_sentences(path, column, _type_of(path, file.schema, column, "--ids_field"))
        for first, values in file.batches(start, end, column):
            for row, document in enumerate(values.to_pylist(), first):
                sentences = list(filter(None, (document or []) if has_sentences else [document]))
                if not known.issuperset(itertools.chain.from_iterable(sentences)):
                    token = next(token for token in itertools.chain(*sentences) if token not in known)
                    raise InputError(
                        f"{path}: row {row}: got the id {token}; expected those of --vocab without special tokens"
                    )
                if sentences:
                    yield [np.array(ids, dtype).tobytes() for ids in sentences]


def _has_sentences(path: str, column: str, found: "pa.DataType") -> bool:
    """Returns True for lists of lists of ids, False for lists of ids. Raises InputError for any other type."""
    import pyarrow as pa

    inner, depth = found, 0
    while pa.types.is_list(inner) or pa.types.is_large_list(inner) or pa.types.is_fixed_size_list(inner):
        inner, depth = inner.value_type, depth + 1
    if depth not in (1, 2) or not pa.types.is_integer(inner):
        raise InputError(f'{path}: column "{column}" is of type {found}, expected list<int32> or list<list<int32>>')
    return depth == 2
