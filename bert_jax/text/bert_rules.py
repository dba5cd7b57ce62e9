"""BERT's rules for text, as steps of a `tokenizer.json`: how it is cleaned, lower-cased and split into words.

Text is cleaned (control characters dropped) and CJK characters are separated. For an uncased vocabulary, text is
lower-cased, and its accents are stripped unless `strip_accents` is False. Words are split at white space
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
import itertools
import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

REFERENCE, LIBRARY = "reference", "library"
"""Rules for cleaning and splitting text: as `tokenization.py` of google-research/bert; or as BertNormalizer and
BertPreTokenizer of `tokenizers` (the module's docstring lists the differences)."""

# Portable syntax only: readers of a tokenizer.json may use another regular expression engine.
_DROPPED = r"\u0000-\u0008\u000B\u000C\u000E-\u001F\u007F-\u009F\uFFFD\p{Cf}"
_IGNORED = r"\p{Case_Ignorable}"
_FINAL_SIGMA = (  # As in Unicode's SpecialCasing: after a cased letter, not before one; ignorables are skipped.
    rf"(?:(?<=\p{{Cased}})(?<!{_IGNORED})|(?<=\p{{Cased}}{_IGNORED})(?<!{_IGNORED}{_IGNORED}))"
    rf"Σ(?!{_IGNORED}*(?!{_IGNORED})\p{{Cased}})"
)
# BertPreTokenizer, which is faster, splits at punctuation below U+061D and in U+2010 to U+2E42.
_SPLIT = r"[^\P{P}\u0000-\u061C\u2010-\u2E42]" + "|[\U0002b820-\U0002b91f]"


def normalizer(lowercase: bool, strip_accents: bool | None = None, text: str = REFERENCE) -> normalizers.Normalizer:
    """Returns the step that cleans text, lower-cases it and strips its accents.

    With the reference's rules it keeps white space: `pre_tokenizer` splits at any of it. `strip_accents` None follows
    `lowercase`.
    """
    bert = normalizers.BertNormalizer(
        clean_text=text == LIBRARY,
        strip_accents=strip_accents,  # None, the default, follows `lowercase`: tokenizer.json of a BERT has null.
        lowercase=lowercase,
    )
    if text == LIBRARY:
        return bert
    dropped = _DROPPED
    if lowercase if strip_accents is None else strip_accents:
        dropped += r"\p{Mn}"  # For those unknown to the library; it strips the others itself, after NFD.
    steps: list[normalizers.Normalizer] = [normalizers.Replace(Regex(f"[{dropped}]"), "")]
    if lowercase:
        steps.append(normalizers.Replace(Regex(_FINAL_SIGMA), "ς"))
    return normalizers.Sequence([*steps, bert])


def pre_tokenizer(text: str = REFERENCE) -> pre_tokenizers.PreTokenizer:
    """Returns the step that splits normalized text into words."""
    if text == LIBRARY:
        return pre_tokenizers.BertPreTokenizer()
    late = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    return pre_tokenizers.Sequence([late, pre_tokenizers.BertPreTokenizer()])


def follows_bert(content: Mapping[str, Any]) -> bool:
    """Returns True if a `tokenizer.json` is WordPiece with `##` and one of these sets of rules."""
    model, steps = content["model"], {part: content[part] for part in ("normalizer", "pre_tokenizer")}
    is_wordpiece = model.get("type") == "WordPiece" and model.get("continuing_subword_prefix") == "##"
    return is_wordpiece and json.dumps(steps, sort_keys=True) in _all_steps()


@functools.cache
def _all_steps() -> set[str]:
    found = set()
    for lowercase, strip_accents, text in itertools.product((True, False), (None, True, False), (REFERENCE, LIBRARY)):
        fast = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
        fast.normalizer, fast.pre_tokenizer = normalizer(lowercase, strip_accents, text), pre_tokenizer(text)
        content = json.loads(fast.to_str())
        steps = {part: content[part] for part in ("normalizer", "pre_tokenizer")}
        found.add(json.dumps(steps, sort_keys=True))
    return found
