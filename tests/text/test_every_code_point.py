"""Our tokenizer and the slow one of `reference_tokenizer` on every code point there is, and on text of all of them.

Python has the characters of its own Unicode version (3.11: 14.0; 3.12: 15.0; 3.13: 15.1), the Rust library those of
several others. So the differences are named, one by one, for the characters that this Python knows; those that it does
not know are nothing in particular to the reference, and where they may differ is bounded.
"""

import gzip
import json
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache

import pytest
from support.reference_tokenizer import is_chinese, tokenize, words
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models

from bert_jax.text.bert_rules import normalizer, pre_tokenizer
from bert_jax.text.conversion import convert_vocabulary
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.vocabulary_training import count_words

EVERYTHING = [*range(0xD800), *range(0xE000, 0x110000)]  # but surrogates, which are no characters
SCRIPTS = [p for p in EVERYTHING if p < 0x20000 or 0xE0000 <= p < 0xE1000]
"""Code points that may have case or be case-ignorable: no ideographs, empty planes or private-use planes."""

ALWAYS_PUNCTUATION = {0x166D}
"""CANADIAN SYLLABICS CHI SIGN: a symbol since Unicode 12; punctuation in the library."""
CASED_PUNCTUATION = {0x111C9}
"""SHARADA SANDHI MARK: an accent since Unicode 11; punctuation in the library, but stripped first if uncased."""
OLD_ACCENTS = {point for point in (0x1734, 0x1171E) if unicodedata.category(chr(point)) == "Mc"}
"""HANUNOO SIGN PAMUDPOD: an accent until Unicode 13, and AHOM CONSONANT SIGN MEDIAL RA: until Unicode 15."""
NOT_IGNORABLE = {0x1171E} - OLD_ACCENTS
"""The latter, if this Python treats it as an accent, ignored beside a sigma, and the library does not."""
NOT_DECOMPOSED = {0x11938}
"""DIVES AKURU VOWEL SIGN O: new in Unicode 13, with a decomposition."""
UNCASED = ALWAYS_PUNCTUATION | OLD_ACCENTS | NOT_DECOMPOSED

NAMED = UNCASED | CASED_PUNCTUATION | NOT_IGNORABLE


def is_plain(point: int) -> bool:
    """Returns True for one of many similar code points: caseless letter, symbol, private, unassigned; not composed."""
    character = chr(point)
    alike = unicodedata.category(character) in ("Lo", "So", "Co", "Cn") and character.lower() == character.upper()
    hangul = 0xAC00 <= point < 0xD7A4
    return alike and (hangul or unicodedata.normalize("NFD", character) == character)


@cache
def sample() -> set[int]:
    """Returns all code points that are not plain, and of the plain ones 1 in 97 and the ends of each range."""
    kinds = [(unicodedata.category(chr(point)), is_chinese(chr(point))) for point in range(0x110000)]
    edges = {p + side for p in range(0x10FFFF) if kinds[p] != kinds[p + 1] for side in (0, 1)}
    return {p for p in EVERYTHING if p % 97 == 0 or p in NAMED or p in edges or not is_plain(p)}


CONTEXTS = [  # lowercase, how a code point stands in a text, the code points, those of them that differ
    (False, "a{}b", EVERYTHING, ALWAYS_PUNCTUATION | CASED_PUNCTUATION),
    (True, "E{}b", EVERYTHING, UNCASED),
    (False, "{}", SCRIPTS, set()),
    (True, "{}", SCRIPTS, OLD_ACCENTS | NOT_DECOMPOSED),
    (True, "e{}", SCRIPTS, UNCASED),
    (True, "{}\u0301", SCRIPTS, OLD_ACCENTS | NOT_DECOMPOSED),
    (True, "{}Σ", SCRIPTS, UNCASED),
    (True, "Α{}Σ", SCRIPTS, UNCASED | NOT_IGNORABLE),
    (True, "ΑΣ{}", SCRIPTS, UNCASED),
    (True, "ΑΣ{}Α", SCRIPTS, UNCASED | NOT_IGNORABLE),
]
NEWER = [  # Characters that came with Unicode 15 to 17 and have case, an accent, a decomposition or punctuation.
    (0x0897, 0x0897), (0x0ECE, 0x0ECE), (0x1B4E, 0x1B4F), (0x1B7F, 0x1B7F), (0x1C89, 0x1C8A), (0xA7CB, 0xA7DC),
    (0x105C0, 0x105F3), (0x10D40, 0x10D8F), (0x10EFC, 0x10EFF), (0x11241, 0x11241), (0x11380, 0x113E2),
    (0x11B00, 0x11B09), (0x11BE1, 0x11BE1), (0x11F00, 0x11F5A), (0x13439, 0x13455), (0x16100, 0x16139),
    (0x16D40, 0x16D79), (0x16EA0, 0x16ED3), (0x1DF25, 0x1DF2A), (0x1E030, 0x1E08F), (0x1E4D0, 0x1E4F9),
    (0x1E5D0, 0x1E5FF),
]  # fmt: skip


def is_newer(point: int) -> bool:
    """Returns True for newer characters that only one of this Python and the library may support."""
    unknown = unicodedata.category(chr(point)) == "Cn" or sys.version_info >= (3, 14)
    return unknown and any(first <= point <= last for first, last in NEWER)


@cache
def library(lowercase: bool):
    return normalizer(lowercase), pre_tokenizer()


def library_words(text: str, lowercase: bool) -> list[str]:
    normalize, split = library(lowercase)
    return [word for word, _ in split.pre_tokenize_str(normalize.normalize_str(text))]


def differing(template: str, points: list[int], lowercase: bool, at_once: int = 512) -> Iterable[int]:
    """Returns the code points with which `template` gives different words; splits batches that differ."""
    for start in range(0, len(points), at_once):
        some = points[start : start + at_once]
        text = "\n".join(template.format(chr(point)) for point in some)
        if library_words(text, lowercase) != words(text, lowercase):
            yield from some if len(some) == 1 else differing(template, some, lowercase, at_once // 8)


SOME_OR_ALL = pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.long)], ids=["some", "all"])


@SOME_OR_ALL
@pytest.mark.parametrize(("lowercase", "template", "points", "expected"), CONTEXTS)
def test_every_code_point(lowercase, template, points, expected, some):
    if some:
        points = [point for point in points if point in sample()]
        assert expected <= set(points)
    found = {hex(point) for point in differing(template, points, lowercase) if not is_newer(point)}
    assert found == {hex(point) for point in expected}


GREEK = ["ΟΔΟΣ", "ΟΔΟΣ.", "ΟΔΌΣ;", "Ο.Σ.", "Ο.Σ.Ε.", "Σ", "ΣΣ", "ΣΣ.Σ", "ΑΣ'Α", "ΑΣ''Α", "ΑΣ’", "ΣΊΣΥΦΟΣ ΣΑΣ", "ΑΣ-Α"]
GREEK += [
    "ʰΣ",
    "ΑʰΣʰ",
    "ΑΣʰ.Α",
    "ΑΣ\u0301",
    "Α\u0301\u0302\u0303Σ",
    "ΑΣ\u00adΑ",
    "ΑΣ\tΑ",
    "ΑΣ\u2028Α",
    "ΑΣ中Α",
    "中Σ",
    "ΑΣ1",
    "1Σ",
]


def test_a_sigma_is_final_as_in_python():
    differ = {text for text in [*GREEK, "Α'.Σ", "Α''Σ"] if library_words(text, True) != words(text, True)}
    assert differ == {"Α'.Σ", "Α''Σ"}


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_vocabulary_is_learnt_from_the_same_words(lowercase):
    texts = [*GREEK, "ÉCOLE\ue000 a\tb\u2028c 中国\U0002b820x a\u0085b ⹕z, x\u200by", "a" * 200 + " " + "b" * 201]
    expected = Counter(word for text in texts for word in words(text, lowercase))
    splitting = FastTokenizer(models.WordPiece(unk_token="[UNK]"))
    splitting.normalizer, splitting.pre_tokenizer = normalizer(lowercase), pre_tokenizer()
    assert count_words(texts, splitting) == expected


RELEASED = [("uncased", True), ("cased", False), ("multilingual-cased", False)]


@pytest.fixture(scope="module", params=RELEASED, ids=[name for name, _ in RELEASED])
def released(request, data_dir) -> Tokenizer:
    name, _ = request.param
    return convert_vocabulary(str(data_dir / f"vocab/bert-base-{name}-vocab.txt"))


def expected_ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    vocabulary = {piece: index for index, piece in enumerate(tokenizer.vocab)}
    return [[vocabulary[piece] for piece in tokenize(text, vocabulary, tokenizer.lowercase)] for text in texts]


@SOME_OR_ALL
def test_ids_of_every_character(released, some):
    named = UNCASED | CASED_PUNCTUATION
    known = [p for p in EVERYTHING if unicodedata.category(chr(p)) != "Cn" and p not in named and not is_newer(p)]
    known = [p for p in known if p < 0xF1000 and (p in sample() or not some)]  # Private use is private use.
    texts = [f"{chr(p)} n{chr(p)} {chr(p)}n" for p in known]
    for start in range(0, len(texts), 4096):
        some = texts[start : start + 4096]
        for text, ids, expected in zip(some, released.encode_batch(some), expected_ids(released, some), strict=True):
            assert ids == expected, ascii(text)


@pytest.mark.parametrize("source", ["books", "enwiki", "kowiki"])
def test_ids_of_real_text(released, data_dir, source):
    lines = []
    paths = sorted((data_dir / "corpus" / source).glob("*.gz"))[:10]
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            text = "\n".join(file.readlines(100_000 // len(paths)))
        lines += [json.loads(line)["text"] for line in text.split("\n") if line] if ".jsonl" in path.name else [text]
    assert sum(map(len, lines)) > 50_000
    assert released.encode_batch(lines) == expected_ids(released, lines)
