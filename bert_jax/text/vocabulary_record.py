"""The record of how a vocabulary was made, beside it: `vocab.txt.json` beside `vocab.txt`.

A vocabulary is a plain list of pieces, and does not say whether text is lower-cased before it is cut into them. Text
that is lower-cased for a cased vocabulary, or the reverse, becomes [UNK]. `bert-jax vocab` writes the record and
`bert-jax prepare` follows it. Released vocabularies have none: a capital letter among their pieces tells.

    {"format_version": 1, "kind": "wordpiece", "lowercase": true, "strip_accents": true, "sha256": "..."}

`sha256` is that of the vocabulary's bytes, so that the record of another vocabulary is noticed.
"""

import hashlib
import json
import logging
import unicodedata
from typing import Any

from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.text.tokenization import CONTINUATION, WordPieceTokenizer

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
_KIND = "wordpiece"


def record_path(vocabulary: str) -> epath.Path:
    """Returns the path of a vocabulary's record."""
    return remote.named(f"{vocabulary}.json")


def save_vocabulary(path: str, tokenizer: WordPieceTokenizer) -> None:
    """Writes the record and then the vocabulary, each atomically: a vocabulary that is there has its record."""
    value = {
        "format_version": FORMAT_VERSION,
        "kind": _KIND,
        "lowercase": tokenizer.lowercase,
        "strip_accents": tokenizer.lowercase,
        "sha256": hashlib.sha256(tokenizer.vocabulary_bytes()).hexdigest(),
    }
    atomic.write_whole(record_path(path), (json.dumps(value, indent=2) + "\n").encode())
    tokenizer.save_vocabulary(path)


def check_free(path: str) -> None:
    """Refuses a new vocabulary's path where it, or a file that is no record in place of its record, exists.

    Raises:
      InputError: the file that exists.
    """
    output, record = remote.named(path), record_path(path)
    if remote.exists(output):
        raise InputError(f"--output: {output} exists: choose another name or delete it")
    if remote.exists(record):
        _read(record)


def open_vocabulary(path: str, *, cased: bool) -> WordPieceTokenizer:
    """Reads a vocabulary with the case it was made for.

    Args:
      path: a `vocab.txt`.
      cased: whether `--cased` was given; without it, the record decides, then a capital letter among the pieces, and
        a vocabulary with neither is uncased.

    Raises:
      InputError: as `WordPieceTokenizer.from_file`; the record is of another vocabulary or cannot be read; or it says
        uncased and `cased` is set.
    """
    tokenizer = WordPieceTokenizer.from_file(path, lowercase=not cased)
    record = record_path(path)
    if remote.exists(record):
        lowercase = _lowercase(record, path)
        if cased and lowercase:
            raise InputError(
                f"--cased: {path} is uncased, as {record} says (lowercase=true); leave out --cased, or make a cased "
                "vocabulary with `bert-jax vocab --cased`"
            )
        reason = f"{record} says so"
    else:
        capital = _capital(tokenizer.vocab)
        lowercase = not cased and not capital
        reason = f"it has the piece {capital!r}"
    if lowercase == tokenizer.lowercase:
        return tokenizer
    log.info("%s is cased (%s): case and accents are kept", path, reason)
    return WordPieceTokenizer(tokenizer.vocab, lowercase)


def _lowercase(record: epath.Path, path: str) -> bool:
    value = _read(record)
    if value["sha256"] != hashlib.sha256(atomic.read_whole(remote.named(path))).hexdigest():
        raise InputError(f"{record}: sha256 is not that of {path}; restore the vocabulary, or delete {record}")
    for key, expected in (
        ("format_version", FORMAT_VERSION), ("kind", _KIND), ("strip_accents", value["lowercase"]),
    ):  # fmt: skip
        if value[key] != expected:
            raise InputError(f"{record}: {key}={value[key]!r} is not supported; expected {expected!r}")
    return value["lowercase"]


def _read(record: epath.Path) -> dict[str, Any]:
    try:
        value = json.loads(atomic.read_whole(record))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{record}: not the record of a vocabulary ({error}); delete or rename it") from error
    types = {"format_version": int, "kind": str, "lowercase": bool, "strip_accents": bool, "sha256": str}
    for key, kind in types.items():
        if not isinstance(value, dict) or type(value.get(key)) is not kind:
            raise InputError(f"{record}: not the record of a vocabulary ({key} must be a {kind.__name__}); rename it")
    return value


def _capital(vocab: tuple[str, ...]) -> str:
    """A piece of one letter that lower-casing would change; empty where there is none."""
    for piece in vocab:
        letter = piece.removeprefix(CONTINUATION)
        if len(letter) == 1 and unicodedata.category(letter) == "Lu" and letter.lower() != letter:
            return piece
    return ""
