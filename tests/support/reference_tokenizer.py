"""Plain, slow port of BERT's tokenizer (`tokenization.py` of google-research/bert).

What a character is comes from `unicodedata`, as in the original: a newer Python knows more characters.
"""

import unicodedata
from collections.abc import Container
from functools import lru_cache

MAX_WORD_CHARACTERS = 200


def is_space(character: str) -> bool:
    return character in "\t\n\r" or unicodedata.category(character) == "Zs"


def is_dropped(character: str) -> bool:
    """Returns True for control and format characters, not for unassigned and private ones."""
    return character in "\0\ufffd" or (character not in "\t\n\r" and unicodedata.category(character) in ("Cc", "Cf"))


def is_chinese(character: str) -> bool:
    """Returns True in CJK blocks, whose characters are words: not Kana, Hangul or the extensions after E."""
    point = ord(character)
    return (
        0x3400 <= point <= 0x4DBF
        or 0x4E00 <= point <= 0x9FFF
        or 0xF900 <= point <= 0xFAFF
        or 0x20000 <= point <= 0x2A6DF
        or 0x2A700 <= point <= 0x2B73F
        or 0x2B740 <= point <= 0x2B81F
        or 0x2B820 <= point <= 0x2CEAF
        or 0x2F800 <= point <= 0x2FA1F
    )


def is_punctuation(character: str) -> bool:
    """Returns True for punctuation: in ASCII all symbols, also `$`, `+`, `^`, `~`, unlike Unicode."""
    if "!" <= character <= "~":
        return not character.isalnum()
    return unicodedata.category(character).startswith("P")


@lru_cache(1 << 16)
def cleaned(character: str) -> str:
    if is_dropped(character):
        return ""
    if is_space(character):
        return " "
    return f" {character} " if is_chinese(character) else character


@lru_cache(1 << 16)
def without_accent(character: str) -> str:
    return "" if unicodedata.category(character) == "Mn" else character


@lru_cache(1 << 16)
def parted(character: str) -> str:
    return f" {character} " if is_punctuation(character) else character


def words(text: str, lowercase: bool) -> list[str]:
    """Returns the words that are split into pieces.

    Python's own `split` and `lower` are meant: U+2028 and U+2029 part words too, and a sigma is final in its word.
    """
    result = []
    for word in "".join(map(cleaned, text)).split():
        if lowercase:
            word = "".join(map(without_accent, unicodedata.normalize("NFD", word.lower())))
        result += "".join(map(parted, word)).split()
    return result


def pieces(word: str, vocabulary: Container[str]) -> list[str]:
    """Splits a word greedily into the longest matching pieces, `##` pieces after the first, or returns [UNK]."""
    if len(word) > MAX_WORD_CHARACTERS:
        return ["[UNK]"]
    result: list[str] = []
    start = 0
    while start < len(word):
        prefix = "##" if start else ""
        for end in range(len(word), start, -1):
            if prefix + word[start:end] in vocabulary:
                result.append(prefix + word[start:end])
                start = end
                break
        else:
            return ["[UNK]"]
    return result


def tokenize(text: str, vocabulary: Container[str], lowercase: bool) -> list[str]:
    return [piece for word in words(text, lowercase) for piece in pieces(word, vocabulary)]
