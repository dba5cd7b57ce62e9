"""BERT's WordPiece tokenization, text to ids and back, with the Rust `tokenizers` library.

Text is cleaned (control characters dropped) and CJK characters are separated. For an uncased vocabulary, text is
lower-cased, and its accents are stripped unless `TokenizerRules.strip_accents` is False. Words are split at white space
and punctuation. Each word is split greedily into the longest matching pieces of the vocabulary, those after the first
with `##`. A word without a match, or longer than 200 characters, is [UNK]. See `tokenization.py` of
google-research/bert.

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
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.text.tokenizer import SPECIAL_TOKENS, Tokenizer, add_special_tokens

CONTINUATION = "##"
MAX_WORD_CHARACTERS = 200
"""Maximum length of a word; longer ones are [UNK]. (The library's default is 100.)"""

_TEXT_RULES = ("reference", "library", "pretokenized")


@dataclass(frozen=True)
class TokenizerRules:
    """Rules of a tokenizer other than its case. The defaults are those of the reference, and are not saved.

    Attributes:
      max_word_characters: longer words are [UNK].
      text: rules for cleaning and splitting text: "reference" as `tokenization.py` of google-research/bert, "library"
        as BertNormalizer and BertPreTokenizer of `tokenizers` (the module's docstring lists the differences), or
        "pretokenized" for text with white space between the words, which is neither cleaned nor split further.
      strip_accents: whether accents are stripped; None if uncased text is stripped and cased text is not.
    """

    max_word_characters: int = MAX_WORD_CHARACTERS
    text: str = "reference"
    strip_accents: bool | None = None

    def __post_init__(self) -> None:
        if type(self.max_word_characters) is not int or not 1 <= self.max_word_characters < 1 << 31:
            raise InputError(f"max_word_characters={self.max_word_characters!r:.60}: expected an integer of at least 1")
        if self.text not in _TEXT_RULES:
            raise InputError(f"text_rules={self.text!r:.60}: expected one of {', '.join(_TEXT_RULES)}")
        if not (self.strip_accents is None or isinstance(self.strip_accents, bool)):
            raise InputError(f"strip_accents={self.strip_accents!r:.60}: expected true or false")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "TokenizerRules":
        """Reads the rules from the JSON form of a tokenizer; missing keys have their defaults."""
        return cls(
            value.get("max_word_characters", MAX_WORD_CHARACTERS),
            value.get("text_rules", "reference"),
            value.get("strip_accents"),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the rules that differ from the defaults."""
        value = {
            "max_word_characters": self.max_word_characters,
            "text_rules": self.text,
            "strip_accents": self.strip_accents,
        }
        default = {"max_word_characters": MAX_WORD_CHARACTERS, "text_rules": "reference", "strip_accents": None}
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


def normalizer(lowercase: bool, rules: TokenizerRules | None = None) -> normalizers.Normalizer:
    """Returns the step that cleans text, lower-cases it and strips its accents.

    With the reference's rules it keeps white space: `pre_tokenizer` splits at any of it.
    """
    rules = rules or TokenizerRules()
    strip_accents = lowercase if rules.strip_accents is None else rules.strip_accents
    bert = normalizers.BertNormalizer(
        clean_text=rules.text == "library",
        handle_chinese_chars=rules.text != "pretokenized",
        # None, the default, follows `lowercase`: tokenizer.json of a BERT has null.
        strip_accents=rules.strip_accents,
        lowercase=lowercase,
    )
    if rules.text == "library":
        return bert
    steps: list[normalizers.Normalizer] = []
    dropped = _DROPPED if rules.text == "reference" else ""
    if strip_accents:
        dropped += r"\p{Mn}"  # For those unknown to the library; it strips the others itself, after NFD.
    if dropped:
        steps.append(normalizers.Replace(Regex(f"[{dropped}]"), ""))
    if lowercase:
        steps.append(normalizers.Replace(Regex(_FINAL_SIGMA), "ς"))
    return normalizers.Sequence([*steps, bert])


def pre_tokenizer(rules: TokenizerRules | None = None) -> pre_tokenizers.PreTokenizer:
    """Returns the step that splits normalized text into words."""
    text = (rules or TokenizerRules()).text
    if text == "pretokenized":
        return pre_tokenizers.WhitespaceSplit()
    if text == "library":
        return pre_tokenizers.BertPreTokenizer()
    late = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    return pre_tokenizers.Sequence([late, pre_tokenizers.BertPreTokenizer()])


class WordPieceTokenizer(Tokenizer):
    """WordPiece tokenizer of a vocabulary. Immutable; pickles as its vocabulary and is rebuilt in milliseconds.

    Attributes: those of `Tokenizer`, and
      rules: further rules, see `TokenizerRules`.
    """

    kind: ClassVar[str] = "wordpiece"
    vocabulary_file: ClassVar[str] = "vocab.txt"

    def __init__(self, vocab: Sequence[str], lowercase: bool, rules: TokenizerRules | None = None) -> None:
        """Builds the tokenizer.

        Raises:
          InputError: a special token is missing, or a piece is empty, duplicate or contains a line end.
        """
        pieces = tuple(vocab)
        _check_pieces(pieces)
        super().__init__(pieces, bool(lowercase), SPECIAL_TOKENS)
        rules = rules or TokenizerRules()
        self.rules = replace(rules, strip_accents=None) if rules.strip_accents == self.lowercase else rules
        self.strip_accents = self.lowercase if self.rules.strip_accents is None else self.rules.strip_accents
        self.continuation = np.array([piece.startswith(CONTINUATION) for piece in pieces], dtype=bool)
        # Split at white space alone, "[MASK]" is a word: no word matches a name with a space.
        unmatched = {piece: f"{piece} " for piece in SPECIAL_TOKENS if piece != "[UNK]"}
        self._plain = self._build({unmatched.get(piece, piece): index for piece, index in self._ids.items()})

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
        if value.get("kind") != cls.kind or "vocab" not in value or "lowercase" not in value:
            raise InputError(
                f"tokenizer: kind={value.get('kind')!r}: expected {cls.kind!r} with keys vocab and lowercase"
            )
        if not isinstance(value["lowercase"], bool):
            raise InputError(f"tokenizer: lowercase={value['lowercase']!r:.60}: expected true or false")
        return cls(value["vocab"], value["lowercase"], TokenizerRules.from_json(value))

    def to_json(self) -> dict[str, Any]:
        """Returns the complete tokenizer as JSON, for a checkpoint."""
        return {"kind": self.kind, "lowercase": self.lowercase, "vocab": list(self.vocab), **self.rules.to_json()}

    def described_rules(self) -> dict[str, Any]:
        """Returns the rules that are not the default, as in `dataset.json` beside `kind` and `lowercase`."""
        return self.rules.to_json()

    def __reduce__(self) -> tuple[Any, ...]:
        return _cached_tokenizer, (self.vocab, self.lowercase, self.rules)

    @property
    def title(self) -> str:
        """The name of the algorithm."""
        return "WordPiece"

    @property
    def is_pretokenized(self) -> bool:
        """True if text is split at white space alone."""
        return self.rules.text == "pretokenized"

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of kind, case, accents, vocabulary, and whether text is pretokenized; not of the other rules."""
        value = {"kind": self.kind, "lowercase": self.lowercase, "vocab": list(self.vocab)}
        if self.rules.strip_accents is not None:
            value["strip_accents"] = self.strip_accents
        if self.is_pretokenized:
            value["text_rules"] = self.rules.text
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

    def vocabulary_bytes(self) -> bytes:
        """Returns the contents of a `vocab.txt` that `from_file` reads."""
        return "".join(f"{piece}\n" for piece in self.vocab).encode()

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text, without [CLS] and [SEP]. A literal "[SEP]" or "[MASK]" is ordinary text."""
        return [encoding.ids for encoding in self._plain.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_batch_with_offsets(self, texts: list[str]) -> list[tuple[list[int], np.ndarray]]:
        """Returns the ids and character offsets of each text, see `Tokenizer.encode_batch_with_offsets`.

        A Hangul syllable without its accents is several pieces, which share its offsets. A stripped accent belongs to
        its base character.
        """
        result = []
        for text, encoding in zip(texts, self._plain.encode_batch(texts, add_special_tokens=False), strict=True):
            offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
            if self.strip_accents and not text.isascii():
                for place, character in enumerate(text):
                    if character >= "\u0300" and unicodedata.category(character) == "Mn":  # No accents below.
                        offsets[offsets[:, 1] == place, 1] = place + 1
            result.append((encoding.ids, offsets))
        return result

    def encode_with_special_tokens(self, text: str, pair: str | None = None) -> tuple[list[int], list[int]]:
        """Encodes one or two texts, see `Tokenizer.encode_with_special_tokens`."""
        encoding = self.fast_tokenizer.encode(text, pair)
        return encoding.ids, encoding.type_ids

    def decode(self, ids: Sequence[int]) -> str:
        """Joins pieces to text with spaces between words; `##` pieces are appended and special tokens kept.

        Raises:
          IndexError: an id outside [0, V).
        """
        return " ".join(self.id_to_token(int(index)) for index in ids).replace(f" {CONTINUATION}", "")

    def piece_text(self, index: int) -> str:
        """Returns the text of a piece, without `##`."""
        return self.id_to_token(index).removeprefix(CONTINUATION)

    def huggingface_settings(self) -> dict[str, Any]:
        """Returns the entries of `tokenizer_config.json` that describe the case and the splitting of text."""
        return {
            "do_lower_case": self.lowercase,
            "strip_accents": self.rules.strip_accents,
            "tokenize_chinese_chars": not self.is_pretokenized,
        }

    def _build(self, ids: dict[str, int]) -> tokenizers.Tokenizer:
        model = models.WordPiece(
            ids,
            unk_token="[UNK]",
            max_input_chars_per_word=self.rules.max_word_characters,
            continuing_subword_prefix=CONTINUATION,
        )
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = normalizer(self.lowercase, self.rules)
        tokenizer.pre_tokenizer = pre_tokenizer(self.rules)
        return tokenizer

    @functools.cached_property
    def fast_tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer of `tokenizers` that recognizes special tokens in text, which `_plain` does not."""
        tokenizer = self._build(self._ids)
        add_special_tokens(tokenizer, self)
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
