"""Reads documents from records: a line of JSON, or a row of CSV, TSV, Parquet or Arrow, whose text is in one field.

Parquet and Arrow may have token ids in place of text: a row is a list of sentences, which are lists of ids; or one list
of ids, a document of one sentence. A slice of JSON lines, or of TSV, is a range of bytes, one of a Parquet file a range
of its row groups. Other files are one slice.
"""

import functools
import itertools
import operator
import textwrap
from collections.abc import Callable, Iterable, Iterator
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


def columnar_texts(
    path: str, kind: str, start: int, end: int | None, options: CorpusOptions, utf8: Utf8
) -> Iterator[str]:
    """Yields the text of each row in the row groups [start, end) of a Parquet file, or of an Arrow file.

    A row whose text is null is skipped. Raises InputError for a damaged file, no column `text_field`, or one of another
    type than strings and bytes; or, with the row, for invalid UTF-8.
    """
    import pyarrow as pa

    def as_bytes(values: "pa.Array") -> "pa.Array":
        return values.cast(pa.large_binary())

    for where, value in _column(path, kind, start, end, options.text_field, "--text_field", as_bytes):
        try:
            yield utf8.decode(value)
        except ValueError as error:
            raise InputError(f"{where}: {error}") from error


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
    for where, document in _column(path, kind, start, end, column, "--ids_field", _as_sentences):
        sentences = list(filter(None, document))
        if not known.issuperset(itertools.chain.from_iterable(sentences)):
            token = next(token for token in itertools.chain(*sentences) if token not in known)
            raise InputError(f"{where}: got the id {token}; expected those of --vocab without special tokens")
        if sentences:
            yield [np.array(ids, dtype).tobytes() for ids in sentences]


def _as_sentences(values: "pa.Array") -> "pa.Array":
    """Returns lists of lists of ids; one of lists of ids has one sentence in each. Raises for any other type."""
    import pyarrow as pa

    inner, depth = values.type, 0
    while pa.types.is_nested(inner) and hasattr(inner, "value_type"):
        inner, depth = inner.value_type, depth + 1
    if depth not in (1, 2) or not pa.types.is_integer(inner):
        raise pa.ArrowNotImplementedError
    return values if depth == 2 else pa.ListArray.from_arrays(np.arange(len(values) + 1, dtype=np.int32), values)


def _column(
    path: str, kind: str, start: int, end: int | None, column: str, option: str,
    convert: Callable[["pa.Array"], "pa.Array"],
) -> Iterator[tuple[str, Any]]:  # fmt: skip
    """Yields the location and the converted value of each row in which the column, chosen by `option`, is not null."""
    import pyarrow as pa

    with columnar_file(path, kind) as file:
        found = column_type(file.schema, column)
        if found is None:
            raise _missing_field(path, column, file.schema.names, option)
        try:
            convert(pa.nulls(0, found))
        except pa.ArrowNotImplementedError as error:
            expected = f"strings, or with --ids_field list<int32> or list<list<int32>>; see {option}"
            raise InputError(f'{path}: column "{column}" is of type {found}, expected {expected}') from error
        for first, values in file.batches(start, end, column):
            for row, value in enumerate(convert(values).to_pylist(), first):
                if value is not None:
                    yield f"{path}: row {row}", value


def row_texts(path: str, kind: str, start: int, end: int | None, options: CorpusOptions, utf8: Utf8) -> Iterator[str]:
    """Yields the text of each row that begins in bytes [start, end) of JSON lines, CSV or TSV.

    The text is in the field `text_field`; dots in it lead into objects, unless a field has that name. A row whose text
    is null is skipped. Raises InputError, with the line, for a row that is invalid or has no string there.
    """
    field = options.text_field
    lines = itertools.takewhile(lambda line: end is None or line[0] < end, lines_from(path, start, end))
    for offset, row in text_rows(path, kind, lines, utf8, starts=start == 0):
        if isinstance(row, BadRow):
            raise InputError(f"{locate(path, offset)}: {row.problem}")
        try:
            text = row[field] if field in row else functools.reduce(operator.getitem, field.split("."), row)
        except (KeyError, TypeError) as error:
            raise _missing_field(locate(path, offset), field, row, "--text_field") from error
        if isinstance(text, str):
            yield text
        elif text is not None:
            raise InputError(f'{locate(path, offset)}: "{field}" is of type {type(text).__name__}, expected a string')


def _missing_field(where: str, field: str, found: Iterable[str], option: str) -> InputError:
    names = textwrap.shorten(", ".join(found), _SHOWN_CHARACTERS, placeholder=" and more")
    return InputError(
        f'{where}: no field "{field}", or several; found {names or "none"}; pass {option} NAME, or NAME.NAME for a '
        "field within a field, and give a table without names a header"
    )
