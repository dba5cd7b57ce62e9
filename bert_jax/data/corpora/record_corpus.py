"""Reads documents from records: a line of JSON, or a row of CSV, TSV, Parquet or Arrow, whose text is in one field.

Parquet and Arrow may have token ids in place of text: a row is a list of sentences, which are lists of ids; or one list
of ids, a document of one sentence. A slice of JSON lines, or of TSV without quotes, is a range of bytes, one of a
Parquet or Arrow file a range of its row groups or record batches. Other files are one slice.
"""

import difflib
import itertools
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_jax.data.corpora.corpus_options import CorpusOptions
from bert_jax.errors import InputError
from bert_jax.files import text_files
from bert_jax.files.tables import (
    BadRow,
    column_names,
    column_type,
    columnar_file,
    json_rows,
    separated_rows,
    separator_of,
)
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
) -> Iterator[tuple[str, str]]:
    """Yields (location of the row, text) of the row groups or record batches [start, end) of a Parquet or Arrow file.

    A row whose text is null is skipped. Raises InputError for a damaged file, no column `text_field`, or one of another
    type than strings and bytes; or, with the row, for invalid UTF-8 or a text of more than MAX_LINE_BYTES.
    """
    import pyarrow as pa

    field = options.text_field
    with columnar_file(path, kind) as file:
        found = checked_column(path, file.schema, field, "--text_field")
        if not _is_text(found):
            usable = ", ".join(column.name for column in file.schema if _is_text(column.type))
            raise InputError(
                f'{path}: column "{field}" is of type {found}, expected strings; columns of strings: '
                f"{usable or 'none'}; pass --text_field NAME"
            )
        for where, first, values in file.batches(start, end, field):
            for row, value in enumerate(values.cast(pa.large_binary()).to_pylist(), first):
                if value is not None:
                    yield f"{where}{row}", _decode(value, f"{path}: {where}{row}", utf8)


def row_texts(
    path: str, kind: str, start: int, end: int | None, options: CorpusOptions, utf8: Utf8
) -> Iterator[tuple[int, str]]:
    """Yields (offset, text) of the rows that begin in bytes [start, end) of JSON lines, CSV or TSV.

    A row whose text is null is skipped. Raises InputError, with the line, for a row that is invalid or has no string in
    the field `text_field`.
    """
    field, quotes = options.text_field, kind == "csv" or options.tsv_quotes
    header = next(lines_from(path, 0, None), (0, b""))[1]
    lines = itertools.takewhile(lambda line: end is None or line[0] < end, lines_from(path, start, end))
    rows: Iterable[tuple[int, Mapping[str, Any] | BadRow]]
    if kind == "json":
        rows = json_rows(lines, utf8)
    else:
        separator = separator_of(kind, header)
        try:
            names = column_names(header, separator, utf8, quotes=quotes)
        except ValueError as error:
            raise InputError(f"{path}:1: {error}") from error
        rows = separated_rows(itertools.islice(lines, start == 0, None), separator, names, utf8, quotes=quotes)
    for offset, row in rows:
        if isinstance(row, BadRow):
            raise InputError(f"{locate(path, offset)}: {row.problem}")
        text = _lookup(row, field)
        if isinstance(text, str):
            yield offset, text
        elif text is _MISSING:
            where = locate(path, offset) if kind == "json" else f"{path}:1"
            detail = {"json": "", "tsv": ", or --tsv_quotes if fields are in quotes"}.get(
                kind, ", or add a header if this line is not one"
            )
            raise _missing_field(where, field, _nested_names(row.items()), "--text_field", detail)
        elif text is not None:
            raise InputError(
                f'{locate(path, offset)}: "{field}" is of type {type(text).__name__}, expected a string as in '
                f'{{"{field}": "..."}}'
            )


def checked_column(path: str, schema: "pa.Schema", column: str, option: str) -> "pa.DataType":
    """Returns the type of a column. Raises InputError for none or two of the name; `option` chooses it."""
    if schema.names.count(column) > 1:
        raise InputError(f'{path}: got two columns "{column}", expected one; rename one of them')
    found = column_type(schema, column)
    if found is None:
        names = _nested_names((field.name, field.type) for field in schema)
        raise _missing_field(path, column, names, option)
    return found


def _decode(value: bytes, where: str, utf8: Utf8) -> str:
    limit = text_files.MAX_LINE_BYTES
    if len(value) > limit:
        raise InputError(
            f"{where}: got a text of {len(value):,} bytes, expected at most {limit:,}; split it into several rows"
        )
    try:
        return utf8.decode(value)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from error


def _is_text(found: "pa.DataType") -> bool:
    import pyarrow as pa

    try:
        pa.nulls(0, found).cast(pa.large_binary())
    except pa.ArrowNotImplementedError:
        return False
    return True


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


def _nested_names(fields: Iterable[tuple[str, Any]], prefix: str = "") -> Iterator[str]:
    """Yields the name of each field; those of an object or struct within it follow it, joined by dots."""
    for name, value in fields:
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _nested_names(value.items(), f"{prefix}{name}.")
        elif str(value).startswith("struct<"):
            yield from _nested_names(((inner.name, inner.type) for inner in value), f"{prefix}{name}.")


def _missing_field(where: str, field: str, found: Iterable[str], option: str, detail: str = "") -> InputError:
    """Returns the error for a record or table without the field, with the names found and the most similar one."""
    names = list(found)
    close = difflib.get_close_matches(field, names, 1)
    shown = textwrap.shorten(", ".join(names), _SHOWN_CHARACTERS, placeholder=" and more")
    fix = f"pass {option} {close[0] if close else 'NAME'}{detail}"
    return InputError(f'{where}: no field "{field}", found {shown or "none"}; {fix}')


def token_documents(path: str, start: int, end: int | None, column: str, tokenizer: Tokenizer) -> Iterator[list[bytes]]:
    """Yields the sentences of each document in the row groups or record batches [start, end) of a file.

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
        has_sentences = _depth(path, column, checked_column(path, file.schema, column, "--ids_field")) == 2
        for where, first, values in file.batches(start, end, column):
            for row, document in enumerate(values.to_pylist(), first):
                sentences = list(filter(None, (document or []) if has_sentences else [document]))
                if not known.issuperset(itertools.chain.from_iterable(sentences)):
                    token = next(token for token in itertools.chain(*sentences) if token not in known)
                    raise InputError(f"{path}: {where}{row}: {_problem(token, special, tokenizer)}")
                if sentences:
                    yield [np.array(ids, dtype).tobytes() for ids in sentences]


def _problem(token: int | None, special: set[int], tokenizer: Tokenizer) -> str:
    if token in special:
        return (
            f"got the id {token} of a special token, which prepare adds itself; tokenize with add_special_tokens=False"
        )
    size = tokenizer.vocab_size
    return (
        f"got the id {'null' if token is None else token}, expected 0 to {size - 1}; pass the --vocab of its tokenizer"
    )


def _depth(path: str, column: str, found: "pa.DataType") -> int:
    """Returns 1 for lists of ids, 2 for lists of lists of ids. Raises InputError for any other type."""
    import pyarrow as pa

    inner, depth = found, 0
    while pa.types.is_list(inner) or pa.types.is_large_list(inner) or pa.types.is_fixed_size_list(inner):
        inner, depth = inner.value_type, depth + 1
    if depth not in (1, 2) or not pa.types.is_integer(inner):
        raise InputError(
            f'{path}: column "{column}" is of type {found}, expected list<int32> (a document), or list<list<int32>> '
            "(the sentences of a document)"
        )
    return depth
