"""Parallel reading of documents from corpora: text, JSON lines, tables and TFDS datasets.

`expand` resolves inputs to files, `plan` splits the files into slices that can be read independently, and `read` yields
the documents of one slice. Every document belongs to exactly one slice: reading the slices in order yields the same
documents as reading the files sequentially, for any slice size.

    options = CorpusOptions()
    for piece in plan(["books/*.txt.gz", "wiki.parquet", "tfds:wikipedia/20230601.en"], options):
        for document in read(piece, options):
            ...

| format | recognized by | a slice is a range of |
| --- | --- | --- |
| Parquet, Arrow | suffix | row groups of Parquet |
| CSV | suffix | the file |
| TSV | suffix | bytes |
| JSON lines | suffix `.jsonl`, `.ndjson`, `.json`, or a first line such as `{"id":` | bytes |
| plain text | any other name | bytes |
| TFDS | `tfds:NAME` | examples |

All but Parquet, Arrow and TFDS are also read as `.gz`, `.bz2`, `.xz` or `.zst`; such a file is one slice. The text of a
record is its field `CorpusOptions.text_field`. Parquet and Arrow may have token ids in its place: a row is a list of
sentences, which are lists of ids; or one list of ids, a document of one sentence.

Ownership of documents. In plain text, a *boundary* is a blank line. A slice [start, end) owns the documents whose last
boundary before them begins in [start, end); the slice at 0 also owns the first document of the file. A slice reads past
its end to finish its last document, and never reads before its start to find its first. A document that is too long is
split at lines that depend only on the file's bytes: with M = `max_document_bytes`, of which `start` is a multiple, at
the first line that begins at or after k * M if no boundary begins in the M bytes before k * M. A document of up to M
bytes is therefore never split, one of 2 M bytes always is, no part is larger than 2 M bytes and a line, and a file
without any blank line is still distributed over its slices.
"""

import functools
import itertools
import logging
import operator
import os
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from bert_jax.data.corpora import tfds_corpus
from bert_jax.data.corpora.corpus_inputs import expand, is_local_file
from bert_jax.data.options import CorpusOptions
from bert_jax.errors import InputError
from bert_jax.files import text_files
from bert_jax.files.tables import BadRow, column_type, columnar_file, text_rows
from bert_jax.files.text_files import Utf8, lines_from, locate, text_format
from bert_jax.progress import quiet
from bert_jax.text.tokenizer import Tokenizer, token_dtype

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)
T = TypeVar("T")

SLICE_BYTES = 8 << 20
"""Bytes on disk that one task reads."""
COLUMNAR = ("parquet", "arrow")
_GROUP_FILES = 1024  # maximum, since opening a remote file takes a request
_RECORDED_FILES = 1000  # in a provenance record

_SAMPLED_SLICES, _SAMPLED_DOCUMENTS, _SAMPLED_CHARACTERS = 8, 100, 1 << 14  # of a corpus, a slice, a document
_HTML = re.compile(
    r"</?(?:a|b|br|div|em|h[1-6]|i|img|li|p|span|strong|table|td|tr|ul)\b[^<>]{0,200}>|&(?:[a-z]{2,8}|#\d+);"
)
_FREQUENT_HTML = 2000  # characters of text a tag or entity, below which they are frequent
_FREQUENT_I = 0.02  # of the letters i of any kind: İ and ı are some 25% of them in Turkish


@dataclass(frozen=True)
class Slice:
    """Part of a corpus that one worker reads: the documents of the range [start, end) of a file.

    Attributes:
      path: the file, or "tfds:NAME:SPLIT:FEATURE".
      start, end: byte offsets, or indices of Parquet row groups or a TFDS dataset's examples; 0
        and None for the whole file.
      bytes: the size on disk, for progress bars.
    """

    path: str
    start: int
    end: int | None
    bytes: int


def plan(inputs: Sequence[str], options: CorpusOptions, slice_bytes: int = SLICE_BYTES) -> list[Slice]:
    """Splits a corpus into slices of about `slice_bytes` bytes, in the order of `expand`.

    Compressed files, CSV and, with `documents="file"`, plain text are one slice each. Other text is cut in slices of
    `max_document_bytes`.

    Raises:
      InputError: as `expand`, an unreadable file, a file that is neither text nor a table, or a TFDS dataset that is
        not prepared.
    """
    files = expand(inputs, options.text_field)
    return [Slice(path, *cut) for path in files for cut in _cuts(path, options, slice_bytes)]


def _cuts(path: str, options: CorpusOptions, slice_bytes: int) -> list[tuple[int, int | None, int]]:
    """Returns (start, end, bytes) of the slices of a file."""
    if tfds_corpus.is_tfds(path):
        count, size = tfds_corpus.examples(path)
    else:
        size = text_files.file_bytes(path)
        if size <= slice_bytes or path.lower().endswith(tuple(text_files.COMPRESSED)):
            return [(0, None, size)]
        kind = text_format(path)
        if kind == "csv" or (kind == "text" and options.documents == "file"):
            return [(0, None, size)]
        if kind not in COLUMNAR:
            step = options.max_document_bytes if kind == "text" else slice_bytes
            return [(start, end, end - start) for start, end in itertools.pairwise([*range(0, size, step), size])]
        with columnar_file(path, kind) as file:
            count = len(file.weights)
        if not count:  # Arrow, or an empty split
            return [(0, None, size)]
    parts = max(1, min(count, size // slice_bytes))
    bounds = [count * part // parts for part in range(parts + 1)]
    return [(start, end, size // parts) for start, end in itertools.pairwise(bounds)]


def grouped(items: Iterable[T], weight: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yields lists of consecutive items, each as soon as its weight reaches `limit`."""
    group: list[T] = []
    total = 0
    for item in items:
        group.append(item)
        total += weight(item)
        if total >= limit:
            yield group
            group, total = [], 0
    if group:
        yield group


def group_slices(slices: Sequence[Slice]) -> list[list[Slice]]:
    """Groups the slices of consecutive small files of a `plan`, one group a task.

    Otherwise, work and temporary files of `prepare` would grow with the number of files times the number of shards.
    """
    return list(grouped(slices, lambda piece: max(piece.bytes, SLICE_BYTES // _GROUP_FILES), SLICE_BYTES))


def describe_files(slices: Sequence[Slice], inputs: Mapping[str, str]) -> dict[str, Any]:
    """Returns the files of a `plan` for a provenance record, as JSON.

    Keys: `count`, `bytes`, and `files`, the first `_RECORDED_FILES`, with `path` and `bytes`. `inputs` has the path of
    each input by its name, which differ for a stream.
    """
    sizes: Counter[str] = Counter()
    for piece in slices:
        sizes[piece.path] += piece.bytes
    streams = {path: name for name, path in inputs.items() if path != name}
    paths = {path: os.path.abspath(path) if is_local_file(path) else path for path in sizes} | streams
    return {
        "count": len(sizes),
        "bytes": sizes.total(),
        "files": [{"path": paths[path], "bytes": sizes[path]} for path in list(sizes)[:_RECORDED_FILES]],
    }


def read(piece: Slice, options: CorpusOptions) -> Iterator[str]:
    r"""Yields the documents of a slice, in the file's order.

    A document is its lines joined by "\n", each stripped of white space, without blank lines; empty documents are
    dropped. Only "\n" ends a line ("\r\n" too, as "\r" is white space; and "\r" in a file without "\n"): U+2028 and
    similar characters do not. The lines and values with invalid UTF-8 that `errors` replaces are counted in a warning.

    Raises:
      InputError: with the file and the line (from 1, counted in the whole file): invalid UTF-8, a record without a
        string in `text_field`, a truncated or corrupt compressed file, or a line of more than MAX_LINE_BYTES. With the
        file only: a file that cannot be opened, or is neither text nor a table. For other formats, as their readers.
    """
    path, start, end = piece.path, piece.start, piece.end
    utf8 = Utf8(options.errors)
    kind = "tfds" if tfds_corpus.is_tfds(path) else text_format(path)
    if kind == "text":
        yield from _documents(path, start, end, options, utf8)
    else:
        if kind == "tfds":
            texts = tfds_corpus.texts(path, start, end, utf8)
        else:
            texts = (_columnar_texts if kind in COLUMNAR else _row_texts)(path, kind, start, end, options, utf8)
        documents = ("\n".join(filter(None, map(str.strip, text.split("\n")))) for text in texts)
        yield from filter(None, documents)
    if utf8.replaced:
        where = path if end is None else f"{path}, {start:,} to {end:,}"
        log.warning("%s: replaced invalid UTF-8 by U+FFFD in %s line(s) or value(s)", where, f"{utf8.replaced:,}")


def _is_blank(line: bytes) -> bool:
    """Returns True for a line of white space, that of Unicode included, such as U+00A0 and U+3000."""
    return not line.strip() or not (line.isascii() or line.decode("utf-8", "replace").strip())


def _documents(path: str, start: int, end: int | None, options: CorpusOptions, utf8: Utf8) -> Iterator[str]:
    """Yields the documents of plain text that a slice owns; see the module's docstring."""
    limit, has_blank_lines = options.max_document_bytes, options.documents == "blank_line"
    before = itertools.takewhile(lambda line: line[0] < start, lines_from(path, start - limit, start) if start else ())
    is_quiet = not any(has_blank_lines and _is_blank(line) for _, line in before)
    block, last_boundary = max(start // limit - 1, 0), -1 if is_quiet else start - 1
    lines: list[str] = []  # of the current document
    owned = start == 0
    for offset, line in lines_from(path, start, end):
        boundary = has_blank_lines and _is_blank(line)
        past, block = block, offset // limit
        broken = not boundary and block > past and last_boundary < (block - 1) * limit
        if lines and (boundary or broken):
            yield "\n".join(lines)
            lines = []
        owned = owned or boundary or broken
        if end is not None and offset >= end and (boundary or broken or not owned):
            return
        if boundary:
            last_boundary = offset
        elif owned and (text := text_files.decode_line(line, path, offset, utf8).strip()):
            lines.append(text)
    if lines:
        yield "\n".join(lines)


# --- Records -------------------------------------------------------------------------------------------------------


def _columnar_texts(
    path: str, kind: str, start: int, end: int | None, options: CorpusOptions, utf8: Utf8
) -> Iterator[str]:
    """Yields the text of each row in the row groups [start, end) of a Parquet file, or of an Arrow file.

    A row whose text is null is skipped. Raises InputError for a damaged file, no column `text_field`, or one of another
    type than strings and bytes; or, with the row, for invalid UTF-8.
    """
    import pyarrow as pa

    as_bytes = operator.methodcaller("cast", pa.large_binary())
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
    kind = text_files.named_format(path)
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


def _row_texts(path: str, kind: str, start: int, end: int | None, options: CorpusOptions, utf8: Utf8) -> Iterator[str]:
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
            text = row[field] if field in row else functools.reduce(_member, field.split("."), row)
        except (KeyError, TypeError) as error:
            raise _missing_field(locate(path, offset), field, row, "--text_field") from error
        if isinstance(text, str):
            yield text
        elif text is not None:
            raise InputError(f'{locate(path, offset)}: "{field}" is of type {type(text).__name__}, expected a string')


def _member(value: Any, name: str) -> Any:
    return None if value is None else value[name]  # as in the columns of a table


def _missing_field(where: str, field: str, found: Iterable[str], option: str) -> InputError:
    names = textwrap.shorten(", ".join(found), 500, placeholder=" and more")
    return InputError(
        f'{where}: no field "{field}", or several; found {names or "none"}; pass {option} NAME, or NAME.NAME for a '
        "field within a field, and give a table without names a header"
    )


# --- Warnings ------------------------------------------------------------------------------------------------------


def warn_of_text(slices: Sequence[Slice], options: CorpusOptions, *, lowercase: bool) -> None:
    """Logs a warning if a sample has many HTML tags or entities, or the letters i that lower-casing confuses.

    Text that cannot be read is left to the reader of the whole corpus.
    """
    text = ""
    with quiet(), suppress(InputError):  # all slices are read later, with their warnings and errors
        text = "\n".join(
            document[:_SAMPLED_CHARACTERS]
            for piece in slices[:: -(-len(slices) // _SAMPLED_SLICES) or 1]
            for document in itertools.islice(read(piece, options), _SAMPLED_DOCUMENTS)
        )
    if len(found := _HTML.findall(text)) * _FREQUENT_HTML > len(text):
        shown = " and ".join(list(dict.fromkeys(found))[:3])
        log.warning("The text has many HTML tags and entities, such as %s, which become tokens: remove them", shown)
    special, plain = (sum(map(text.count, letters)) for letters in ("İı", "iI"))
    if lowercase and special > _FREQUENT_I * (special + plain):
        share = 100 * special / (special + plain)
        log.warning("%.0f%% of the letters i are İ or ı, which lower-casing confuses: train with --cased", share)
