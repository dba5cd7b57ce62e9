"""Parallel reading of documents from corpora: plain text, WikiExtractor files, JSON lines and TFDS datasets.

`expand` resolves inputs to files, `plan` splits the files into slices that can be read independently, and `read` yields
the documents of one slice. Every document belongs to exactly one slice: reading the slices in order yields the same
documents as reading the files sequentially, for any slice size.

    options = CorpusOptions()
    for piece in plan(["books/*.txt.gz", "wiki.jsonl", "tfds:wikipedia/20230601.en"], options):
        for document in read(piece, options):
            ...

Files are plain text, JSON lines with a `text` field, or output of WikiExtractor, each also as `.gz`, `.bz2` or `.zst`.
JSON lines have the suffix `.jsonl`, `.ndjson` or `.json`, or begin as a JSON object does, such as `{"id":`. A file that
begins with `<doc id=` is WikiExtractor's. `file_formats` refuses other formats, such as CSV, HTML and Parquet. All
other files are plain text. An input `tfds:...` is a TFDS dataset, see `tfds_corpus`: a slice is a range of examples,
and an example is read like a JSON line. "pydoc" and "pydoc:NAME" are docstrings, see `pydoc_corpus`.

Ownership of documents. In plain text, a *boundary* is a blank line (in WikiExtractor files, a `<doc ...>` line). A
slice [start, end) owns the documents whose last boundary before them begins in [start, end); the slice at 0 also
owns the first document of the file. A slice reads past its end to finish its last document, and never reads before
its start to find its first. A document that is too long is split at lines that depend only on the file's bytes: with
M = `max_document_bytes`, at the first line that begins at or after k * M if no boundary begins in the M bytes
before k * M. A document of up to M bytes is therefore never split, one of 2 M bytes always is, no part is larger
than 2 M bytes and a line, and a file without any blank line is still distributed over its slices.
"""

import html
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import has_magic
from itertools import pairwise
from pathlib import Path
from typing import Any

from bert_jax.data.preparation import pydoc_corpus, tfds_corpus
from bert_jax.data.preparation.options import CorpusOptions
from bert_jax.errors import InputError
from bert_jax.files import local_listing, provenance, remote
from bert_jax.files.file_formats import check_name, not_utf8, text_format
from bert_jax.files.line_reader import file_bytes, first_line_start, is_compressed, line_number, lines_from

log = logging.getLogger(__name__)

SLICE_BYTES = 8 << 20
"""Bytes on disk that one task reads."""
_GROUP_FILES = 1024  # maximum, since opening a remote file takes a request
_RECORDED_FILES = 1000  # in a provenance record; the version of a remote file takes a request
_WIKI_DOC = b"<doc "
_WIKI_TITLE = re.compile(rb'\btitle="(.*)"\s*>\s*$')
_JSON_TYPES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}


@dataclass(frozen=True)
class Slice:
    """Part of a corpus that one worker reads: the documents owned by bytes [start, end) of a file.

    Attributes:
      path: the file, "pydoc", "pydoc:NAME", or "tfds:NAME:SPLIT:FEATURE".
      start, end: byte offsets, or indices of a TFDS dataset's examples; 0 and None for the whole file.
      bytes: the size on disk, for progress bars.
    """

    path: str
    start: int
    end: int | None
    bytes: int


def expand(inputs: Sequence[str]) -> list[str]:
    """Resolves paths, folders and glob patterns to files.

    Each input's files are sorted, inputs keep their order, and duplicate files, links resolved, are read once. A
    folder stands for every file below it, with links to folders followed; names that begin with a dot are skipped, as
    in shell patterns. "pydoc" is unchanged, "pydoc:A,B" becomes "pydoc:A" and "pydoc:B", and "tfds:NAME" becomes
    "tfds:NAME:train:text".

    Raises:
      InputError: no input, a missing file or package, or a pattern or folder without files.
    """
    if not inputs:
        raise InputError("--input: expected at least one file, folder or pattern, or 'pydoc'")
    files: dict[str, str] = {}
    for name in inputs:
        for path in _expand_one(name):
            is_local = not (pydoc_corpus.is_pydoc(path) or tfds_corpus.is_tfds(path) or remote.is_remote(path))
            files.setdefault(os.path.realpath(path) if is_local else path, path)
    return list(files.values())


def _expand_one(name: str) -> list[str]:
    if pydoc_corpus.is_pydoc(name):
        return pydoc_corpus.expand(name)
    if tfds_corpus.is_tfds(name):
        return [tfds_corpus.normalize(name)]
    if remote.is_remote(name):
        return _expand_remote(name)
    path = Path(name)
    if path.is_file():  # First, because a file name may contain pattern characters.
        return [name]
    if path.is_dir():
        if files := local_listing.files_below(path):
            return files
        raise InputError(f"--input={name}: the folder contains no files; expected a folder or pattern with text files")
    if not has_magic(name):
        hint = local_listing.similar_name(name)
        raise InputError(f"--input={name}: not found: no such file or folder{hint}; check the path")
    if found := local_listing.matches(name):
        return found
    raise InputError(
        f"--input={name}: the pattern matches no file; check it, and quote it to protect it from the shell"
    )


def _expand_remote(name: str) -> list[str]:
    remote.parse_path(name)
    if files := remote.files(name):
        return files
    raise InputError(f"--input={name}: not found: no such file or folder, or it is empty; check the path or pattern")


def plan(inputs: Sequence[str], options: CorpusOptions, slice_bytes: int = SLICE_BYTES) -> list[Slice]:
    """Splits a corpus into slices of about `slice_bytes` bytes, in the order of `expand`.

    Compressed files, "pydoc", "pydoc:NAME" and, with `documents="file"`, plain text are one slice each.

    Raises:
      InputError: as `expand`, an unreadable file, a file whose suffix is not of a text format, or a TFDS dataset that
        is not prepared.
    """
    if slice_bytes < 1:
        raise InputError(f"slice_bytes={slice_bytes}: must be at least 1")
    slices: list[Slice] = []
    for path in expand(inputs):
        if tfds_corpus.is_tfds(path):
            slices += _example_slices(path, slice_bytes)
            continue
        if pydoc_corpus.is_pydoc(path):
            slices.append(Slice(path, 0, None, pydoc_corpus.source_bytes(path)))
            continue
        check_name(path)
        size = file_bytes(path)
        whole = size <= slice_bytes or is_compressed(path)
        if whole or (options.documents == "file" and text_format(path) == "text"):
            slices.append(Slice(path, 0, None, size))
            continue
        for start in range(0, size, slice_bytes):
            end = min(start + slice_bytes, size)
            slices.append(Slice(path, start, end, end - start))
    return slices


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
        return remote.version(path)
    status = os.stat(path)
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def describe_files(slices: Sequence[Slice]) -> dict[str, Any]:
    """Returns the files of a `plan` for a provenance record, as JSON.

    Keys: `count`, `bytes`, and `files`, the first `_RECORDED_FILES`: `path`, and `bytes` and `modified` of a local file
    or the `version` of another input.
    """
    paths = list(dict.fromkeys(piece.path for piece in slices))
    return {
        "count": len(paths),
        "bytes": sum(piece.bytes for piece in slices),
        "files": [_describe_file(path) for path in paths[:_RECORDED_FILES]],
    }


def _describe_file(path: str) -> dict[str, Any]:
    if pydoc_corpus.is_pydoc(path) or tfds_corpus.is_tfds(path) or remote.is_remote(path):
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
      InputError: with the file and the line (from 1, counted in the whole file): invalid UTF-8, a JSON line that is not
        an object with a string `text`, a truncated or corrupt compressed file, or a line of more than MAX_LINE_BYTES.
        With the file only: a file that cannot be opened or is not text. For TFDS, as `tfds_corpus.texts`.
    """
    if pydoc_corpus.is_pydoc(piece.path):
        yield from pydoc_corpus.documents(piece.path)
    elif tfds_corpus.is_tfds(piece.path):
        yield from _read_examples(piece, options)
    elif (file_format := text_format(piece.path)) == "json":
        yield from _read_json_lines(piece, options)
    elif file_format == "wiki":
        yield from _TextReader(piece, options, _is_wiki_boundary).documents()
    elif options.documents == "file":
        yield from _TextReader(piece, options, _is_never_boundary).documents()
    else:
        yield from _TextReader(piece, options, _is_blank).documents()


# Plain text and WikiExtractor files.


def _is_blank(line: bytes) -> bool:
    stripped = line.strip()
    if not stripped:
        return True
    if 0x20 < stripped[0] < 0x80:
        return False
    return not stripped.decode("utf-8", "replace").strip()  # U+00A0, U+3000 and similar are blank, too.


def _is_wiki_boundary(line: bytes) -> bool:
    return line.startswith(_WIKI_DOC)


def _is_never_boundary(line: bytes) -> bool:
    return False


class _TextReader:
    """Reader of a slice of a text file. The module's docstring defines ownership and splitting of documents."""

    def __init__(self, piece: Slice, options: CorpusOptions, is_boundary: Callable[[bytes], bool]) -> None:
        self.path = piece.path
        self.start = piece.start
        self.end = piece.end
        self.options = options
        self.is_boundary = is_boundary
        self.warned = False

    def documents(self) -> Iterator[str]:
        limit = self.options.max_document_bytes
        lines: list[str] = []  # Lines of the current document.
        title = ""  # Title of a WikiExtractor document; its first line repeats it.
        owned = self.start == 0
        at_boundary = True  # The current document began at a boundary, not at a split.
        last_boundary = -1
        block = self._block_before()
        for offset, line in lines_from(self.path, self.start, self.end):
            boundary = self.is_boundary(line)
            past_block, block = block, offset // limit
            broken = not boundary and block > past_block and self._is_quiet((block - 1) * limit, last_boundary)
            if boundary or broken:
                if lines:
                    if broken and at_boundary:
                        self._warn(offset)
                    yield "\n".join(lines)
                    lines = []
                owned, at_boundary, title = True, boundary, ""
            if self.end is not None and offset >= self.end and (boundary or broken or not owned):
                return
            if boundary:
                last_boundary = offset
                title = _wiki_title(line)
            elif owned:
                text = _decode(line, self.path, offset, self.options).strip()
                if text and not (title and title in (text, html.unescape(text))) and text != "</doc>":
                    lines.append(text)
                title = title if not text else ""
        if lines:
            yield "\n".join(lines)

    def _block_before(self) -> int:
        """Returns the index of the block, of `max_document_bytes`, in which the last line before the slice begins."""
        if self.start == 0:
            return 0
        block = self.start // self.options.max_document_bytes
        block_start = block * self.options.max_document_bytes
        return block if first_line_start(self.path, block_start, self.start) is not None else block - 1

    def _is_quiet(self, low: int, last_boundary: int) -> bool:
        """Returns True if no boundary begins between `low` and the current line; usually reads only a few lines."""
        if last_boundary >= low:
            return False
        if low >= self.start:
            return True
        for offset, line in lines_from(self.path, max(low, 0), self.start):
            if offset >= self.start:
                break
            if self.is_boundary(line):
                return False
        return True

    def _warn(self, offset: int) -> None:
        if not self.warned:
            self.warned = True
            log.warning(
                "%s:%d: split a document of more than %d bytes; further ones in this file are split, too. Separate "
                "documents by blank lines, or use JSON lines with one document a line",
                self.path,
                line_number(self.path, offset),
                self.options.max_document_bytes,
            )


def _wiki_title(line: bytes) -> str:
    match = _WIKI_TITLE.search(line) if line.startswith(_WIKI_DOC) else None
    return html.unescape(match[1].decode("utf-8", "replace")).strip() if match else ""


# JSON lines, and examples of TFDS datasets.


def _read_json_lines(piece: Slice, options: CorpusOptions) -> Iterator[str]:
    def texts() -> Iterator[tuple[int, str]]:
        for offset, line in lines_from(piece.path, piece.start, piece.end):
            if piece.end is not None and offset >= piece.end:
                return
            if not _is_blank(line):
                decoded = _decode(line, piece.path, offset, options)
                yield offset, _json_text(decoded, piece.path, offset, options)

    return _documents(texts(), options, lambda offset: f"{piece.path}:{line_number(piece.path, offset)}")


def _read_examples(piece: Slice, options: CorpusOptions) -> Iterator[str]:
    end = tfds_corpus.size(piece.path)[0] if piece.end is None else piece.end
    texts = tfds_corpus.texts(piece.path, piece.start, end, options.errors)
    return _documents(texts, options, lambda number: f"{piece.path}: example {number}")


def _documents(texts: Iterable[tuple[int, str]], options: CorpusOptions, where: Callable[[int], str]) -> Iterator[str]:
    """Yields one document a text, or several if it is too long; `where` maps a position to its location in messages."""
    warned = False
    for position, text in texts:
        parts = list(_split(filter(None, map(str.strip, text.split("\n"))), options.max_document_bytes))
        if len(parts) > 1 and not warned:
            warned = True
            limit = options.max_document_bytes
            log.warning("%s: split a document of more than %d bytes", where(position), limit)
        yield from parts


def _json_text(line: str, path: str, offset: int, options: CorpusOptions) -> str:
    def invalid(problem: str) -> InputError:
        where = f"{path}:{line_number(path, offset)}"
        return InputError(f'{where}: {problem}; expected an object such as {{"text": "..."}}')

    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise invalid(f"invalid JSON ({error})") from error
    if not isinstance(value, dict):
        raise invalid(f"got {_JSON_TYPES.get(type(value), 'a number')}, not a JSON object")
    if "text" not in value:
        raise invalid('missing key "text"')
    text = value["text"]
    if not isinstance(text, str):
        raise invalid(f'"text" is {_JSON_TYPES.get(type(text), "a number")}, not a string')
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half a surrogate pair, which UTF-8 cannot encode.
        if options.errors == "strict":
            character = ord(text[error.start])
            raise invalid(
                f'"text" contains half a surrogate pair (\\u{character:04x}); fix it or pass --errors replace'
            ) from error
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _split(lines: Iterable[str], limit: int) -> Iterator[str]:
    part: list[str] = []
    size = 0
    for line in lines:
        line_bytes = len(line.encode()) + 1
        if part and size + line_bytes > limit + 1:
            yield "\n".join(part)
            part, size = [], 0
        part.append(line)
        size += line_bytes
    if part:
        yield "\n".join(part)


def _decode(line: bytes, path: str, offset: int, options: CorpusOptions) -> str:
    try:
        return line.decode("utf-8", options.errors)
    except UnicodeDecodeError as error:
        number, byte = line_number(path, offset), line[error.start]
        raise not_utf8(path, number, byte, remedy="pass --errors replace or ") from error
