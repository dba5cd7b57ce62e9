"""Metadata of a vocabulary in a file beside it: `vocab.txt.json` beside `vocab.txt`.

A vocabulary is a plain list of pieces, without the information whether text must be lower-cased first. Text that is
lower-cased for a cased vocabulary, or the reverse, becomes [UNK]. `bert-jax vocab` writes the record and `bert-jax
prepare` reads it. Released vocabularies have none: they are taken for cased if one of their pieces is a capital letter.

    {"format_version": 1, "kind": "wordpiece", "lowercase": true, "strip_accents": true, "sha256": "..."}

`sha256` is the hash of the vocabulary's bytes, which detects the record of another vocabulary.

The record of an extended vocabulary names the old one, and has the rules of its tokenizer that differ from the
defaults, with the keys of a checkpoint's tokenizer:

    {..., "max_word_characters": 100, "text_rules": "library", "extends": {"sha256": "...", "pieces": 30522}}
"""

import hashlib
import json
import logging
import unicodedata
from typing import Any

from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.text.tokenization import CONTINUATION, TokenizerRules, WordPieceTokenizer

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
_KIND = "wordpiece"


def record_path(vocabulary: str) -> epath.Path:
    """Returns the path of a vocabulary's record."""
    return remote.parse_path(f"{vocabulary}.json")


def save_vocabulary(path: str, tokenizer: WordPieceTokenizer, *, extends: WordPieceTokenizer | None = None) -> None:
    """Writes the record and then the vocabulary, each atomically, so that a vocabulary never lacks its record.

    `extends` is the tokenizer of the old vocabulary if the new one is an extension.
    """
    value: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "kind": _KIND,
        "lowercase": tokenizer.lowercase,
        "strip_accents": tokenizer.lowercase,
        "sha256": hashlib.sha256(tokenizer.vocabulary_bytes()).hexdigest(),
        **tokenizer.rules.to_json(),
    }
    if extends is not None:
        old = hashlib.sha256(extends.vocabulary_bytes()).hexdigest()
        value["extends"] = {"sha256": old, "pieces": extends.vocab_size}
    atomic.write_whole(record_path(path), (json.dumps(value, indent=2) + "\n").encode())
    tokenizer.save_vocabulary(path)


def check_free(path: str) -> None:
    """Checks that the path of a new vocabulary is free; an existing record without a vocabulary is overwritten.

    Raises:
      InputError: the vocabulary already exists, or the path of its record holds another file.
    """
    output, record = remote.parse_path(path), record_path(path)
    if remote.exists(output):
        raise InputError(f"--output={output}: already exists; choose another path or delete it")
    if remote.exists(record):
        _read(record)


def open_vocabulary(path: str, *, cased: bool) -> WordPieceTokenizer:
    """Opens a vocabulary with the case that it was trained for, and the other rules in its record.

    Args:
      path: a `vocab.txt`.
      cased: the value of `--cased`. If False, the record decides; without a record, a vocabulary is cased if one of its
        pieces is a capital letter.

    Raises:
      InputError: as `WordPieceTokenizer.from_file`; the record is invalid or of another vocabulary; or `cased` is set
        and the record says uncased.
    """
    tokenizer = WordPieceTokenizer.from_file(path, lowercase=not cased)
    record, rules = record_path(path), TokenizerRules()
    if remote.exists(record):
        lowercase, rules = _read_rules(record, path)
        if cased and lowercase:
            raise InputError(
                f"--cased: {path} is uncased (lowercase=true in {record}); remove --cased, or create a cased "
                "vocabulary with `bert-jax vocab --cased`"
            )
        reason = f"lowercase=false in {record}"
    else:
        capital = _capital(tokenizer.vocab)
        lowercase = not cased and not capital
        reason = f"it contains the piece {capital!r}"
    if lowercase != tokenizer.lowercase:
        log.info("Vocabulary %s is cased (%s): case and accents of text are kept", path, reason)
    if (lowercase, rules) == (tokenizer.lowercase, tokenizer.rules):
        return tokenizer
    return WordPieceTokenizer(tokenizer.vocab, lowercase, rules)


def _read_rules(record: epath.Path, path: str) -> tuple[bool, TokenizerRules]:
    """Returns whether text is lower-cased, and the other rules. InputError for the record of another vocabulary."""
    value = _read(record)
    if value["sha256"] != hashlib.sha256(atomic.read_whole(remote.parse_path(path))).hexdigest():
        raise InputError(f"{record}: sha256 is that of another vocabulary; restore {path} or delete {record}")
    for key, expected in (
        ("format_version", FORMAT_VERSION), ("kind", _KIND), ("strip_accents", value["lowercase"]),
    ):  # fmt: skip
        if value[key] != expected:
            raise InputError(f"{record}: {key}={value[key]!r} is not supported; expected {expected!r}")
    try:
        return value["lowercase"], TokenizerRules.from_json(value)
    except InputError as error:
        raise InputError(f"{record}: {error}") from error


def _read(record: epath.Path) -> dict[str, Any]:
    try:
        value = json.loads(atomic.read_whole(record))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{record}: not a vocabulary record ({error}); delete or rename it") from error
    types = {"format_version": int, "kind": str, "lowercase": bool, "strip_accents": bool, "sha256": str}
    for key, kind in types.items():
        if not isinstance(value, dict) or type(value.get(key)) is not kind:
            raise InputError(f"{record}: not a vocabulary record ({key} must be {kind.__name__}); rename it")
    return value


def _capital(vocab: tuple[str, ...]) -> str:
    """Returns a piece that is a single capital letter, or an empty string."""
    for piece in vocab:
        letter = piece.removeprefix(CONTINUATION)
        if len(letter) == 1 and unicodedata.category(letter) == "Lu" and letter.lower() != letter:
            return piece
    return ""
