"""Tokenizers of other formats, converted to `tokenizer.json`: `vocab.txt` and SentencePiece models.

`bert-jax vocab --from` converts one, and `bert-jax import` where it meets one in place of a `tokenizer.json`.
"""

import json
import logging
import unicodedata
from collections.abc import Mapping
from typing import Any

import sentencepiece
import tokenizers
from etils import epath
from google.protobuf import empty_pb2, unknown_fields
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from bert_jax.errors import InputError, prefixed, refused
from bert_jax.files import atomic, remote
from bert_jax.text.tokenizer import FILE, ROLES, SETTINGS, Tokenizer, read_settings, read_tokenizer
from bert_jax.text.wordpiece import CONTINUATION, wordpiece_tokenizer

log = logging.getLogger(__name__)

VOCABULARY = "vocab.txt"
ADDED_TOKENS = "added_tokens.json"
SENTENCEPIECE_FILES = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "sentencepiece.model")
_NORMALIZER, _TABLE = 3, 2  # fields in sentencepiece_model.proto: the normalization, and its table of strings
_MOST_DIFFERENT = 0.05  # of the pieces or characters of `_compare`

_SETTINGS: dict[str, dict[str, Any]] = {  # of tokenizers of `transformers`: values that a file is converted with
    VOCABULARY: {
        "do_basic_tokenize": (True, None), "tokenize_chinese_chars": (True, None), "never_split": (None, []),
        "tokenizer_class": ("BertTokenizer", "BertTokenizerFast", None),
    },
    ".model": {
        "do_lower_case": (False, None), "keep_accents": (True, None),
        # Others number the pieces anew, as XLMRobertaTokenizer.
        "tokenizer_class": (
            "AlbertTokenizer", "AlbertTokenizerFast", "T5Tokenizer", "T5TokenizerFast", "BertGenerationTokenizer", None
        ),
    },
}  # fmt: skip
_ALBERT = {"do_lower_case": True, "keep_accents": False}  # what AlbertTokenizer does unless it is stated


def convert_vocabulary(path: str, *, cased: bool = False, keep_accents: bool = False) -> Tokenizer:
    """Converts a `vocab.txt`, with BERT's rules for text as in `wordpiece.py`, or a SentencePiece model.

    Args:
      path: the file; a name that ends in .model is a SentencePiece model.
      cased: whether case and accents of text are kept; so they are if a piece is a capital letter.
      keep_accents: whether accents of lower-cased text are kept.

    Raises:
      InputError: the file is missing, invalid or a `tokenizer.json`, or an option is given for a SentencePiece model.
    """
    file = remote.parse_path(path)
    if file.suffix == ".json":
        raise InputError(f"from={path}: expected a vocab.txt or a SentencePiece model; a {FILE} needs no conversion")
    if file.suffix != ".model":
        lowercase = False if cased else None
        accents = False if keep_accents and not cased else None
        return read_vocab_file(file, lowercase, accents)
    if cased or keep_accents:
        given = "cased" if cased else "keep_accents"
        raise InputError(f"{given}: {path} is a SentencePiece model, which has its own normalization; remove it")
    return read_sentencepiece(file)


def open_folder(folder: epath.Path, *, lowercase: bool | None = None) -> Tokenizer:
    """Opens the tokenizer of a folder of `transformers`: its `tokenizer.json`, or else what is converted to one.

    Args:
      folder: a local folder.
      lowercase: whether the text of a `vocab.txt` is lower-cased; None for the folder's settings.

    Raises:
      InputError: there is no tokenizer, its settings contradict it, or the case of a `vocab.txt` is unknown.
    """
    settings = read_settings(folder)
    settings |= {} if lowercase is None else {"do_lower_case": lowercase, "strip_accents": None}
    if (folder / FILE).exists():
        return _check_settings(folder, read_tokenizer(folder / FILE), settings)
    found = [folder / name for name in (VOCABULARY, *SENTENCEPIECE_FILES) if (folder / name).exists()]
    if not found:
        raise InputError(f"{folder}: found neither {FILE} nor {VOCABULARY}; add the tokenizer's files")
    if str(settings.get("tokenizer_class")).startswith("Albert"):
        settings = _ALBERT | settings
    for name, values in _SETTINGS[VOCABULARY if found[0].name == VOCABULARY else ".model"].items():
        if settings.get(name) not in values:
            problem = f"{name}={json.dumps(settings[name])}: expected {json.dumps(values[0])} without a {FILE}"
            raise InputError(f"{folder / SETTINGS}: {problem}; save one by save_pretrained of transformers")
    if found[0].name != VOCABULARY:
        return _check_settings(folder, read_sentencepiece(found[0]), settings)
    if not isinstance(stated := settings.get("do_lower_case"), bool):
        raise InputError(f"{folder}: unknown case, no do_lower_case in {SETTINGS}; pass --cased or --uncased")
    return _check_settings(folder, read_vocab_file(found[0], stated, settings.get("strip_accents")), settings)


def _check_settings(folder: epath.Path, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> Tokenizer:
    """Returns a folder's tokenizer. Raises InputError for settings that `transformers` obeys and it does not."""
    rules = {
        "do_lower_case": tokenizer.lowercase, "strip_accents": tokenizer.strip_accents,
        "tokenize_chinese_chars": (tokenizer.content["normalizer"] or {}).get("handle_chinese_chars"),
    }  # fmt: skip
    for name, value in rules.items() if tokenizer.kind == "wordpiece" else ():
        if value is not None and settings.get(name) not in (None, value):
            fix = "correct one, or omit --cased and --uncased"
            raise InputError(f"{folder}: {name}={json.dumps(settings[name])} contradicts the tokenizer; {fix}")
    with refused(f"{folder}: the tokenizer's settings are invalid"):
        added = [settings.get(f"{role}_token") for role in ROLES]
        for name in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
            tokens = settings.get(name) or ()
            added += tokens.values() if isinstance(tokens, dict) else tokens
        if remote.exists(folder / ADDED_TOKENS):
            added += atomic.read_json(folder / ADDED_TOKENS)
        texts = [str(token["content"] if isinstance(token, dict) else token) for token in added if token]
    if missing := [text for text in texts if text not in tokenizer.added_tokens]:
        fix = "save the tokenizer by save_pretrained of transformers"
        raise InputError(f"{folder}: the settings add the token {missing[0]!r:.60}, which the tokenizer lacks; {fix}")
    return tokenizer


def read_vocab_file(path: epath.Path, lowercase: bool | None, strip_accents: bool | None = None) -> Tokenizer:
    r"""Reads a `vocab.txt`: UTF-8, one piece a line, the line (from 0) is the id. Only "\n" ends a line.

    Args:
      path: the file.
      lowercase: whether text is lower-cased; None if it is unless a piece is a capital letter.
      strip_accents: whether accents of lower-cased text are stripped; None for the default.

    Raises:
      InputError: missing file, invalid UTF-8, or an empty or duplicate line.
    """
    try:
        text = atomic.read_whole(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); expected UTF-8 text with one piece a line") from error
    vocab = [line.removesuffix("\r") for line in text.removeprefix("\ufeff").removesuffix("\n").split("\n")]
    letters = (piece for piece in vocab if len(piece.removeprefix(CONTINUATION)) == 1 and piece.isupper())
    if lowercase is None and (capital := next((letter for letter in letters if letter != letter.lower()), "")):
        log.info("%s is cased (it contains the piece %r): case and accents of text are kept", path, capital)
        lowercase, strip_accents = False, None
    with prefixed(path):
        return wordpiece_tokenizer(vocab, lowercase is not False, strip_accents=strip_accents)


def read_sentencepiece(path: epath.Path) -> Tokenizer:
    """Converts a SentencePiece model of the kind Unigram, with the normalization that it has.

    The library `tokenizers` looks up graphemes of less than 6 bytes in the model's table of normalized strings, and
    else single characters; SentencePiece looks up the longest string. A word with two splits of equal probability, such
    as `w ww` and `ww w`, may be split differently. The log has the number of pieces and characters that differ.

    Raises:
      InputError: the file is missing or no such model, or it has options that BERT's tokenizers do not have.
    """
    with refused(f"{path}: cannot be read as a SentencePiece model of type unigram"):
        data = atomic.read_whole(path)
        library = sentencepiece.SentencePieceProcessor()
        library.LoadFromSerializedProto(data)
        tokenizer = _from_model(data, library)
        _compare(path, tokenizer, library)  # panics with a damaged table
    return tokenizer


def _from_model(data: bytes, library: sentencepiece.SentencePieceProcessor) -> Tokenizer:
    """Returns the tokenizer of a SentencePiece model."""
    numbers = range(library.get_piece_size())
    pieces = [(library.id_to_piece(number), library.get_score(number)) for number in numbers]
    special = {number for number in numbers if library.is_control(number) or library.is_unknown(number)}
    unk = library.unk_id()
    fast = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=unk, byte_fallback=False))
    steps = [normalizers.Precompiled(table) for table in _fields(_fields([data], _NORMALIZER), _TABLE) if table]
    spaces = [normalizers.Replace(Regex("[ ▁]+"), " "), normalizers.Replace(Regex(" $"), "")]
    fast.normalizer = normalizers.Sequence([*steps, *spaces])
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    fast.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    # Other pieces than user-defined symbols are less probable than 1.
    fast.add_tokens([piece for number, (piece, score) in enumerate(pieces) if score == 0 and number not in special])
    return Tokenizer(json.loads(fast.to_str()), (None, pieces[unk][0], None, None, None))


def _fields(messages: list[bytes], number: int) -> list[bytes]:
    """Returns the values of a field of protocol buffer messages. The module of sentencepiece requires protobuf 7."""
    values = []
    for message in messages:
        parsed = empty_pb2.Empty()
        parsed.ParseFromString(message)
        values += [field.data for field in unknown_fields.UnknownFieldSet(parsed) if field.field_number == number]
    return values


def _compare(path: epath.Path, tokenizer: Tokenizer, library: sentencepiece.SentencePieceProcessor) -> None:
    """Logs how many pieces, and characters between letters, have other ids in the `sentencepiece` library.

    Raises InputError if many do: the model has options that a tokenizer.json cannot have.
    """
    special = {*tokenizer.special_tokens}
    pieces = [piece.replace("▁", " ") for piece in tokenizer.vocab if piece not in special]
    characters = [chr(code) for code in range(0x10000) if unicodedata.category(chr(code)) not in ("Cn", "Co", "Cs")]
    for name, texts in ("pieces", pieces), ("characters", [f"a{character}b" for character in characters]):
        pairs = zip(texts, tokenizer.encode_batch(texts), library.encode(texts), strict=True)
        differ = [text for text, ours, theirs in pairs if ours != theirs]
        shown = f", such as {', '.join(map(ascii, differ[:5]))}" if differ else ""
        message = f"{len(differ)} of {len(texts)} {name} have other ids in the sentencepiece library{shown}"
        if len(differ) > _MOST_DIFFERENT * len(texts):
            raise InputError(f"{message}; expected a model without byte_fallback, and with the usual rules for spaces")
        log.log(logging.WARNING if differ else logging.INFO, "%s: %s", path, message)
