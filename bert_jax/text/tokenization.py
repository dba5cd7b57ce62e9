"""WordPiece: text to ids and back, as BERT does it, by the Rust `tokenizers` library.

Text is cleaned (control characters dropped), CJK characters are set apart, and, where the vocabulary is uncased, it is
lower-cased and loses its accents; words are split at white space and punctuation; each word is cut into the longest
pieces of the vocabulary from its start, those after the first with `##`; a word that cannot be cut, or is longer than
200 characters, is [UNK]. See `tokenization.py` of google-research/bert.

The library's own BertNormalizer and BertPreTokenizer differ from that code on 138,000 code points: they drop private
characters, know no final sigma, leave out U+2B820 to U+2B91F as CJK, and know accents and punctuation as of some ten
years ago. Three regular expressions mend that, and cost nothing that can be measured beside what they replace.
tests/data/test_every_code_point.py compares every code point with that code said anew in Python. What remains:

  U+166D            is punctuation, as until Unicode 11
  U+111C9           is punctuation where cased, as until Unicode 10; it is an accent now
  U+1734            is stripped as an accent where uncased, as until Unicode 13
  U+11938           is not parted in two where uncased, as it is since Unicode 13
  final sigma       is missed behind two signs such as `'` and `.`, and beside U+1171E, an accent until Unicode 15
  newer characters  the library knows those of Unicode 16, the reference those that its Python knows
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
"""What every vocabulary holds, in the order that `vocabulary.train_wordpiece` numbers them from 0."""

CONTINUATION = "##"
MAX_WORD_CHARACTERS = 200
"""Longer words are [UNK]. (The library's default is 100.)"""

_KIND = "wordpiece"
_TEXT_RULES = ("reference", "library")


@dataclass(frozen=True)
class TokenizerRules:
    """The rules of a tokenizer besides its case. The defaults are the reference's, and are not written to files.

    Attributes:
      max_word_characters: longer words are [UNK].
      text: "reference", as `tokenization.py` of google-research/bert cleans and splits text; or "library", as the
        BertNormalizer and BertPreTokenizer of the `tokenizers` library do. They differ on a final sigma, and see above.
    """

    max_word_characters: int = MAX_WORD_CHARACTERS
    text: str = "reference"

    def __post_init__(self) -> None:
        if type(self.max_word_characters) is not int or not 1 <= self.max_word_characters < 1 << 31:
            raise InputError(f"max_word_characters is {self.max_word_characters!r:.60}; it must be a number from 1 on")
        if self.text not in _TEXT_RULES:
            raise InputError(f"text_rules is {self.text!r:.60}; it must be one of {', '.join(_TEXT_RULES)}")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "TokenizerRules":
        """The rules in a description of a tokenizer; what it does not have is the default."""
        return cls(value.get("max_word_characters", MAX_WORD_CHARACTERS), value.get("text_rules", "reference"))

    def to_json(self) -> dict[str, Any]:
        """The rules that are not the default."""
        value = {"max_word_characters": self.max_word_characters, "text_rules": self.text}
        default = {"max_word_characters": MAX_WORD_CHARACTERS, "text_rules": "reference"}
        return {key: entry for key, entry in value.items() if entry != default[key]}


# Nothing in these that engines read in different ways: what reads an exported tokenizer may have another.
_DROPPED = r"\u0000-\u0008\u000B\u000C\u000E-\u001F\u007F-\u009F\uFFFD\p{Cf}"
_IGNORED = r"\p{Case_Ignorable}"
_FINAL_SIGMA = (  # As in Unicode's SpecialCasing: after a cased letter and before none, whatever is ignorable between.
    rf"(?:(?<=\p{{Cased}})(?<!{_IGNORED})|(?<=\p{{Cased}}{_IGNORED})(?<!{_IGNORED}{_IGNORED}))"
    rf"Σ(?!{_IGNORED}*(?!{_IGNORED})\p{{Cased}})"
)
# What BertPreTokenizer knows is left to it, which is faster: punctuation below U+061D and of U+2010 to U+2E42.
_SPLIT = r"[^\P{P}\u0000-\u061C\u2010-\u2E42]" + "|[\U0002b820-\U0002b91f]"


def token_dtype(vocab_size: int) -> np.dtype:
    """The type token ids are stored in."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def normalizer(lowercase: bool, text_rules: str = "reference") -> normalizers.Normalizer:
    """BERT's cleaning of text; accents are stripped where text is lower-cased.

    White space is left as it is by the reference's rules: `pre_tokenizer` takes all of it for a word's end.
    """
    if text_rules == "library":
        return normalizers.BertNormalizer(lowercase=lowercase)
    bert = normalizers.BertNormalizer(
        clean_text=False, handle_chinese_chars=True, strip_accents=None, lowercase=lowercase
    )
    if not lowercase:
        return normalizers.Sequence([normalizers.Replace(Regex(f"[{_DROPPED}]"), ""), bert])
    accents = r"\p{Mn}"  # Those that the library does not know as such yet; it strips the others itself, after NFD.
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
    """A vocabulary and the way to cut text into it. Immutable; pickles as its vocabulary, and builds in milliseconds.

    Attributes:
      vocab: the pieces; the index is the id.
      lowercase: whether text is lower-cased and stripped of accents.
      rules: what else it does to text.
      vocab_size: the number of pieces, V.
      pad_id, unk_id, cls_id, sep_id, mask_id: ids of the special tokens.
      continuation: [V] bool, the pieces that begin with `##`.
      sha256: a hash of kind, lowercase and vocabulary: equal where ids mean the same, whatever the rules are.
    """

    def __init__(self, vocab: Sequence[str], lowercase: bool, rules: TokenizerRules | None = None) -> None:
        """Builds the tokenizer.

        Raises:
          InputError: a special token is missing, or a piece is empty, doubled or holds a line's end.
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
          InputError: no such file, not UTF-8, an empty or a doubled line, or a special token that is missing.
        """
        try:
            text = atomic.read_whole(remote.named(path)).decode("utf-8")
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror or error}); name a vocabulary file") from error
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            raise InputError(f"{path}:{line}: not valid UTF-8; a vocabulary is UTF-8 text, one piece a line") from error
        lines = text.removeprefix("\ufeff").removesuffix("\n").split("\n")
        pieces = [line.removesuffix("\r") for line in lines]
        if pieces == [""]:
            raise InputError(f"{path}: the vocabulary is empty; make one with `bert-jax vocab`")
        first: dict[str, int] = {}
        for number, piece in enumerate(pieces, start=1):
            if not piece:
                raise InputError(f"{path}:{number}: an empty line; a vocabulary has one piece on every line")
            if piece in first:
                raise InputError(f"{path}:{number}: {piece!r} is on line {first[piece]} already; keep one of them")
            first[piece] = number
        try:
            return cls(pieces, lowercase, rules)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "WordPieceTokenizer":
        """The tokenizer that `to_json` described.

        Raises:
          InputError: another kind of tokenizer, or not one at all.
        """
        if value.get("kind") != _KIND or "vocab" not in value or "lowercase" not in value:
            raise InputError(f"this is no {_KIND} tokenizer: it says kind {value.get('kind')!r}")
        if not isinstance(value["lowercase"], bool):
            raise InputError(f"lowercase is {value['lowercase']!r:.60}: it has to be true or false")
        return cls(value["vocab"], value["lowercase"], TokenizerRules.from_json(value))

    def to_json(self) -> dict[str, Any]:
        """All that the tokenizer is, for a checkpoint or a dataset."""
        return {"kind": _KIND, "lowercase": self.lowercase, "vocab": list(self.vocab), **self.rules.to_json()}

    def __reduce__(self) -> tuple[Any, ...]:
        return _same_tokenizer, (self.vocab, self.lowercase, self.rules)

    def __repr__(self) -> str:
        return f"WordPieceTokenizer({self.vocab_size} pieces, lowercase={self.lowercase}, sha256={self.sha256[:8]})"

    @functools.cached_property
    def sha256(self) -> str:
        value = {"kind": _KIND, "lowercase": self.lowercase, "vocab": list(self.vocab)}
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

    def save_vocabulary(self, path: str) -> None:
        """Writes a `vocab.txt` that `from_file` reads; whole or not at all."""
        atomic.write_whole(path, self.vocabulary_bytes())

    def vocabulary_bytes(self) -> bytes:
        """Returns the contents of the `vocab.txt` that `save_vocabulary` writes."""
        return "".join(f"{piece}\n" for piece in self.vocab).encode()

    def id_to_token(self, index: int) -> str:
        """The piece of an id. Raises IndexError outside [0, V)."""
        if not 0 <= index < self.vocab_size:
            raise IndexError(f"there is no piece {index} in a vocabulary of {self.vocab_size}")
        return self.vocab[index]

    def token_to_id(self, token: str) -> int:
        """The id of a piece, and that of [UNK] for what is not one."""
        return self._ids.get(token, self.unk_id)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, without [CLS] and [SEP]. A "[SEP]" or "[MASK]" in a text is text like any other."""
        return [encoding.ids for encoding in self._plain.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_batch_with_offsets(self, texts: list[str]) -> list[tuple[list[int], np.ndarray]]:
        """The ids of each text as from `encode_batch`, and which of its characters each of them stands for.

        Returns:
          For each text, n ids and [n, 2] int32: `text[begin:end]`, in characters of the text as it was given, before
          anything was dropped, lower-cased or decomposed. Begins and ends never decrease. Pieces of one character (a
          Hangul syllable, where uncased) have the same; an accent that was stripped goes with what it stands on.
        """
        result = []
        for text, encoding in zip(texts, self._plain.encode_batch(texts, add_special_tokens=False), strict=True):
            offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
            if self.lowercase and not text.isascii():
                for place, character in enumerate(text):
                    if character >= "\u0300" and unicodedata.category(character) == "Mn":  # There is none below.
                        offsets[offsets[:, 1] == place, 1] = place + 1
            result.append((encoding.ids, offsets))
        return result

    def encode_with_special_tokens(self, text: str, pair: str | None = None) -> tuple[list[int], list[int]]:
        """[CLS] text [SEP], or [CLS] text [SEP] pair [SEP]; special tokens written in a text are those tokens.

        Returns:
          input_ids and token_type_ids; the latter are 1 for the pair and its [SEP], else 0.
        """
        encoding = self._special.encode(text, pair)
        return encoding.ids, encoding.type_ids

    def decode(self, ids: Sequence[int]) -> str:
        """The pieces as text: joined by spaces, `##` pieces to what they continue; special tokens are kept.

        Raises:
          IndexError: an id outside [0, V).
        """
        return " ".join(self.id_to_token(int(index)) for index in ids).replace(f" {CONTINUATION}", "")

    def save_huggingface(self, folder: str, model_max_length: int) -> None:
        """Writes what `transformers` reads a tokenizer from: tokenizer.json, its two configs, and vocab.txt.

        Its AutoTokenizer gives the ids of `encode_with_special_tokens`. The class is the general one, which follows
        tokenizer.json; BertTokenizer of version 5 has a limit of 100 characters to a word whatever that file says.

        Args:
          folder: on this machine; made if missing.
          model_max_length: the number of positions that the model has.
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
        """The tokenizer that knows special tokens when it reads them; `_plain` never does."""
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
def _same_tokenizer(vocab: tuple[str, ...], lowercase: bool, rules: TokenizerRules) -> WordPieceTokenizer:
    """The one of this process: what is unpickled with every task is built once."""
    return WordPieceTokenizer(vocab, lowercase, rules)


def _check_pieces(vocab: tuple[str, ...]) -> None:
    pieces = Counter(vocab)
    if missing := [token for token in SPECIAL_TOKENS if token not in pieces]:
        raise InputError(f"the vocabulary has no {' '.join(missing)}; add a line for each")
    if len(pieces) < len(vocab):
        doubled = next(piece for piece, count in pieces.items() if count > 1)
        raise InputError(f"{doubled!r} is in the vocabulary more than once; keep one of them")
    for index, piece in enumerate(vocab):
        if not piece or "\n" in piece or "\r" in piece:
            raise InputError(f"piece {index} of the vocabulary is {piece!r}; a piece is not empty and on one line")
