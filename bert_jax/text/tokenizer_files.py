"""Opens tokenizers of any kind: from the JSON of a checkpoint, or from the vocabulary's file of a dataset."""

from collections.abc import Mapping
from typing import Any

from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.text.sentencepiece.sentencepiece_tokenizer import SentencePieceTokenizer
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.wordpiece import TokenizerRules, WordPieceTokenizer

KINDS: Mapping[str, type[Tokenizer]] = {kind.kind: kind for kind in (WordPieceTokenizer, SentencePieceTokenizer)}
"""The class of each kind of tokenizer."""


def from_json(value: dict[str, Any]) -> Tokenizer:
    """Creates the tokenizer from the result of `to_json`. Raises InputError for an unknown kind or invalid values."""
    kind = tokenizer_class(value.get("kind"))
    if issubclass(kind, SentencePieceTokenizer):
        return SentencePieceTokenizer.from_json(value)
    return WordPieceTokenizer.from_json(value)


def tokenizer_class(kind: Any) -> type[Tokenizer]:
    """Returns the class of a kind of tokenizer. Raises InputError for an unknown kind."""
    if kind not in KINDS:
        raise InputError(
            f"tokenizer: kind={kind!r:.60}: expected one of {', '.join(KINDS)}; install the version of bert_jax that "
            "wrote it"
        )
    return KINDS[kind]


def open_described(path: str, described: Mapping[str, Any]) -> Tokenizer:
    """Opens the vocabulary's file of a tokenizer that `kind`, `lowercase` and its rules describe.

    Raises:
      InputError: a missing or invalid file, an unknown kind, or invalid rules.
    """
    if issubclass(tokenizer_class(described["kind"]), SentencePieceTokenizer):
        return open_sentencepiece(path, described)
    return WordPieceTokenizer.from_file(path, described["lowercase"], TokenizerRules.from_json(described))


def open_sentencepiece(path: str, described: Mapping[str, Any] | None) -> SentencePieceTokenizer:
    """Opens a SentencePiece model file.

    Args:
      path: the file.
      described: `lowercase`, `strip_accents` and `normalization` of a tokenizer; None for a file of another source,
        whose own normalization is used.

    Raises:
      InputError: a missing or invalid file, or invalid rules.
    """
    try:
        model = atomic.read_whole(remote.parse_path(path))
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror or error}); expected a SentencePiece model"
        ) from error
    try:
        if described is None:
            return SentencePieceTokenizer.from_other_source(model)
        return SentencePieceTokenizer.from_description(model, described)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def is_sentencepiece(path: epath.Path) -> bool:
    """Returns True for a SentencePiece model: by its suffix, or by a first byte that no text vocabulary has."""
    if path.suffix == ".model":
        return True
    return remote.exists(path) and atomic.read_whole(path)[:1] == b"\n" and path.suffix != ".txt"
