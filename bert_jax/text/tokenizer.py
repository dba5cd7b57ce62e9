"""Tokenizers: a `tokenizer.json` of the `tokenizers` library, with the roles of its special tokens.

The file has all rules of a tokenizer: the normalization of text, the splitting into words, and the pieces. `bert-jax
vocab` writes one; a dataset, a checkpoint and an export have it; and any model of `transformers` brings one. Text is
encoded by the library, so that ids are those of `transformers`.
"""

import functools
import hashlib
import json
import os
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from etils import epath
from tokenizers import decoders, models, processors

from bert_jax.errors import InputError, prefixed, refused
from bert_jax.files import atomic, remote

FILE, SETTINGS, SPECIAL_TOKENS_MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
"""Names of files in a folder of `transformers`; the latter two state the special tokens."""

ROLES = ("pad", "unk", "cls", "sep", "mask")
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Special tokens by role, in the order of their ids (from 0) in a vocabulary that `bert-jax vocab` trains."""

_USUAL_NAMES = (("[PAD]", "<pad>"), ("[UNK]", "<unk>"), ("[CLS]", "<s>"), ("[SEP]", "</s>"), ("[MASK]", "<mask>"))
_SPACE = "\u2581"  # in which pieces of Unigram and BPE have the space before them
_WITHOUT_SPACES = (  # scripts, by the beginning of a character's Unicode name
    "CJK", "HIRAGANA", "KATAKANA", "BOPOMOFO", "IDEOGRAPHIC", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN",
)  # fmt: skip
_DAMAGED = "\ufffd"  # decoded from a part of a character's bytes
_UNWRITTEN = "\U0010fffd"  # a private character that no text has


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the dtype in which token ids are stored."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class Tokenizer:
    """A tokenizer and the roles of its special tokens. Immutable; pickles as its JSON.

    Attributes:
      content: the contents of `tokenizer.json`, with [CLS] A [SEP] B [SEP] as its template.
      special_tokens: the names of [PAD], [UNK], [CLS], [SEP] and [MASK] in this tokenizer, in this order.
      kind: the algorithm: "wordpiece", "unigram", "bpe", "byte_bpe" or "wordlevel".
      vocab: the pieces; the index is the id. Empty for an id without a piece.
      vocab_size: the number of ids, V.
      pad_id, unk_id, cls_id, sep_id, mask_id: ids of the special tokens.
      lowercase, strip_accents: whether text is lower-cased, and whether accents are stripped.
      word_prefix: what text needs before it to be encoded as after other text: a space or nothing.
    """

    def __init__(self, content: Mapping[str, Any], special_tokens: Sequence[str | None] = (None,) * len(ROLES)) -> None:
        """Builds a tokenizer.

        Args:
          content: the contents of a `tokenizer.json`.
          special_tokens: the names in the order of `ROLES`; None for a usual name, such as [CLS] or <s>.

        Raises:
          InputError: the library refuses the content, or a special token is missing.
        """
        self._full = _build(json.dumps(content))
        self._ids = ids = self._full.get_vocab(with_added_tokens=True)
        self.special_tokens = _find_special_tokens(ids, special_tokens)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (ids[name] for name in self.special_tokens)
        self.content = _with_roles(self._full, self.special_tokens)
        self.kind = _kind(self.content)
        if self.kind == "wordpiece":  # without it, the library joins punctuation marks to words
            self._full.decoder = decoders.WordPiece(self._prefix, cleanup=False)
        hidden = json.dumps({**self.content, "post_processor": None})
        for name in self.special_tokens:
            hidden = hidden.replace(json.dumps(name), json.dumps(f"{name} {_UNWRITTEN}"))
        self._plain = _build(hidden)  # to which the names of special tokens are ordinary text
        self.vocab_size = max(ids.values()) + 1
        pieces = [""] * self.vocab_size
        for piece, index in ids.items():
            pieces[index] = piece
        self.vocab = tuple(pieces)
        normalizer = self._plain.normalizer
        letter, accented = (normalizer.normalize_str(text) if normalizer else text for text in ("A", "é"))
        self.lowercase, self.strip_accents = "a" in letter, "e" in accented and "\u0301" not in accented
        begin, inside = self.encode_batch(["a", " a"])
        self.word_prefix = "" if begin == inside else " "

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (json.dumps(self.to_json()),)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Tokenizer":
        """Builds a tokenizer from the result of `to_json`. InputError for anything else."""
        if not isinstance(value, dict) or value.keys() != {"special_tokens", "tokenizer"}:
            raise InputError("tokenizer: expected the keys special_tokens and tokenizer")
        return cls(value["tokenizer"], value["special_tokens"])

    def to_json(self) -> dict[str, Any]:
        """Returns the complete tokenizer as JSON, for a checkpoint."""
        return {"special_tokens": list(self.special_tokens), "tokenizer": self.content}

    @functools.cached_property
    def follows_bert(self) -> bool:
        """True for WordPiece with BERT's rules for text, see `wordpiece.py`, and no tokens besides the pieces."""
        types = [(self.content[part] or {}).get("type") for part in ("model", "normalizer", "pre_tokenizer")]
        has_rules = types == ["WordPiece", "BertNormalizer", "BertPreTokenizer"]
        return has_rules and self.added_tokens == {*self.special_tokens}

    @functools.cached_property
    def sha256(self) -> str:
        """Hash that is equal if ordinary text has ids of the same meaning.

        With BERT's rules it is of the pieces and the options of the rules. Otherwise special tokens count without the
        spaces that they take, which are in no ordinary text.
        """
        value: Any = {part: self.content[part] for part in ("normalizer", "pre_tokenizer", "model", "added_tokens")}
        if self.follows_bert:
            normalizer, longest = value["normalizer"], value["model"]["max_input_chars_per_word"]
            rules = [normalizer["clean_text"], normalizer["handle_chinese_chars"], longest]
            value = [self.vocab, self.lowercase, self.strip_accents, rules != [True, True, 100] and rules]
        else:
            plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            added = value["added_tokens"]
            value["added_tokens"] = [one | plain if one["content"] in self.special_tokens else one for one in added]
        return hashlib.sha256(json.dumps([value, self.special_tokens], sort_keys=True).encode()).hexdigest()

    @functools.cached_property
    def ids_sha256(self) -> str:
        """Hash that is equal if each id has the same piece and the same role, by whatever rules text is encoded."""
        return hashlib.sha256(json.dumps([self.vocab, self.special_tokens]).encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, without [CLS] and [SEP]. A literal "[SEP]" or "[MASK]" is ordinary text."""
        return [encoding.ids for encoding in self._plain.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_words(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text as if other text and a space came before it."""
        return self.encode_batch([self.word_prefix + text for text in texts])

    def encode_batch_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
        """Returns the ids of each text as `encode_batch` does, and the character offsets of each token.

        Returns:
          For each text, n ids and [n, 2] int32 offsets: a token is `text[begin:end]`, in characters of the original
          text, before it is normalized, without the spaces around it. Begins and ends never decrease. Pieces of one
          character share its offsets; a stripped accent belongs to its base character.
        """
        encoded = self._plain.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, _offsets(text, encoding.offsets)) for text, encoding in zip(texts, encoded, strict=True)]

    def encode_with_special_tokens(self, text: str, pair: str | None = None) -> tuple[list[int], list[int]]:
        """Encodes [CLS] text [SEP] or [CLS] text [SEP] pair [SEP]; literal special tokens in a text become their ids.

        Returns:
          `input_ids` and `token_type_ids`, which are 1 for the pair and its [SEP], else 0.
        """
        encoding = self._full.encode(text, pair)
        return encoding.ids, encoding.type_ids

    def decode(self, ids: Sequence[int]) -> str:
        """Joins pieces to text; special tokens are kept."""
        text: str = self._full.decode([int(index) for index in ids], skip_special_tokens=False)
        return text.removeprefix(" ")

    def id_to_token(self, index: int) -> str:
        """Returns the piece of an id."""
        return self.vocab[index]

    def token_to_id(self, token: str) -> int:
        """Returns the id of a piece, or that of [UNK] for an unknown one."""
        return self._ids.get(token, self.unk_id)

    def continues_word(self, input_ids: np.ndarray) -> np.ndarray:
        """Returns bool [B, L]: the tokens of `input_ids` [B, L] that belong to the word of the token before them.

        WordPiece marks the pieces that continue a word. A piece of Unigram and BPE begins a word after a space; at a
        punctuation mark or symbol, and after one, as in BERT's own splitting; and anywhere in scripts that are written
        without spaces, such as Chinese characters, kana, Thai and Khmer. A piece of bytes begins one if all characters
        that begin with them do. Pieces without such marks are words.
        """
        begins, ends = self._word_bounds
        continues: np.ndarray = ~begins[input_ids]
        continues[:, 1:] &= ~ends[input_ids[:, :-1]]
        return continues

    @functools.cached_property
    def _word_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Bool [V] twice: the pieces that begin a word, and those after which a word begins."""
        begins, ends = np.ones((2, self.vocab_size), bool)
        if self._prefix:
            return np.array([not piece.startswith(self._prefix) for piece in self.vocab]), ~begins
        texts = list(map(self._text, self.vocab))
        if not any(text.startswith(" ") for text in texts):
            return begins, ends
        for index, (piece, text) in enumerate(zip(self.vocab, texts, strict=True)):
            if piece not in self.special_tokens:
                word = text.removeprefix(" ")
                first = word[:1] if word[:1] != _DAMAGED else self._possible(piece)
                begins[index] = text != word or (bool(word) and not any(map(_joins, first)))
                ends[index] = bool(word) and not _joins(word[-1])
        return begins, ends

    def _possible(self, piece: str) -> str:
        """Returns the first and the last of the characters that begin with the bytes of a piece."""
        return "".join(self._text(piece + last * 3)[0] for last in ("Ģ", "¿"))  # as bytes: 0x80 and 0xBF

    def _text(self, piece: str) -> str:
        """Returns the text of a piece of Unigram or BPE, with the space before it if its word begins with it."""
        if self.kind == "byte_bpe" and piece not in self.added_tokens:
            return decoders.ByteLevel().decode([piece])
        return piece.replace(_SPACE, " ")

    @property
    def _prefix(self) -> str:
        """The mark of pieces that continue a word; empty if there is none."""
        return self.content["model"].get("continuing_subword_prefix") or ""

    @functools.cached_property
    def added_tokens(self) -> set[str]:
        """The tokens besides the pieces, those of the roles included."""
        return {token["content"] for token in self.content["added_tokens"]}

    def save(
        self, folder: str | os.PathLike[str], model_max_length: int | None = None, *, has_segments: bool = True
    ) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, from which `transformers` reads the same tokenizer.

        Its class is the generic one, which follows tokenizer.json: BertTokenizer of version 5 limits words to 100
        characters, whatever that file says.

        Args:
          folder: an existing folder.
          model_max_length: the number of positions of the model; None if there is none.
          has_segments: whether the model reads `token_type_ids`.
        """
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", *(["token_type_ids"] if has_segments else []), "attention_mask"],
            "do_lower_case": self.lowercase,
            "strip_accents": self.strip_accents,
            **({"model_max_length": model_max_length} if model_max_length else {}),
            **{f"{role}_token": token for role, token in zip(ROLES, self.special_tokens, strict=True)},
        }
        place = remote.parse_path(os.fspath(folder))
        atomic.write_whole(place / FILE, self.file_bytes())
        atomic.write_whole(place / SETTINGS, (json.dumps(config, indent=2) + "\n").encode())

    def file_bytes(self) -> bytes:
        """Returns the contents of `tokenizer.json`."""
        return (json.dumps(self.content, indent=2, ensure_ascii=False) + "\n").encode()


def read_tokenizer(location: str | os.PathLike[str]) -> Tokenizer:
    """Reads a `tokenizer.json`, with the special tokens that the files of `transformers` beside it state.

    Raises InputError if the file is missing, of another format, or lacks a special token.
    """
    path = remote.parse_path(os.fspath(location))
    try:
        content = json.loads(atomic.read_whole(path))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({error!s:.200}); expected a {FILE}") from error
    settings = read_settings(path.parent)
    named = [settings.get(f"{role}_token") for role in ROLES]
    names = [token.get("content") if isinstance(token, dict) else token for token in named]
    with prefixed(path):
        return Tokenizer(content, [str(name) if name else None for name in names])


def read_settings(folder: epath.Path) -> dict[str, Any]:
    """Returns the settings of a tokenizer in a folder of `transformers`; empty if it has none.

    Raises InputError for a file that is no JSON object.
    """
    settings: dict[str, Any] = {}
    for name in (SPECIAL_TOKENS_MAP, SETTINGS):
        if remote.exists(folder / name):
            settings |= atomic.read_json(folder / name)
    return settings


def _find_special_tokens(ids: Mapping[str, int], known: Sequence[str | None]) -> tuple[str, ...]:
    """Returns the name of each role's token: the known one, or else the first usual name that is a piece.

    Raises InputError for a role without one.
    """
    found = [
        name if name in ids else next((one for one in usual if name is None and one in ids), "")
        for name, usual in zip(known, _USUAL_NAMES, strict=True)
    ]
    if missing := [SPECIAL_TOKENS[index] for index, name in enumerate(found) if not name]:
        raise InputError(f"the tokenizer lacks special tokens: {' '.join(missing)}; name its own in a {SETTINGS}")
    return tuple(str(name) for name in found)


def _kind(content: Mapping[str, Any]) -> str:
    kind = str(content["model"]["type"]).lower()
    return "byte_bpe" if kind == "bpe" and "ByteLevel" in json.dumps(content["pre_tokenizer"]) else kind


def _with_roles(full: tokenizers.Tokenizer, special_tokens: Sequence[str]) -> dict[str, Any]:
    """Gives a tokenizer special tokens for the roles and the template of BERT's input, and returns its content."""
    _, _, cls, sep, _ = special_tokens
    known: dict[str, Any] = {token.content: token for token in full.get_added_tokens_decoder().values()}
    full.add_special_tokens([known.get(name, name) for name in special_tokens])  # with the spaces that they take
    ids = [(name, full.token_to_id(name)) for name in (cls, sep)]
    full.post_processor = processors.TemplateProcessing([cls, "$A", sep], [cls, "$A", sep, "$B:1", f"{sep}:1"], ids)
    full.no_truncation()
    full.no_padding()
    if isinstance(full.model, models.BPE):
        full.model.dropout = None
    return json.loads(full.to_str())


def _build(text: str) -> tokenizers.Tokenizer:
    """Builds the library's tokenizer of a `tokenizer.json`. Raises InputError for an invalid one."""
    with refused("the library `tokenizers` refuses the file"):
        built = tokenizers.Tokenizer.from_str(text)
        built.encode("ꓐᎠⵣ")  # no word of any language: fails without a piece for unknown ones
    return built


def _offsets(text: str, found: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns offsets [n, 2] of tokens, without spaces, and with the accents that no token has."""
    offsets = np.array(found, np.int32).reshape(-1, 2)
    for row, (begin, end) in enumerate(found):
        if begin < end and (text[begin].isspace() or text[end - 1].isspace()):
            word = text[begin:end]
            begin += len(word) - len(word.lstrip())
            offsets[row] = begin, max(begin, begin + len(word.strip()))
    if not text.isascii():
        for place, character in enumerate(text):
            if character >= "\u0300" and unicodedata.category(character) == "Mn":
                inside = (offsets[:, 0] <= place) & (place < offsets[:, 1])
                offsets[(offsets[:, 1] == place) & (offsets[:, 0] < place) & ~inside.any(), 1] = place + 1
    return np.maximum.accumulate(offsets, axis=0)


def _joins(character: str) -> bool:
    """Returns True for letters, digits and marks of scripts with spaces between words, and for parts of characters."""
    if character == _DAMAGED:
        return True
    is_letter = unicodedata.category(character)[0] in "LMN"
    return is_letter and not unicodedata.name(character, "").startswith(_WITHOUT_SPACES)


@functools.lru_cache(maxsize=4)
def _unpickled(text: str) -> Tokenizer:
    """Returns the tokenizer cached in this process, so that unpickling it with every task builds it once."""
    return Tokenizer.from_json(json.loads(text))
