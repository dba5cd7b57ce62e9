"""BERT's WordPiece tokenization, text to ids and back, with the Rust `tokenizers` library.

Text is cleaned (control characters dropped) and CJK characters are separated. For an uncased vocabulary, text is
lower-cased and its accents are stripped. Words are split at white space and punctuation. Each word is split greedily
into the longest matching pieces of the vocabulary, those after the first with `##`. A word without a match, or longer
than 200 characters, is [UNK]. See `tokenization.py` of google-research/bert.

The library's own BertNormalizer and BertPreTokenizer differ from that code on 138,000 code points. They drop private
characters, do not support final sigma, do not treat U+2B820 to U+2B91F as CJK, and use Unicode data for accents and
punctuation that is some ten years old. Three regular expressions fix that at no measurable cost.
tests/text/test_every_code_point.py compares every code point with a Python port of that code. Remaining differences:

  U+166D            punctuation, as until Unicode 11
  U+111C9           punctuation if cased, as until Unicode 10; an accent now
  U+1734            stripped as an accent if uncased, as until Unicode 13
  U+11938           not decomposed into two if uncased, as it is since Unicode 13
  final sigma       not detected after two signs such as `'` and `.`, and beside U+1171E, an accent until Unicode 15
  newer characters  the library supports Unicode 16, the reference the version of its Python
"""

import functools
import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Special tokens of every vocabulary, in the order of their ids (from 0) in `vocabulary.train_wordpiece`."""

CONTINUATION = "##"
MAX_WORD_CHARACTERS = 200
"""Maximum length of a word; longer ones are [UNK]. (The library's default is 100.)"""

_KIND = "wordpiece"
_TEXT_RULES = ("reference", "library")


@dataclass(frozen=True)
class TokenizerRules:
    """Rules of a tokenizer other than its case. The defaults are those of the reference, and are not saved.

    Attributes:
      max_word_characters: longer words are [UNK].
      text: rules for cleaning and splitting text: "reference" as `tokenization.py` of google-research/bert, "library"
        as BertNormalizer and BertPreTokenizer of `tokenizers`. The module's docstring lists the differences.
    """

    max_word_characters: int = MAX_WORD_CHARACTERS
    text: str = "reference"

    def __post_init__(self) -> None:
        if type(self.max_word_characters) is not int or not 1 <= self.max_word_characters < 1 << 31:
            raise InputError(f"max_word_characters={self.max_word_characters!r:.60}: expected an integer of at least 1")
        if self.text not in _TEXT_RULES:
            raise InputError(f"text_rules={self.text!r:.60}: expected one of {', '.join(_TEXT_RULES)}")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "TokenizerRules":
        """Reads the rules from the JSON form of a tokenizer; missing keys have their defaults."""
        return cls(value.get("max_word_characters", MAX_WORD_CHARACTERS), value.get("text_rules", "reference"))

    def to_json(self) -> dict[str, Any]:
        """Returns the rules that differ from the defaults."""
        value = {"max_word_characters": self.max_word_characters, "text_rules": self.text}
        default = {"max_word_characters": MAX_WORD_CHARACTERS, "text_rules": "reference"}
        return {key: entry for key, entry in value.items() if entry != default[key]}


# Portable syntax only: readers of an exported tokenizer may use another regular expression engine.
_DROPPED = r"\u0000-\u0008\u000B\u000C\u000E-\u001F\u007F-\u009F\uFFFD\p{Cf}"
_IGNORED = r"\p{Case_Ignorable}"
_FINAL_SIGMA = (  # As in Unicode's SpecialCasing: after a cased letter, not before one; ignorables are skipped.
    rf"(?:(?<=\p{{Cased}})(?<!{_IGNORED})|(?<=\p{{Cased}}{_IGNORED})(?<!{_IGNORED}{_IGNORED}))"
    rf"Σ(?!{_IGNORED}*(?!{_IGNORED})\p{{Cased}})"
)
# BertPreTokenizer, which is faster, splits at punctuation below U+061D and in U+2010 to U+2E42.
_SPLIT = r"[^\P{P}\u0000-\u061C\u2010-\u2E42]" + "|[\U0002b820-\U0002b91f]"


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the dtype in which token ids are stored."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def normalizer(lowercase: bool, text_rules: str = "reference") -> normalizers.Normalizer:
    """Returns the step that cleans text; accents are stripped if `lowercase` is set.

    With the reference's rules it keeps white space: `pre_tokenizer` splits at any of it.
    """
    if text_rules == "library":
        return normalizers.BertNormalizer(lowercase=lowercase)
    bert = normalizers.BertNormalizer(
        clean_text=False, handle_chinese_chars=True, strip_accents=None, lowercase=lowercase
    )
    if not lowercase:
        return normalizers.Sequence([normalizers.Replace(Regex(f"[{_DROPPED}]"), ""), bert])
    accents = r"\p{Mn}"  # For those unknown to the library; it strips the others itself, after NFD.
    return normalizers.Sequence(
        [
            normalizers.Replace(Regex(f"[{_DROPPED}{accents}]"), ""),
            normalizers.Replace(Regex(_FINAL_SIGMA), "ς"),
            bert,
        ]
    )


def pre_tokenizer(text_rules: str = "reference") -> pre_tokenizers.PreTokenizer:
    """Returns the step that splits normalized text into words."""
    if text_rules == "library":
        return pre_tokenizers.BertPreTokenizer()
    late = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    return pre_tokenizers.Sequence([late, pre_tokenizers.BertPreTokenizer()])


class WordPieceTokenizer:
    """WordPiece tokenizer of a vocabulary. Immutable; pickles as its vocabulary and is rebuilt in milliseconds.

    Attributes:
      vocab: the pieces; the index is the id.
      lowercase: whether text is lower-cased and stripped of accents.
      rules: further rules, see `TokenizerRules`.
      vocab_size: the number of pieces, V.
      pad_id, unk_id, cls_id, sep_id, mask_id: ids of the special tokens.
      continuation: [V] bool, the pieces that begin with `##`.
      sha256: a hash of kind, lowercase and vocabulary, not of the rules: equal if ids have the same meaning.
    """

    def __init__(self, vocab: Sequence[str], lowercase: bool, rules: TokenizerRules | None = None) -> None:
        """Builds the tokenizer.

        Raises:
          InputError: a special token is missing, or a piece is empty, duplicate or contains a line end.
        """
        self.vocab = tuple(vocab)
        self.lowercase = bool(lowercase)
        self.rules = rules or TokenizerRules()
        self._ids = {piece: index for index, piece in enumerate(self.vocab)}
        _check_pieces(self.vocab)
        self.vocab_size = len(self.vocab)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (self._ids[t] for t in SPECIAL_TOKENS)
        self.continuation = np.array([piece.startswith(CONTINUATION) for piece in self.vocab], dtype=bool)
        self._plain = self._build()

    @classmethod
    def from_file(cls, path: str, lowercase: bool = True, rules: TokenizerRules | None = None) -> "WordPieceTokenizer":
        r"""Reads a `vocab.txt`: UTF-8, one piece a line, the line (from 0) is the id. Only "\n" ends a line.

        Raises:
          InputError: missing file, invalid UTF-8, an empty or duplicate line, or a missing special token.
        """
        try:
            text = atomic.read_whole(remote.parse_path(path)).decode("utf-8")
        except OSError as error:
            raise InputError(
                f"{path}: cannot be read ({error.strerror or error}); expected a vocabulary file"
            ) from error
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            raise InputError(f"{path}:{line}: invalid UTF-8; expected UTF-8 text with one piece a line") from error
        lines = text.removeprefix("\ufeff").removesuffix("\n").split("\n")
        pieces = [line.removesuffix("\r") for line in lines]
        if pieces == [""]:
            raise InputError(f"{path}: the vocabulary is empty; create one with `bert-jax vocab`")
        first: dict[str, int] = {}
        for number, piece in enumerate(pieces, start=1):
            if not piece:
                raise InputError(f"{path}:{number}: empty line; expected one piece on every line")
            if piece in first:
                raise InputError(
                    f"{path}:{number}: duplicate piece {piece!r}, first on line {first[piece]}; delete one of them"
                )
            first[piece] = number
        try:
            return cls(pieces, lowercase, rules)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "WordPieceTokenizer":
        """Creates the tokenizer from the result of `to_json`.

        Raises:
          InputError: the value is of another kind of tokenizer or is invalid.
        """
        if value.get("kind") != _KIND or "vocab" not in value or "lowercase" not in value:
            raise InputError(f"tokenizer: kind={value.get('kind')!r}: expected {_KIND!r} with keys vocab and lowercase")
        if not isinstance(value["lowercase"], bool):
            raise InputError(f"tokenizer: lowercase={value['lowercase']!r:.60}: expected true or false")
        return cls(value["vocab"], value["lowercase"], TokenizerRules.from_json(value))

    def to_json(self) -> dict[str, Any]:
        """Returns the complete tokenizer as JSON, for a checkpoint or a dataset."""
        return {"kind": _KIND, "lowercase": self.lowercase, "vocab": list(self.vocab), **self.rules.to_json()}

    def __reduce__(self) -> tuple[Any, ...]:
        return _cached_tokenizer, (self.vocab, self.lowercase, self.rules)

    def __repr__(self) -> str:
        return f"WordPieceTokenizer({self.vocab_size} pieces, lowercase={self.lowercase}, sha256={self.sha256[:8]})"

    @functools.cached_property
    def sha256(self) -> str:
        value = {"kind": _KIND, "lowercase": self.lowercase, "vocab": list(self.vocab)}
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

    def save_vocabulary(self, path: str) -> None:
        """Writes a `vocab.txt` that `from_file` reads, atomically."""
        atomic.write_whole(path, self.vocabulary_bytes())

    def vocabulary_bytes(self) -> bytes:
        """Returns the contents of the `vocab.txt` that `save_vocabulary` writes."""
        return "".join(f"{piece}\n" for piece in self.vocab).encode()

    def id_to_token(self, index: int) -> str:
        """Returns the piece of an id. Raises IndexError for an id outside [0, V)."""
        if not 0 <= index < self.vocab_size:
            raise IndexError(f"index={index}: expected an id in [0, {self.vocab_size})")
        return self.vocab[index]

    def token_to_id(self, token: str) -> int:
        """Returns the id of a piece, or that of [UNK] for an unknown one."""
        return self._ids.get(token, self.unk_id)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text, without [CLS] and [SEP]. A literal "[SEP]" or "[MASK]" is ordinary text."""
        return [encoding.ids for encoding in self._plain.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_batch_with_offsets(self, texts: list[str]) -> list[tuple[list[int], np.ndarray]]:
        """Returns the ids of each text as `encode_batch` does, and the character offsets of each token.

        Returns:
          For each text, n ids and [n, 2] int32 offsets: a token is `text[begin:end]`, in characters of the original
          text, before characters are dropped, lower-cased or decomposed. Begins and ends never decrease. Pieces of one
          character (a Hangul syllable, if uncased) share its offsets. A stripped accent belongs to its base character.
        """
        result = []
        for text, encoding in zip(texts, self._plain.encode_batch(texts, add_special_tokens=False), strict=True):
            offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
            if self.lowercase and not text.isascii():
                for place, character in enumerate(text):
                    if character >= "\u0300" and unicodedata.category(character) == "Mn":  # No accents below.
                        offsets[offsets[:, 1] == place, 1] = place + 1
            result.append((encoding.ids, offsets))
        return result

    def encode_with_special_tokens(self, text: str, pair: str | None = None) -> tuple[list[int], list[int]]:
        """Encodes [CLS] text [SEP] or [CLS] text [SEP] pair [SEP]; literal special tokens in a text become their ids.

        Returns:
          `input_ids` and `token_type_ids`, which are 1 for the pair and its [SEP], else 0.
        """
        encoding = self._special.encode(text, pair)
        return encoding.ids, encoding.type_ids

    def decode(self, ids: Sequence[int]) -> str:
        """Joins pieces to text with spaces between words; `##` pieces are appended and special tokens kept.

        Raises:
          IndexError: an id outside [0, V).
        """
        return " ".join(self.id_to_token(int(index)) for index in ids).replace(f" {CONTINUATION}", "")

    def save_huggingface(self, folder: str, model_max_length: int) -> None:
        """Writes the files that `transformers` reads a tokenizer from: tokenizer.json, its two configs, and vocab.txt.

        Its AutoTokenizer returns the ids of `encode_with_special_tokens`. Its class is the generic one, which follows
        tokenizer.json: BertTokenizer of version 5 limits words to 100 characters, whatever that file says.

        Args:
          folder: a local folder; created if missing.
          model_max_length: the number of positions of the model.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            "do_lower_case": self.lowercase,
            "strip_accents": None,
            "tokenize_chinese_chars": True,
            "model_max_length": model_max_length,
            **special,
        }
        self.save_vocabulary(str(path / "vocab.txt"))
        (path / "tokenizer.json").write_text(self._special.to_str(pretty=True), encoding="utf-8")
        (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
        (path / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")

    def _build(self) -> Tokenizer:
        model = models.WordPiece(
            self._ids,
            unk_token="[UNK]",
            max_input_chars_per_word=self.rules.max_word_characters,
            continuing_subword_prefix=CONTINUATION,
        )
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizer(self.lowercase, self.rules.text)
        tokenizer.pre_tokenizer = pre_tokenizer(self.rules.text)
        return tokenizer

    @functools.cached_property
    def _special(self) -> Tokenizer:
        """Tokenizer that recognizes special tokens in text, which `_plain` does not."""
        tokenizer = self._build()
        tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS]:0 $A:0 [SEP]:0",
            pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
            special_tokens=[("[CLS]", self.cls_id), ("[SEP]", self.sep_id)],
        )
        tokenizer.decoder = decoders.WordPiece(prefix=CONTINUATION)
        return tokenizer


@functools.lru_cache(maxsize=4)
def _cached_tokenizer(vocab: tuple[str, ...], lowercase: bool, rules: TokenizerRules) -> WordPieceTokenizer:
    """Returns the tokenizer cached in this process, so that unpickling it with every task builds it once."""
    return WordPieceTokenizer(vocab, lowercase, rules)


def _check_pieces(vocab: tuple[str, ...]) -> None:
    pieces = Counter(vocab)
    if missing := [token for token in SPECIAL_TOKENS if token not in pieces]:
        raise InputError(f"the vocabulary lacks special tokens: {' '.join(missing)}; add a line for each")
    if len(pieces) < len(vocab):
        duplicate = next(piece for piece, count in pieces.items() if count > 1)
        raise InputError(f"the vocabulary has duplicate pieces {duplicate!r}; keep one of them")
    for index, piece in enumerate(vocab):
        if not piece or "\n" in piece or "\r" in piece:
            raise InputError(
                f"the vocabulary has an invalid piece {piece!r} with id {index}; expected text on one line"
            )
