"""SentencePiece tokenization (unigram or BPE), text to ids and back, with the `sentencepiece` library.

Text is normalized, see `text_normalizers`, and split at spaces. A word and the space before it, written as U+2581, are
split into the pieces of the model: the most probable ones (unigram; Kudo, 2018, arXiv 1804.10959), or those of its
merges (BPE). A run of characters that the model does not know is one [UNK].

Words are encoded one by one, as `tokenizers` does in the exported tokenizer. SentencePiece itself gets whole texts, and
adds the scores of pieces in single precision: in a long text, two splits of nearly equal score may change places.

Whole-word masking needs the starts of words. A piece starts a word
  after a space;
  at a punctuation mark or symbol, and after one, as in BERT's own splitting;
  anywhere, in scripts that are written without spaces, such as Chinese characters, kana, Thai and Khmer.
"""

import base64
import binascii
import functools
import hashlib
import json
import logging
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import sentencepiece
import tokenizers

from bert_jax.errors import InputError
from bert_jax.text.sentencepiece import fast_format, model_proto
from bert_jax.text.sentencepiece.text_normalizers import ModelNormalizer, OwnNormalizer, TextNormalizer
from bert_jax.text.tokenizer import SPECIAL_TOKENS, Tokenizer

log = logging.getLogger(__name__)

SPACE = "▁"
"""U+2581, in which SentencePiece writes a space."""

_NORMALIZATIONS = ("nfkc", "model")
_SPECIAL_NAMES = (("[PAD]", "<pad>"), (), ("[CLS]",), ("[SEP]",), ("[MASK]",))  # [UNK] has a type of its own
_MODEL_TYPES = {model_proto.UNIGRAM: "unigram", model_proto.BPE: "bpe"}
_WITHOUT_SPACES = (  # of a character's Unicode name
    "CJK", "HIRAGANA", "KATAKANA", "BOPOMOFO", "IDEOGRAPHIC", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "JAVANESE",
    "BALINESE", "TAI LE", "TAI THAM", "NEW TAI LUE", "TAI VIET", "YI SYLLABLE", "TANGUT", "NUSHU",
)  # fmt: skip


class SentencePieceTokenizer(Tokenizer):
    """SentencePiece tokenizer of a model file. Immutable; pickles as the file and is rebuilt in milliseconds.

    Attributes: those of `Tokenizer`, and
      model_type: "unigram" or "bpe".
      normalization: "nfkc", the steps of `text_normalizers`, or "model", those of the model file.
    """

    kind: ClassVar[str] = "sentencepiece"
    vocabulary_file: ClassVar[str] = "sentencepiece.model"

    def __init__(self, model: bytes, lowercase: bool, strip_accents: bool, normalization: str = "nfkc") -> None:
        """Builds the tokenizer from the bytes of a model file.

        Raises:
          InputError: not a model file of the types unigram or BPE, a special token is missing, pieces contain spaces,
            or the normalization is unknown.
        """
        if normalization not in _NORMALIZATIONS:
            raise InputError(f"normalization={normalization!r:.60}: expected one of {', '.join(_NORMALIZATIONS)}")
        proto = model_proto.parse(model)
        self.model_type = _check_model(proto)
        pieces = tuple(piece.piece for piece in proto.pieces)
        super().__init__(pieces, lowercase, _special_tokens(proto))
        self.strip_accents = strip_accents
        self.normalization = normalization
        self._model = model
        self._normalizer: TextNormalizer = (
            OwnNormalizer(lowercase, strip_accents) if normalization == "nfkc" else ModelNormalizer(model)
        )
        self._processor = _word_processor(proto)
        special = {self._ids[token] for token in self.special_tokens}
        self.continuation = np.array(
            [index not in special and not piece.startswith(SPACE) for index, piece in enumerate(pieces)], dtype=bool
        )
        self._begins_word, self._ends_word = _word_bounds(pieces, special)
        self._split_at_special = re.compile("(" + "|".join(map(re.escape, self.special_tokens)) + ")")

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "SentencePieceTokenizer":
        """Creates the tokenizer from the result of `to_json`.

        Raises:
          InputError: the value is of another kind of tokenizer or is invalid.
        """
        if value.get("kind") != cls.kind or not isinstance(value.get("model"), str):
            raise InputError(f"tokenizer: kind={value.get('kind')!r}: expected {cls.kind!r} with the key model")
        try:
            model = base64.b64decode(value["model"], validate=True)
        except binascii.Error as error:
            raise InputError(f"tokenizer: model: expected base64 ({error})") from error
        return cls.from_description(model, value)

    @classmethod
    def from_description(cls, model: bytes, value: Mapping[str, Any]) -> "SentencePieceTokenizer":
        """Creates the tokenizer from a model file and `lowercase`, `strip_accents` and `normalization` of `value`.

        Raises:
          InputError: a key is missing or invalid, or as the constructor.
        """
        for key in ("lowercase", "strip_accents"):
            if not isinstance(value.get(key), bool):
                raise InputError(f"tokenizer: {key}={value.get(key)!r:.60}: expected true or false")
        return cls(model, value["lowercase"], value["strip_accents"], value.get("normalization", "nfkc"))

    @classmethod
    def from_other_source(cls, model: bytes) -> "SentencePieceTokenizer":
        """Creates the tokenizer of a model file of another source, with the normalization of that file.

        Raises:
          InputError: as the constructor.
        """
        name = model_proto.parse(model).normalizer_spec.name
        return cls(model, lowercase=name.endswith("_cf"), strip_accents=False, normalization="model")

    def to_json(self) -> dict[str, Any]:
        """Returns the complete tokenizer as JSON, for a checkpoint; the model file is in base64."""
        model = base64.b64encode(self._model).decode()
        return {"kind": self.kind, "lowercase": self.lowercase, **self.described_rules(), "model": model}

    def described_rules(self) -> dict[str, Any]:
        """Returns the keys of `dataset.json` beside `kind` and `lowercase`."""
        return {"strip_accents": self.strip_accents, "normalization": self.normalization}

    def __reduce__(self) -> tuple[Any, ...]:
        return _cached_tokenizer, (self._model, self.lowercase, self.strip_accents, self.normalization)

    @property
    def title(self) -> str:
        """The name of the algorithm."""
        return f"SentencePiece ({'unigram' if self.model_type == 'unigram' else 'BPE'})"

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the model file, case, accents and normalization."""
        model = hashlib.sha256(self._model).hexdigest()
        value = {"kind": self.kind, "lowercase": self.lowercase, **self.described_rules(), "model": model}
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

    @functools.cached_property
    def fast_tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer in the format of `tokenizers`; `fast_format` says where a foreign model's may differ."""
        return fast_format.build(self, self._model)

    def save_huggingface(self, folder: str, model_max_length: int) -> None:
        """Writes the files of `Tokenizer.save_huggingface`; logs where a foreign model's ids may differ there."""
        super().save_huggingface(folder, model_max_length)
        if self.model_type == "unigram":
            log.info("The ids in transformers are the same, except for words with two splits of equal probability")
        if self.normalization == "nfkc":
            return
        if symbols := fast_format.user_defined_symbols(self, self._model):
            log.warning(
                "tokenizer.json splits user-defined symbols like any other text, such as %s: their ids may differ in "
                "transformers",
                ", ".join(map(repr, symbols[:10])),
            )
        characters = fast_format.differing_characters(self)
        shown = " ".join(f"U+{ord(character):04X}" for character in characters[:10])
        log.warning(
            "tokenizer.json normalizes %d characters differently from the SentencePiece model (%s), and sequences of "
            "6 bytes or more, such as decomposed Hangul: their ids may differ in transformers",
            len(characters),
            shown + (" ..." if len(characters) > 10 else "") if characters else "none",
        )

    def normalize(self, text: str) -> str:
        """Returns the text as it is split: normalized, with one U+0020 between words."""
        return self._normalizer.normalize(text)

    def vocabulary_bytes(self) -> bytes:
        """Returns the contents of the model file."""
        return self._model

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text, see `Tokenizer.encode_batch`."""
        return self._encode_words([_words(self._normalizer.normalize(text)) for text in texts])

    def encode_batch_with_offsets(self, texts: list[str]) -> list[tuple[list[int], np.ndarray]]:
        """Returns the ids and character offsets of each text, see `Tokenizer.encode_batch_with_offsets`.

        The space before a word is not in the offsets of its first piece. A piece that is a space alone is empty, at the
        beginning of its word. A stripped accent belongs to its base character.
        """
        return [self._encode_with_offsets(text) for text in texts]

    def encode_with_special_tokens(self, text: str, pair: str | None = None) -> tuple[list[int], list[int]]:
        """Encodes one or two texts, see `Tokenizer.encode_with_special_tokens`.

        After a special token, a word without a space before it has no space mark: its pieces continue a word.
        """
        first = [self.cls_id, *self._encode_literals(text), self.sep_id]
        if pair is None:
            return first, [0] * len(first)
        second = [*self._encode_literals(pair), self.sep_id]
        return first + second, [0] * len(first) + [1] * len(second)

    def decode(self, ids: Sequence[int]) -> str:
        """Joins pieces to text; special tokens are kept. Raises IndexError for an id outside [0, V)."""
        special = set(self.special_tokens)
        pieces = (self.id_to_token(int(index)) for index in ids)
        joined = "".join(f"{SPACE}{piece}" if piece in special else piece for piece in pieces)
        return joined.replace(SPACE, " ").removeprefix(" ")

    def piece_text(self, index: int) -> str:
        """Returns the text of a piece, without the mark of a space."""
        return self.id_to_token(index).replace(SPACE, "")

    def huggingface_settings(self) -> dict[str, Any]:
        """Returns the entries of `tokenizer_config.json` that describe the case."""
        return {"do_lower_case": self.lowercase, "strip_accents": self.strip_accents}

    def continues_word(self, input_ids: np.ndarray) -> np.ndarray:
        """Returns bool [B, L]: the tokens that belong to the word of the token before them."""
        continues: np.ndarray = ~self._begins_word[input_ids]
        continues[:, 1:] &= ~self._ends_word[input_ids[:, :-1]]
        return continues

    def _encode_words(self, texts: list[list[str]]) -> list[list[int]]:
        encoded = iter(self._processor.encode([word for words in texts for word in words], num_threads=1))
        return [[index for _ in words for index in next(encoded)] for words in texts]

    def _encode_literals(self, text: str) -> list[int]:
        """Returns the ids of a text with literal special tokens."""
        ids: list[int] = []
        for number, part in enumerate(self._split_at_special.split(text)):
            if number % 2:
                ids.append(self._ids[part])
                continue
            normalized = self._normalizer.normalize(part)
            words = _words(normalized)
            if words and number > 0 and not normalized.startswith(" "):
                words[0] = words[0].removeprefix(SPACE)
            ids += self._encode_words([words])[0]
        return ids

    def _encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        normalized, characters = self._normalizer.normalize_with_offsets(text)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        place = 0
        for word in normalized.split(" "):
            if word:
                (word_ids,) = self._encode_words([[SPACE + word]])
                (surfaces,) = self._processor.encode([SPACE + word], out_type=str, num_threads=1)
                ids += word_ids
                end = place - 1  # in characters of `normalized`; a word begins with a space that may not be there
                for surface in surfaces:
                    begin, end = end, end + len(surface)
                    begin = max(begin, place)
                    first = int(characters[begin][0])
                    offsets.append((first, int(characters[end - 1][1]) if end > begin else first))
            place += len(word) + 1
        # One character may become several words, such as U+FDFA; a space mark between them is not before its word.
        result = np.maximum.accumulate(np.array(offsets, np.int32).reshape(-1, 2), axis=0)
        if self.strip_accents and not text.isascii():
            for index, character in enumerate(text):
                if character >= "\u0300" and unicodedata.category(character) == "Mn":
                    result[(result[:, 1] == index) & (result[:, 0] < index), 1] = index + 1
        return ids, result


@functools.lru_cache(maxsize=4)
def _cached_tokenizer(model: bytes, lowercase: bool, strip_accents: bool, normalization: str) -> SentencePieceTokenizer:
    """Returns the tokenizer cached in this process, so that unpickling it with every task builds it once."""
    return SentencePieceTokenizer(model, lowercase, strip_accents, normalization)


def _words(normalized: str) -> list[str]:
    return [SPACE + word for word in normalized.split(" ") if word]


def _check_model(proto: Any) -> str:
    """Returns the model's type. Raises InputError for a model that this package does not support."""
    kind = _MODEL_TYPES.get(proto.trainer_spec.model_type or model_proto.UNIGRAM)
    if kind is None:
        raise InputError(
            f"the SentencePiece model has model_type={proto.trainer_spec.model_type}: expected 1 (unigram) or 2 (BPE)"
        )
    for name in ("treat_whitespace_as_suffix", "byte_fallback"):
        if getattr(proto.trainer_spec, name):
            raise InputError(f"the SentencePiece model has {name}=true: expected false; train one without it")
    for name in ("add_dummy_prefix", "remove_extra_whitespaces", "escape_whitespaces"):
        if proto.normalizer_spec.HasField(name) and not getattr(proto.normalizer_spec, name):
            raise InputError(f"the SentencePiece model has {name}=false: expected true; train one with it")
    for index, piece in enumerate(proto.pieces):
        if SPACE in piece.piece[1:] and piece.piece.strip(SPACE):
            raise InputError(
                f"the SentencePiece model has the piece {piece.piece!r} of several words, with id {index}: expected "
                "split_by_whitespace=true; train one with it"
            )
    return kind


def _special_tokens(proto: Any) -> tuple[str, ...]:
    pieces = {piece.piece for piece in proto.pieces}
    unknown = [piece.piece for piece in proto.pieces if piece.type == model_proto.UNKNOWN]
    names = [unknown, *([name for name in known if name in pieces] for known in _SPECIAL_NAMES[2:])]
    names.insert(0, [name for name in _SPECIAL_NAMES[0] if name in pieces])
    if missing := [token for token, found in zip(SPECIAL_TOKENS, names, strict=True) if not found]:
        raise InputError(
            f"the SentencePiece model lacks special tokens: {' '.join(missing)}; train one with `bert-jax vocab`, or "
            "add them as control symbols (control_symbols=[CLS],[SEP],[MASK])"
        )
    return tuple(found[0] for found in names)


def _word_processor(proto: Any) -> sentencepiece.SentencePieceProcessor:
    """Returns the model's processor of words that are normalized and begin with U+2581."""
    bare = type(proto)()
    bare.CopyFrom(proto)
    spec = bare.normalizer_spec
    spec.name, spec.precompiled_charsmap, spec.escape_whitespaces = "identity", b"", True
    spec.add_dummy_prefix = spec.remove_extra_whitespaces = False
    return model_proto.open_processor(bare)


def _word_bounds(pieces: Sequence[str], special: set[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns bool [V] twice: the pieces that begin a word, and those after which a word begins."""
    begins, ends = np.ones((2, len(pieces)), dtype=bool)
    for index, piece in enumerate(pieces):
        text = piece.lstrip(SPACE)
        if index not in special and text:
            begins[index] = piece.startswith(SPACE) or not _joins(text[0])
            ends[index] = not _joins(text[-1])
        elif index not in special:
            ends[index] = False  # a space alone, whose word follows
    return begins, ends


def _joins(character: str) -> bool:
    """Returns True for letters, digits and marks of scripts that are written with spaces between words."""
    if unicodedata.category(character)[0] not in "LMN":
        return False
    return not unicodedata.name(character, "").startswith(_WITHOUT_SPACES)
