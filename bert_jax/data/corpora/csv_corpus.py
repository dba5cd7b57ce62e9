r"""Reads documents from CSV and TSV files with a header, as RFC 4180 defines them.

A record is a line; a field in double quotes may contain separators, line ends and, doubled, quotes. Lines end with
"\n" or "\r\n". The separator of CSV is a comma, or a semicolon or tab if the header has no comma. A line end inside
quotes looks like any other, so that only a reader of the whole file knows where records begin: a file is one slice.

A record that differs from the header in its number of fields, and text after a closing quote, are errors: both are
signs of an unbalanced quote. A record is at most MAX_LINE_BYTES long, so a quote that is never closed is found soon.
"""

from collections.abc import Iterator

from bert_jax.data.corpora.corpus_options import CorpusOptions
from bert_jax.data.corpora.documents import documents_of
from bert_jax.data.corpora.fields import missing_field
from bert_jax.errors import InputError
from bert_jax.files import text_files
from bert_jax.files.text_files import decode_line, line_number, lines_from

_QUOTE = b'"'
_MAX_COLUMNS = 10_000


def csv_documents(path: str, kind: str, options: CorpusOptions) -> Iterator[str]:
    """Yields the documents of a file of the kind "csv" or "tsv", one a record.

    Raises:
      InputError: with the line, a header without the column `text_field` or with two, a record that does not have a
        field for each column, a quote that is not closed, text after a closing quote, or a record that is too long.
    """
    return documents_of(_texts(path, kind, options), options, lambda offset: f"{path}:{line_number(path, offset)}")


def _separator_of(header: bytes) -> bytes:
    """Returns the separator of a CSV file's header: a comma, or without one a semicolon or tab that occurs in it."""
    return next((separator for separator in (b",", b";", b"\t") if separator in header), b",")


def _texts(path: str, kind: str, options: CorpusOptions) -> Iterator[tuple[int, str]]:
    """Yields (offset of the record, text)."""
    records: _Records | None = None
    columns, column = 0, 0
    for offset, line in lines_from(path, 0, None):
        if records is None:
            records = _Records(path, b"\t" if kind == "tsv" else _separator_of(line))
        if not records.is_complete_with(line, offset):
            continue
        fields = records.take()
        if not columns:
            columns, column = len(fields), _column(path, fields, options)
        elif len(fields) == columns:
            skipped = sum(field.count(b"\n") for field in fields[:column])
            yield records.begin, _decode(fields[column], path, records.begin, skipped, options)
        elif fields != [b""]:
            raise InputError(
                f"{path}:{line_number(path, records.begin)}: got {len(fields)} fields, expected {columns} as in the "
                'header; put a field that contains a separator in double quotes ("...")'
            )
    if records is not None and records.is_open:
        raise records.unclosed("the end of the file")


def _column(path: str, header: list[bytes], options: CorpusOptions) -> int:
    """Returns the index of the column with the text."""
    if any(b"\r" in name for name in header):
        raise InputError(f"{path}:1: got lines that end with CR, expected LF or CR LF; convert them: tr '\\r' '\\n'")
    names = [decode_line(name, path, 0, options.errors) for name in header]
    if names.count(options.text_field) > 1:
        raise InputError(f'{path}:1: got two columns "{options.text_field}", expected one; rename one of them')
    if options.text_field not in names:
        raise missing_field(f"{path}:1", options.text_field, names, ", or add a header if this line is not one")
    return names.index(options.text_field)


def _decode(field: bytes, path: str, offset: int, skipped: int, options: CorpusOptions) -> str:
    """Decodes a field that begins `skipped` line ends after the line at `offset`."""
    if options.errors == "strict":
        try:
            return field.decode()
        except UnicodeDecodeError:
            field = b"\n" * skipped + field  # for the number of the line in the message
    return decode_line(field, path, offset, options.errors)


class _Records:
    """Parser of records from lines.

    Attributes:
      begin: the offset of the line in which the current record begins.
      is_open: a quote is open at the end of the lines so far.
    """

    def __init__(self, path: str, separator: bytes) -> None:
        self.path = path
        self.begin = 0
        self.is_open = False
        self._separator = separator
        self._fields: list[bytes] = []
        self._field = bytearray()  # the field in quotes
        self._opened = 0  # offset of the line in which its quote was opened
        self._size = 0

    def take(self) -> list[bytes]:
        """Returns the fields of a complete record, and begins the next one."""
        fields, self._fields, self._size = self._fields, [], 0
        return fields

    def is_complete_with(self, line: bytes, offset: int) -> bool:
        """Adds a line to the record. Returns True if it ends the record, False if a quote is still open."""
        if not self.is_open:
            self.begin = offset
        elif _QUOTE not in line:
            self._extend(line + b"\n")
            return False
        at, end = 0, len(line) - line.endswith(b"\r")
        while True:
            if not self.is_open and line[at : at + 1] != _QUOTE:
                stop = line.find(self._separator, at, end)
                self._append(line[at : end if stop < 0 else stop])
                if stop < 0:
                    return True
                at = stop + 1
                continue
            if not self.is_open:
                self.is_open, self._opened, at = True, offset, at + 1
            at = self._read_quoted(line, at)
            if self.is_open:
                return False
            if at >= end:
                return True
            if line[at : at + 1] != self._separator:
                raise self._stray(line[at:end], offset)
            at += 1

    def unclosed(self, until: str) -> InputError:
        """Returns the error for a quote that is still open at `until`."""
        return InputError(
            f"{self.path}:{line_number(self.path, self._opened)}: the quote that opens in this line is not closed "
            f'until {until}; close it, or write a quote within a field as "" and the field in quotes'
        )

    def _read_quoted(self, line: bytes, at: int) -> int:
        """Reads a field in quotes from `at`; returns the position after its closing quote or, if open, of the end."""
        while True:
            quote = line.find(_QUOTE, at)
            self._extend(line[at : len(line) if quote < 0 else quote])
            if quote < 0:
                self._extend(b"\n")
                return len(line)
            at = quote + 1
            if line[at : at + 1] != _QUOTE:
                self._append(bytes(self._field))
                self._field = bytearray()
                self.is_open = False
                return at
            self._extend(_QUOTE)
            at += 1

    def _extend(self, part: bytes) -> None:
        self._field += part
        self._size += len(part)
        if self._size > text_files.MAX_LINE_BYTES:
            raise self.unclosed(f"{text_files.MAX_LINE_BYTES} bytes later, the longest record that is read")

    def _append(self, field: bytes) -> None:
        self._fields.append(field)
        if len(self._fields) > _MAX_COLUMNS:
            raise InputError(
                f"{self.path}:{line_number(self.path, self.begin)}: a record must have at most {_MAX_COLUMNS} fields; "
                "check the separator"
            )

    def _stray(self, rest: bytes, offset: int) -> InputError:
        opened, closed = line_number(self.path, self._opened), line_number(self.path, offset)
        found = rest[:20].decode("utf-8", "replace")
        return InputError(
            f"{self.path}:{opened}: the quote that opens in this line is closed in line {closed} before {found!r}, "
            f'expected {self._separator.decode()!r} or the end of the line; write a quote within a field as ""'
        )
