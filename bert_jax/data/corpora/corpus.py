"""Parallel reading of documents from corpora: text, JSON lines, tables, WikiExtractor files and TFDS datasets.

`expand` resolves inputs to files, `plan` splits the files into slices that can be read independently, and `read` yields
the documents of one slice. Every document belongs to exactly one slice: reading the slices in order yields the same
documents as reading the files sequentially, for any slice size.

    options = CorpusOptions()
    for piece in plan(["books/*.txt.gz", "wiki.parquet", "tfds:wikipedia/20230601.en"], options):
        for document in read(piece, options):
            ...

| format | recognized by | a slice is a range of | reader |
| --- | --- | --- | --- |
| Parquet, Arrow | suffix | row groups, record batches | `columnar_corpus` |
| CSV, TSV | suffix | the file | `csv_corpus` |
| JSON lines | suffix `.jsonl`, `.ndjson`, `.json`, or a first line such as `{"id":` | bytes | `json_corpus` |
| WikiExtractor's | `<doc ` at the start | bytes | `text_corpus` |
| plain text | any other name | bytes | `text_corpus` |
| TFDS | `tfds:NAME` | examples | `tfds_corpus` |
| docstrings | `pydoc`, `pydoc:NAME` | the input | `pydoc_corpus` |

Text, JSON lines, CSV and TSV are also read as `.gz`, `.bz2` or `.zst`; such a file is one slice. The text of a record
is its field `CorpusOptions.text_field`.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bert_jax.data.corpora import pydoc_corpus, tfds_corpus
from bert_jax.data.corpora.columnar_corpus import columnar_documents, columnar_slices
from bert_jax.data.corpora.corpus_inputs import expand, is_local_file, without_own_files
from bert_jax.data.corpora.corpus_options import TEXT_FIELD, CorpusOptions
from bert_jax.data.corpora.csv_corpus import csv_documents
from bert_jax.data.corpora.documents import documents_of
from bert_jax.data.corpora.json_corpus import json_documents
from bert_jax.data.corpora.text_corpus import text_documents, wiki_documents
from bert_jax.errors import InputError
from bert_jax.files import provenance, remote
from bert_jax.files.text_files import COMPRESSED, file_bytes, text_format

SLICE_BYTES = 8 << 20
"""Bytes on disk that one task reads."""
_GROUP_FILES = 1024  # maximum, since opening a remote file takes a request
_RECORDED_FILES = 1000  # in a provenance record; the version of a remote file takes a request


@dataclass(frozen=True)
class Slice:
    """Part of a corpus that one worker reads: the documents of the range [start, end) of a file.

    Attributes:
      path: the file, "pydoc", "pydoc:NAME", or "tfds:NAME:SPLIT:FEATURE".
      start, end: byte offsets, or indices of Parquet row groups, Arrow record batches or a TFDS dataset's examples; 0
        and None for the whole file.
      bytes: the size on disk, for progress bars.
    """

    path: str
    start: int
    end: int | None
    bytes: int


def plan(
    inputs: Sequence[str], options: CorpusOptions, slice_bytes: int = SLICE_BYTES, *, vocabulary: str = ""
) -> list[Slice]:
    """Splits a corpus into slices of about `slice_bytes` bytes, in the order of `expand`.

    Files of prepared datasets and of the `vocabulary`, a path, are skipped.

    Compressed files, CSV, "pydoc", "pydoc:NAME" and, with `documents="file"`, plain text are one slice each.

    Raises:
      InputError: as `expand`, an unreadable file, a file that is neither text nor a table, a TFDS dataset that is not
        prepared, or a `text_field` for inputs none of which has fields.
    """
    files = without_own_files(expand(inputs, options.text_field), vocabulary)
    if options.text_field != TEXT_FIELD and not any(map(_has_fields, files)):
        raise InputError(
            f"--text_field={options.text_field}: got only inputs without fields, such as {files[0]}; expected JSON "
            "lines, Parquet, Arrow, CSV, TSV or TFDS; drop the option"
        )
    return slices_of(files, options, slice_bytes)


def slices_of(files: Sequence[str], options: CorpusOptions, slice_bytes: int = SLICE_BYTES) -> list[Slice]:
    """Splits files of `expand` into slices, as `plan` does."""
    if slice_bytes < 1:
        raise InputError(f"slice_bytes={slice_bytes}: must be at least 1")
    slices: list[Slice] = []
    for path in files:
        if tfds_corpus.is_tfds(path):
            slices += _example_slices(path, slice_bytes)
        elif pydoc_corpus.is_pydoc(path):
            slices.append(Slice(path, 0, None, pydoc_corpus.source_bytes(path)))
        else:
            slices += _file_slices(path, options, slice_bytes)
    return slices


def _file_slices(path: str, options: CorpusOptions, slice_bytes: int) -> list[Slice]:
    size = file_bytes(path)
    whole = [Slice(path, 0, None, size)]
    if size <= slice_bytes or path.lower().endswith(tuple(COMPRESSED)):
        return whole
    kind = text_format(path)
    if kind in ("csv", "tsv") or (kind == "text" and options.documents == "file"):
        return whole
    if kind in ("parquet", "arrow"):
        return [Slice(path, *cut) for cut in columnar_slices(path, kind, size, slice_bytes)]
    cuts = [*range(0, size, slice_bytes), size]
    return [Slice(path, start, end, end - start) for start, end in pairwise(cuts)]


def _has_fields(path: str) -> bool:
    if pydoc_corpus.is_pydoc(path):
        return False
    return tfds_corpus.is_tfds(path) or text_format(path) not in ("text", "wiki")


def group_slices(slices: Sequence[Slice]) -> list[tuple[Slice, ...]]:
    """Groups consecutive small files of a `plan` into groups of up to SLICE_BYTES, one group a task.

    Otherwise, work and temporary files of `prepare` would grow with the number of files times the number of shards.
    """
    joined: list[list[Slice]] = []
    size = 0
    for piece in slices:
        is_whole = piece.start == 0 and piece.end is None
        if joined and is_whole and size + piece.bytes <= SLICE_BYTES and len(joined[-1]) < _GROUP_FILES:
            joined[-1].append(piece)
            size += piece.bytes
        else:
            joined.append([piece])
            size = piece.bytes if is_whole else SLICE_BYTES + 1
    return [tuple(group) for group in joined]


def fingerprint(path: str) -> str:
    """Returns a string that identifies the content of a file of a `plan`; it changes with any change to the file."""
    if pydoc_corpus.is_pydoc(path):
        return pydoc_corpus.fingerprint(path)
    if tfds_corpus.is_tfds(path):
        return tfds_corpus.fingerprint(path)
    if remote.is_remote(path):
        store, name = remote.store_of(path)
        with remote.store_errors(path):
            return str(store.ukey(name))
    status = os.stat(path)
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def describe_files(slices: Sequence[Slice], described: Mapping[str, Any], options: CorpusOptions) -> dict[str, Any]:
    """Returns the files of a `plan` for a provenance record, as JSON.

    Keys: `count`, `bytes`, `text_field` unless it is the default, and `files`, the first `_RECORDED_FILES`: `path`, and
    `bytes` and `modified` of a local file or the `version` of another input; or the value in `described` of its path.
    """
    paths = list(dict.fromkeys(piece.path for piece in slices))
    field = {} if options.text_field == TEXT_FIELD else {"text_field": options.text_field}
    return {
        "count": len(paths),
        "bytes": sum(piece.bytes for piece in slices),
        **field,
        "files": [described.get(path) or _describe_file(path) for path in paths[:_RECORDED_FILES]],
    }


def _describe_file(path: str) -> dict[str, Any]:
    if not is_local_file(path):
        return {"path": path, "version": fingerprint(path)}
    status = os.stat(path)
    return {"path": os.path.abspath(path), "bytes": status.st_size, "modified": provenance.utc(status.st_mtime)}


def _example_slices(path: str, slice_bytes: int) -> list[Slice]:
    examples, size = tfds_corpus.size(path)
    count = max(1, min(examples, -(-size // slice_bytes)))
    cuts = [(examples * i // count, size * i // count) for i in range(count + 1)]
    return [Slice(path, start, end, after - before) for (start, before), (end, after) in pairwise(cuts)]


def read(piece: Slice, options: CorpusOptions) -> Iterator[str]:
    r"""Yields the documents of a slice, in the file's order.

    A document is its lines joined by "\n", each stripped of white space, without blank lines; empty documents are
    dropped. Only "\n" ends a line ("\r\n" too, as "\r" is white space): U+2028 and similar characters do not.
    Documents that are split because of `max_document_bytes` are logged as one warning.

    Raises:
      InputError: with the file and the line (from 1, counted in the whole file): invalid UTF-8, a record without a
        string in `text_field`, a truncated or corrupt compressed file, or a line of more than MAX_LINE_BYTES. With the
        file only: a file that cannot be opened, or is neither text nor a table. For other formats, as their readers.
    """
    path, start, end = piece.path, piece.start, piece.end
    if pydoc_corpus.is_pydoc(path):
        yield from pydoc_corpus.documents(path)
        return
    if tfds_corpus.is_tfds(path):
        yield from _read_examples(piece, options)
        return
    kind = text_format(path)
    if kind in ("parquet", "arrow"):
        yield from columnar_documents(path, kind, start, end, options)
    elif kind in ("csv", "tsv"):
        yield from csv_documents(path, kind, options)
    elif kind == "json":
        yield from json_documents(path, start, end, options)
    elif kind == "wiki":
        yield from wiki_documents(path, start, end, options)
    else:
        yield from text_documents(path, start, end, options)


def _read_examples(piece: Slice, options: CorpusOptions) -> Iterator[str]:
    end = tfds_corpus.size(piece.path)[0] if piece.end is None else piece.end
    texts = tfds_corpus.texts(piece.path, piece.start, end, options.errors)
    return documents_of(texts, options, lambda number: f"{piece.path}: example {number}")
