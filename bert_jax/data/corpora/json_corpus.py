"""Reads documents from JSON lines: an object a line, with the text in one of its fields."""

import json
from collections.abc import Iterator
from typing import Any

from bert_jax.data.corpora.corpus_options import CorpusOptions
from bert_jax.data.corpora.documents import documents_of, is_blank
from bert_jax.data.corpora.fields import missing_field, nested_names
from bert_jax.errors import InputError
from bert_jax.files.text_files import decode_line, line_number, lines_from

_TYPES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
_MISSING = object()


def json_documents(path: str, start: int, end: int | None, options: CorpusOptions) -> Iterator[str]:
    """Yields the documents of the lines that begin in bytes [start, end) of a file.

    Raises:
      InputError: with the line, one that is not an object with a string in the field `text_field`.
    """

    def texts() -> Iterator[tuple[int, str]]:
        for offset, line in lines_from(path, start, end):
            if end is not None and offset >= end:
                return
            if not is_blank(line):
                yield offset, _text(decode_line(line, path, offset, options.errors), path, offset, options)

    return documents_of(texts(), options, lambda offset: f"{path}:{line_number(path, offset)}")


def _text(line: str, path: str, offset: int, options: CorpusOptions) -> str:
    field = options.text_field

    def invalid(problem: str) -> InputError:
        where = f"{path}:{line_number(path, offset)}"
        return InputError(f'{where}: {problem}; expected an object such as {{"{field}": "..."}}')

    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise invalid(f"invalid JSON ({error})") from error
    if not isinstance(record, dict):
        raise invalid(f"got {_TYPES.get(type(record), 'a number')}, not a JSON object")
    text = _lookup(record, field)
    if text is _MISSING:
        raise missing_field(f"{path}:{line_number(path, offset)}", field, nested_names(record))
    if not isinstance(text, str):
        raise invalid(f'"{field}" is {_TYPES.get(type(text), "a number")}, not a string')
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half a surrogate pair, which UTF-8 cannot encode.
        if options.errors == "strict":
            character = ord(text[error.start])
            raise invalid(
                f'"{field}" contains half a surrogate pair (\\u{character:04x}); fix it or pass --errors replace'
            ) from error
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _lookup(record: dict[str, Any], field: str) -> Any:
    """Returns the value of a field, or `_MISSING`; dots in its name lead into objects, unless it has a dot itself."""
    value: Any = record
    for name in [field] if field in record else field.split("."):
        if not isinstance(value, dict) or name not in value:
            return _MISSING
        value = value[name]
    return value
