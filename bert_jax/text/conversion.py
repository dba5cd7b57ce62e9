"""Tokenizers of other formats, converted to `tokenizer.json`: `vocab.txt` and SentencePiece models.

`bert-jax vocab --from` converts one, and `bert-jax import` where it meets one in place of a `tokenizer.json`.
"""

import json
import logging
import re
import struct
import unicodedata
from collections.abc import Sequence
from typing import Any

import sentencepiece
import tokenizers
from etils import epath
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.text.bert_rules import LIBRARY, PRETOKENIZED, REFERENCE
from bert_jax.text.tokenizer import FILE, SETTINGS, Tokenizer, find_special_tokens, read_settings, read_tokenizer
from bert_jax.text.wordpiece import CONTINUATION, LIBRARY_MAX_WORD_CHARACTERS, wordpiece_tokenizer

log = logging.getLogger(__name__)

VOCABULARY = "vocab.txt"
SENTENCEPIECE_FILES = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "sentencepiece.model")
ADDED_TOKENS = "added_tokens.json"
_NAMED_TOKEN = re.compile(r"\[.*\]|<.*>")  # such as [MASK] and [unused1]
_CASED_SHARE = 0.05  # of the pieces; more of them have capitals in a cased vocabulary, also of other units than letters

_UNSUPPORTED_SETTINGS = {  # of BertTokenizer, with the value that `vocab.txt` is read with
    "do_basic_tokenize": True, "tokenize_chinese_chars": True, "never_split": None,
}  # fmt: skip


def convert_vocabulary(
    path: str, *, cased: bool = False, keep_accents: bool = False, pretokenized: bool = False
) -> Tokenizer:
    """Converts a `vocab.txt`, with the rules of the reference for text, or a SentencePiece model.

    Args:
      path: the file; a name that ends in .model is a SentencePiece model.
      cased: whether case and accents of text are kept; so they are if a piece is a capital letter.
      keep_accents: whether accents of lower-cased text are kept.
      pretokenized: whether words are split at white space alone.

    Raises:
      InputError: the file is missing or invalid, or an option is given for a SentencePiece model.
    """
    file = remote.parse_path(path)
    if file.suffix == ".model":
        options = {"cased": cased, "keep_accents": keep_accents, "pretokenized": pretokenized}
        if given := [option for option, value in options.items() if value]:
            raise InputError(f"{given[0]}: {path} is a SentencePiece model, which has its own normalization; remove it")
        return read_sentencepiece(file)
    vocab = read_vocab_file(file)
    capital = _capital(vocab)
    if capital and not cased:
        log.info("%s is cased (it contains the piece %r): case and accents of text are kept", path, capital)
    lowercase = not cased and not capital
    return _named(file, vocab, lowercase, strip_accents=False if keep_accents and lowercase else None,
                  text=PRETOKENIZED if pretokenized else REFERENCE)  # fmt: skip


def open_folder(folder: epath.Path, *, lowercase: bool | None = None) -> Tokenizer:
    """Opens the tokenizer of a folder of `transformers`: its `tokenizer.json`, or else what is converted to one.

    Args:
      folder: a local folder.
      lowercase: whether the text of a `vocab.txt` is lower-cased; None for the folder's settings.

    Raises:
      InputError: there is no tokenizer, its files contradict each other, or the case of a `vocab.txt` is unknown.
    """
    settings = read_settings(folder)
    if (folder / FILE).exists():
        tokenizer = read_tokenizer(folder / FILE)
        _check_same_vocabulary(folder, tokenizer)
        stated = settings.get("do_lower_case") if lowercase is None else lowercase
        if tokenizer.kind == "wordpiece" and isinstance(stated, bool) and stated != tokenizer.lowercase:
            raise InputError(
                f"{folder}: contradictory case: {FILE} has lowercase={json.dumps(tokenizer.lowercase)}, and "
                f"{json.dumps(stated)} is expected by do_lower_case in {SETTINGS} or by the option; correct one of them"
            )
        accents = settings.get("strip_accents")
        if tokenizer.kind == "wordpiece" and isinstance(accents, bool) and accents != tokenizer.strip_accents:
            raise InputError(
                f"{folder}: contradictory strip_accents: {json.dumps(accents)} in {SETTINGS}, and "
                f"{json.dumps(tokenizer.strip_accents)} in {FILE}; correct one of them"
            )
        if unknown := [token for token in _added_tokens(settings) if token not in tokenizer.vocab]:
            raise InputError(
                f"{folder}: {unknown[0]!r} is an added token in {SETTINGS}, and not in {FILE}; add it there"
            )
        return tokenizer
    if (folder / VOCABULARY).exists():
        return _bert_tokenizer(folder, settings, lowercase)
    model = next((folder / name for name in SENTENCEPIECE_FILES if (folder / name).exists()), None)
    if model is None:
        raise InputError(f"{folder}: found neither {FILE} nor {VOCABULARY}; add the tokenizer's files")
    for name, supported in (("do_lower_case", False), ("keep_accents", True)):
        if settings.get(name, supported) != supported:
            raise InputError(
                f"{folder / SETTINGS}: {name}={json.dumps(settings[name])}: a SentencePiece model is converted with "
                f"its own normalization; load it in transformers, and save its {FILE} with save_pretrained"
            )
    return read_sentencepiece(model)


def read_vocab_file(path: epath.Path) -> list[str]:
    r"""Reads a `vocab.txt`: UTF-8, one piece a line, the line (from 0) is the id. Only "\n" ends a line.

    Raises:
      InputError: missing file, invalid UTF-8, or an empty or duplicate line.
    """
    try:
        text = atomic.read_whole(path).decode("utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); expected a vocabulary file") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InputError(f"{path}:{line}: invalid UTF-8; expected UTF-8 text with one piece a line") from error
    pieces = [line.removesuffix("\r") for line in text.removeprefix("\ufeff").removesuffix("\n").split("\n")]
    if pieces == [""]:
        raise InputError(f"{path}: the vocabulary is empty; create one with `bert-jax vocab`")
    first: dict[str, int] = {}
    for number, piece in enumerate(pieces, start=1):
        if not piece:
            raise InputError(f"{path}:{number}: empty line; expected one piece on every line, whose number is its id")
        if piece in first:
            raise InputError(
                f"{path}:{number}: duplicate piece {piece!r}, first on line {first[piece]}; give one of them a name "
                "that occurs in no text, such as [unused1], so that the ids of the others stay"
            )
        first[piece] = number
    return pieces


def read_sentencepiece(path: epath.Path) -> Tokenizer:
    """Converts a SentencePiece model, unigram or BPE, with the normalization that it has.

    The library `tokenizers` looks up graphemes of less than 6 bytes in the model's table of normalized strings, and
    else single characters; SentencePiece looks up the longest string. A word with two splits of equal probability, such
    as `w ww` and `ww w`, may be split differently. The log has the number of pieces and characters that differ.

    Raises:
      InputError: the file is missing or no such model, or it has options that BERT's tokenizers do not have.
    """
    try:
        data = atomic.read_whole(path)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror or error}); expected a SentencePiece model"
        ) from error
    try:
        library = sentencepiece.SentencePieceProcessor(model_proto=data)
        tokenizer = _from_model(_Message(data))
    except (RuntimeError, ValueError) as error:
        raise InputError(f"{path}: not a SentencePiece model, or damaged ({error!s:.200}); restore the file") from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    _log_differences(path, tokenizer, library)
    return tokenizer


def _named(path: epath.Path, vocab: Sequence[str], lowercase: bool, **rules: Any) -> Tokenizer:
    try:
        return wordpiece_tokenizer(vocab, lowercase, **rules)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _bert_tokenizer(folder: epath.Path, settings: dict[str, Any], lowercase: bool | None) -> Tokenizer:
    """Returns the tokenizer that `transformers` makes of a `vocab.txt`."""
    for name, expected in _UNSUPPORTED_SETTINGS.items():
        if settings.get(name, expected) not in (expected, None):
            raise InputError(
                f"{folder / SETTINGS}: {name}={json.dumps(settings[name])}: expected {json.dumps(expected)} without a "
                f"{FILE}; load the tokenizer in transformers, and save its {FILE} with save_pretrained"
            )
    if settings.get("tokenizer_class") not in (None, "BertTokenizer", "BertTokenizerFast"):
        raise InputError(
            f"{folder / SETTINGS}: tokenizer_class={settings['tokenizer_class']!r}: expected BertTokenizer, or a {FILE}"
        )
    vocab = read_vocab_file(folder / VOCABULARY)
    added = _added_tokens(settings)
    if (folder / ADDED_TOKENS).exists():
        added += json.loads(atomic.read_whole(folder / ADDED_TOKENS))
    if unknown := [token for token in added if token not in {*vocab}]:
        raise InputError(
            f"{folder}: {unknown[0]!r} is an added token without a line in {VOCABULARY}; load the tokenizer in "
            f"transformers, and save its {FILE} with save_pretrained"
        )
    stated = settings.get("do_lower_case") if lowercase is None else lowercase
    if not isinstance(stated, bool):
        raise InputError(
            f"{folder}: unknown case, found no do_lower_case in {SETTINGS}; give --cased or --uncased to "
            "`bert-jax import`"
        )
    return _named(
        folder / VOCABULARY, vocab, stated, strip_accents=settings.get("strip_accents"), text=LIBRARY,
        max_word_characters=LIBRARY_MAX_WORD_CHARACTERS,
    )  # fmt: skip


def _added_tokens(settings: dict[str, Any]) -> list[Any]:
    listed = settings.get("added_tokens_decoder") or {}
    return [token.get("content") for token in listed.values() if isinstance(token, dict)]


def _check_same_vocabulary(folder: epath.Path, tokenizer: Tokenizer) -> None:
    """Raises InputError if a `vocab.txt` beside `tokenizer.json` was edited: only one of them can be meant."""
    if (folder / VOCABULARY).exists():
        vocab = read_vocab_file(folder / VOCABULARY)
        for index, piece in enumerate(vocab):
            if index >= tokenizer.vocab_size or tokenizer.vocab[index] != piece:
                other = tokenizer.vocab[index] if index < tokenizer.vocab_size else None
                raise InputError(
                    f"{folder}: id {index} is {piece!r} in {VOCABULARY} and {other!r} in {FILE}; delete the wrong file"
                )


def _capital(vocab: Sequence[str]) -> str:
    """Returns a piece that is a capital letter, or one with capital letters if there are many; else an empty string."""
    words = [piece for piece in vocab if not _NAMED_TOKEN.fullmatch(piece)]
    capitals = [word for word in words if word.lower() != word and any(map(str.isupper, word))]
    letters = [word for word in capitals if len(word.removeprefix(CONTINUATION)) == 1]
    return next(iter(letters or capitals), "") if letters or len(capitals) > _CASED_SHARE * len(words) else ""


class _Message:
    """A protocol buffer message, by field number. The compiled module of sentencepiece requires protobuf 7."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._fields: dict[int, list[Any]] = {}
        while self._at < len(data):
            number, kind = divmod(self._varint(), 8)
            value: Any = self._varint() if kind == 0 else self._bytes({1: 8, 5: 4}.get(kind) or self._varint())
            self._fields.setdefault(number, []).append(value)

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._bytes(1)[0]
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def _bytes(self, size: int) -> bytes:
        self._at += size
        if self._at > len(self._data):
            raise ValueError("the file ends within a field")
        return self._data[self._at - size : self._at]

    def get(self, number: int, default: Any) -> Any:
        """Returns the last value of a field: an integer, or bytes."""
        return self._fields.get(number, [default])[-1]

    def messages(self, number: int) -> "list[_Message]":
        """Returns all values of a field, which are messages."""
        return [_Message(data) for data in self._fields.get(number, [])]


_NORMAL, _UNKNOWN, _USER_DEFINED = 1, 2, 4  # types of a piece
_REQUIRED = {  # fields of `TrainerSpec` and of `NormalizerSpec` in sentencepiece_model.proto, with their defaults
    2: {"treat_whitespace_as_suffix": (24, False), "byte_fallback": (35, False)},
    3: {"add_dummy_prefix": (3, True), "remove_extra_whitespaces": (4, True), "escape_whitespaces": (5, True)},
}


def _from_model(proto: _Message) -> Tokenizer:
    """Returns the tokenizer of a SentencePiece model."""
    for part, fields in _REQUIRED.items():
        for name, (number, expected) in fields.items():
            if any(message.get(number, expected) != expected for message in proto.messages(part)):
                raise InputError(
                    f"the SentencePiece model has {name}={json.dumps(not expected)}: expected {json.dumps(expected)}; "
                    "train one with it"
                )
    [trainer], [normalizer] = proto.messages(2) or [_Message(b"")], proto.messages(3) or [_Message(b"")]
    entries = proto.messages(1)
    pieces = [entry.get(1, b"").decode() for entry in entries]
    scores = [struct.unpack("<f", entry.get(2, bytes(4)))[0] for entry in entries]
    types = [entry.get(3, _NORMAL) for entry in entries]
    unk = types.index(_UNKNOWN)
    kind, table = trainer.get(3, 1), normalizer.get(2, b"")
    if kind not in (1, 2):
        raise InputError(f"the SentencePiece model has model_type={kind}: expected 1 (unigram) or 2 (BPE)")
    if kind == 1:
        model: models.Model = models.Unigram(list(zip(pieces, scores, strict=True)), unk_id=unk, byte_fallback=False)
    else:
        model = _bpe(pieces, [one == _NORMAL for one in types], unk)
    fast = tokenizers.Tokenizer(model)
    try:
        steps = [normalizers.Precompiled(table)] if table else []
    except Exception as error:  # tokenizers has no class of its own for it
        raise ValueError(str(error)) from error
    spaces = [normalizers.Replace(Regex("[ ▁]+"), " "), normalizers.Replace(Regex(" $"), "")]
    fast.normalizer = normalizers.Sequence([*steps, *spaces])
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    fast.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    fast.add_tokens([piece for piece, one in zip(pieces, types, strict=True) if one == _USER_DEFINED])
    names = find_special_tokens({piece: index for index, piece in enumerate(pieces)}, (None, pieces[unk], *[None] * 3))
    return Tokenizer(json.loads(fast.to_str()), names)


def _log_differences(path: epath.Path, tokenizer: Tokenizer, library: sentencepiece.SentencePieceProcessor) -> None:
    """Logs how many pieces, and characters between letters, have other ids in the `sentencepiece` library."""
    special = {*tokenizer.special_tokens}
    texts = [piece.replace("▁", " ") for piece in tokenizer.vocab if piece not in special]
    texts += [f"a{chr(code)}b" for code in range(0x10000) if unicodedata.category(chr(code)) not in ("Cn", "Co", "Cs")]
    pairs = zip(texts, tokenizer.encode_batch(texts), library.encode(texts), strict=True)
    differ = [text for text, ours, theirs in pairs if ours != theirs]
    level = logging.WARNING if differ else logging.INFO
    shown = f", such as {', '.join(map(ascii, differ[:5]))}" if differ else ""
    log.log(
        level, "%s: %d of %d texts have other ids in the sentencepiece library%s", path, len(differ), len(texts), shown
    )


def _bpe(pieces: Sequence[str], are_normal: Sequence[bool], unk: int) -> models.Model:
    """Returns the BPE model; a piece is the result of every pair of pieces that forms it, earlier pieces first."""
    ids = {piece: index for index, piece in enumerate(pieces)}
    merges = []
    for piece, is_normal in zip(pieces, are_normal, strict=True):
        if is_normal:
            cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
            merges += sorted(
                (cut for cut in cuts if cut[0] in ids and cut[1] in ids), key=lambda cut: (ids[cut[0]], ids[cut[1]])
            )
    return models.BPE(ids, merges, unk_token=pieces[unk], fuse_unk=True, byte_fallback=False)
