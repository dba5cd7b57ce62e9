"""Normalization of text before SentencePiece: that of this package, or that of a model file of another source.

Models that `bert-jax vocab` trains have no normalization of their own (`identity`). Their text is normalized by the
steps of `tokenizers` that are exported with them, so that `transformers` sees the same text:

  control and format characters and U+FFFD are dropped, except U+200C and U+200D, which some scripts need
  NFKC
  lower case, without the context of a final sigma
  accents of Latin, Greek and Cyrillic letters are stripped; vowel signs of other scripts are kept
  white space, U+200B and U+2581 (SentencePiece's own mark of a space) become a single U+0020
"""

from typing import Protocol

import numpy as np
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from bert_jax.text.sentencepiece import model_proto

_DROPPED = (
    r"[\u0000-\u0008\u000E-\u001F\u007F-\u0084\u0086-\u009F\uFFFD"
    r"\u00AD\u0600-\u0605\u061C\u06DD\u070F\u0890\u0891\u08E2\u180E\u200E\u200F\u202A-\u202E\u2060-\u2064\u2066-\u206F"
    r"\uFEFF\uFFF9-\uFFFB]"
)
_ACCENTS = r"[\u0300-\u036F\u1AB0-\u1AFF\u1DC0-\u1DFF\u20D0-\u20FF\uFE20-\uFE2F]"
_SPACES = r"[\s\u200B\u2581]+"


class TextNormalizer(Protocol):
    """Normalization of a text to words separated by single spaces."""

    def normalize(self, text: str) -> str:
        """Returns the normalized text; it may begin with a space, and does not end with one."""

    def normalize_with_offsets(self, text: str) -> tuple[str, np.ndarray]:
        """Returns the normalized text of n characters, and [n, 2] int32 offsets of each character in `text`."""


class OwnNormalizer:
    """The normalization described in the module's docstring."""

    def __init__(self, lowercase: bool, strip_accents: bool) -> None:
        self.steps = steps(lowercase, strip_accents)
        # A tokenizer whose tokens are the characters: only an encoding has offsets.
        self._characters = tokenizers.Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
        self._characters.normalizer = self.steps
        self._characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")

    def normalize(self, text: str) -> str:
        return self.steps.normalize_str(text)

    def normalize_with_offsets(self, text: str) -> tuple[str, np.ndarray]:
        normalized = self.steps.normalize_str(text)
        offsets = np.array(self._characters.encode(text).offsets, np.int32).reshape(-1, 2)
        assert len(offsets) == len(normalized)
        return normalized, np.maximum.accumulate(offsets, axis=0)  # reordered combining marks


class ModelNormalizer:
    """The normalization that a model file of another source contains, such as SentencePiece's default `nmt_nfkc`."""

    def __init__(self, model: bytes) -> None:
        proto = model_proto.parse(model)
        proto.normalizer_spec.add_dummy_prefix = False
        proto.normalizer_spec.remove_extra_whitespaces = True
        self._processor = model_proto.open_processor(proto)

    def normalize(self, text: str) -> str:
        # SentencePiece drops white space at the beginning, which separates a text from a special token before it.
        leading = " " if text[:1].isspace() else ""
        result: str = leading + self._processor.normalize(text).replace("▁", " ")
        return result

    def normalize_with_offsets(self, text: str) -> tuple[str, np.ndarray]:
        normalized, starts = self._processor.normalize(text, with_offsets=True)
        bounds = np.array(starts, np.int32)
        begins, ends = bounds[:-1].copy(), bounds[1:]
        for place in range(1, len(begins)):  # Further characters of one that became several.
            if begins[place] == ends[place]:
                begins[place] = begins[place - 1]
        return normalized.replace("▁", " "), np.stack([begins, ends], axis=1)


def steps(lowercase: bool, strip_accents: bool) -> normalizers.Normalizer:
    """Returns the normalization of this package as a step of `tokenizers`."""
    chosen: list[normalizers.Normalizer] = [*_drop(_DROPPED), normalizers.NFKC()]
    if lowercase:
        chosen.append(normalizers.Lowercase())
    if strip_accents:
        chosen += [normalizers.NFD(), *_drop(_ACCENTS), normalizers.NFC()]
    chosen += [normalizers.Replace(Regex(_SPACES), " "), normalizers.Replace(Regex(" $"), "")]
    return normalizers.Sequence(chosen)


def _drop(characters: str) -> list[normalizers.Normalizer]:
    """Returns steps that drop characters; those at the beginning become a space.

    `tokenizers` puts the space mark before a text only if the text's first character is still there.
    """
    return [normalizers.Replace(Regex(f"^{characters}+"), " "), normalizers.Replace(Regex(characters), "")]
