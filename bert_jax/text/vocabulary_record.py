"""Metadata of a vocabulary in a file beside it: `vocab.txt.json` beside `vocab.txt`.

A vocabulary is a list of pieces, without the information how text must be normalized and split first. Text that is
lower-cased for a cased vocabulary, or the reverse, becomes [UNK]. `bert-jax vocab` writes the record and `bert-jax
prepare` reads it. Vocabularies of another source have none. A WordPiece vocabulary is then taken for cased if one of
its pieces is a capital letter; a SentencePiece model has its own normalization.

    {"format_version": 1, "kind": "wordpiece", "lowercase": true, "strip_accents": true, "sha256": "..."}

`kind` may be "sentencepiece". Version 2 has further rules, such as `text_rules` of pretokenized text. `sha256` is the
hash of the vocabulary's bytes, which detects the record of another vocabulary.

The record of an extended vocabulary also has the old one:

    {..., "extends": {"sha256": "...", "pieces": 30522}}
"""

import hashlib
import json
import logging
import unicodedata
from collections.abc import Mapping
from typing import Any

from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.files.format_versions import check_version
from bert_jax.text import tokenizer_files
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.wordpiece import CONTINUATION, TokenizerRules, WordPieceTokenizer

log = logging.getLogger(__name__)

FORMAT_VERSION = 2
_FIRST_VERSION_KEYS = {"lowercase", "strip_accents"}


def record_path(vocabulary: str) -> epath.Path:
    """Returns the path of a vocabulary's record."""
    return remote.parse_path(f"{vocabulary}.json")


def save_vocabulary(path: str, tokenizer: Tokenizer, *, extends: Tokenizer | None = None) -> None:
    """Writes the record and then the vocabulary, each atomically, so that a vocabulary never lacks its record.

    `extends` is the tokenizer of the old vocabulary if the new one is an extension.
    """
    data = tokenizer.vocabulary_bytes()
    rules = {"lowercase": tokenizer.lowercase, "strip_accents": tokenizer.strip_accents, **tokenizer.described_rules()}
    value: dict[str, Any] = {
        "format_version": 1 if rules.keys() <= _FIRST_VERSION_KEYS else FORMAT_VERSION,
        "kind": tokenizer.kind,
        **rules,
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    if extends is not None:
        old = hashlib.sha256(extends.vocabulary_bytes()).hexdigest()
        value["extends"] = {"sha256": old, "pieces": extends.vocab_size}
    atomic.write_whole(record_path(path), (json.dumps(value, indent=2) + "\n").encode())
    atomic.write_whole(path, data)


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


def open_vocabulary(
    path: str, *, cased: bool = False, keep_accents: bool = False, pretokenized: bool = False
) -> Tokenizer:
    """Opens a vocabulary with the rules that it was trained for.

    Args:
      path: a `vocab.txt` or a SentencePiece model.
      cased: the value of `--cased`. If False, the record decides; without a record, a vocabulary is cased if one of its
        pieces is a capital letter.
      keep_accents: the value of `--keep_accents`. If False, the record decides; without one, an uncased vocabulary has
        no accents.
      pretokenized: the value of `--pretokenized`. If False, the record decides.

    Raises:
      InputError: the file is missing or invalid; the record is invalid or of another vocabulary; or an option
        contradicts the record.
    """
    options = {"--cased": cased, "--keep_accents": keep_accents, "--pretokenized": pretokenized}
    record = record_path(path)
    if remote.exists(record):
        return _open_recorded(path, record, options)
    if tokenizer_files.is_sentencepiece(remote.parse_path(path)):
        if given := [option for option, value in options.items() if value]:
            raise InputError(
                f"{given[0]}: {path} is a SentencePiece model without a record, whose own normalization is used; "
                f"remove {given[0]}"
            )
        log.info("%s is a SentencePiece model without a record: its own normalization is used", path)
        return tokenizer_files.open_sentencepiece(path, None)
    vocabulary = WordPieceTokenizer.from_file(path)
    capital = _capital(vocabulary.vocab)
    if capital and not cased:
        log.info("Vocabulary %s is cased (it contains the piece %r): case and accents of text are kept", path, capital)
    lowercase = not cased and not capital
    text = "pretokenized" if pretokenized else "reference"
    strip_accents = None if lowercase and not keep_accents else False
    return WordPieceTokenizer(vocabulary.vocab, lowercase, TokenizerRules(text=text, strip_accents=strip_accents))


def _open_recorded(path: str, record: epath.Path, options: Mapping[str, bool]) -> Tokenizer:
    value = _read(record)
    if value["sha256"] != hashlib.sha256(atomic.read_whole(remote.parse_path(path))).hexdigest():
        raise InputError(f"{record}: sha256 is that of another vocabulary; restore {path} or delete {record}")
    for option, key, expected in (
        ("--cased", "lowercase", False),
        ("--keep_accents", "strip_accents", False),
        ("--pretokenized", "text_rules", "pretokenized"),
    ):
        if options[option] and value.get(key) != expected:
            raise InputError(
                f"{option}: {record} has {key}={json.dumps(value.get(key))}; remove {option}, or create a vocabulary "
                f"with `bert-jax vocab {option}`"
            )
    try:
        tokenizer = tokenizer_files.open_described(path, value)
    except InputError as error:
        raise InputError(f"{record}: {error}") from error
    if not tokenizer.lowercase:
        log.info("Vocabulary %s is cased (lowercase=false in %s): case and accents of text are kept", path, record)
    return tokenizer


def _read(record: epath.Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(atomic.read_whole(record))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{record}: not a vocabulary record ({error}); delete or rename it") from error
    if isinstance(value, dict):
        check_version(record, value, FORMAT_VERSION)
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
