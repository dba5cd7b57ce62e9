"""Character offsets of tokens, compared with the plain tokenizer that tracks every character's position."""

import random
import unicodedata

import pytest
from support import reference_tokenizer as reference
from support import squad_examples

from bert_jax.text.tokenizer import Tokenizer

ALPHABET = [
    *"abcXYZ 09.-($\t\n", " ", "é", "É", "e\u0301", "o\u0302\u0301", "ñ", "ﬁ", "İ", "ß", "Σ", "ς", "½", "Ǆ",
    "日", "本", "語", "한", "국", "ア", "が", "か\u3099", "ไ", "ก็", "\u0915\u093f", "😀", "👩\u200d🔬",
    "\u00a0", "\u202f", "\u2028", "\u200b", "\u200d", "\ufeff", "\x07", "\0", "\ufffd", "\u0301", "\ufe0f",
    "—", "…", "“",
]  # fmt: skip


def places(text: str, lowercase: bool) -> list[list[tuple[str, int]]]:
    """Returns the words to split into pieces, as characters with their positions in the text."""
    words: list[list[tuple[str, int]]] = [[]]
    for place, character in enumerate(text):
        for cleaned in reference.cleaned(character):
            if cleaned.isspace():
                words.append([])
            else:
                words[-1].append((cleaned, place))
        if character.isspace() or reference.is_chinese(character):
            words.append([])
    result: list[list[tuple[str, int]]] = []
    for word in words:
        if lowercase:
            lowered = iter("".join(character for character, _ in word).lower())  # A sigma is final in its word.
            word = [(next(lowered), place) for character, place in word for _ in character.lower()]
            word = [(part, place) for character, place in word for part in unicodedata.normalize("NFD", character)]
            word = [(character, place) for character, place in word if reference.without_accent(character)]
        result.append([])
        for character, place in word:
            if reference.is_punctuation(character):
                result += [[(character, place)], []]
            else:
                result[-1].append((character, place))
    return [word for word in result if word]


def slow_offsets(text: str, tokenizer: Tokenizer) -> list[tuple[int, int, int]]:
    """Returns id, begin and end of every token."""
    vocabulary = set(tokenizer.vocab)
    result = []
    for word in places(text, tokenizer.lowercase):
        pieces = reference.pieces("".join(character for character, _ in word), vocabulary)
        lengths = [len(word)] if pieces == ["[UNK]"] else [len(piece.removeprefix("##")) for piece in pieces]
        for piece, length in zip(pieces, lengths, strict=True):
            begin, end = word[0][1], word[length - 1][1] + 1
            word = word[length:]
            while tokenizer.lowercase and end < len(text) and unicodedata.category(text[end]) == "Mn":
                end += 1
            result.append((tokenizer.token_to_id(piece), begin, end))
    return result


def fast_offsets(text: str, tokenizer: Tokenizer) -> list[tuple[int, int, int]]:
    ((ids, offsets),) = tokenizer.encode_batch_with_offsets([text])
    return [(index, *pair) for index, pair in zip(ids, offsets.tolist(), strict=True)]


@pytest.fixture(scope="module", params=[True, False], ids=["uncased", "cased"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return squad_examples.tokenizer(request.param)


def test_random_texts(tokenizer: Tokenizer):
    rng = random.Random(1)
    texts = ["".join(rng.choices(ALPHABET, k=rng.randint(0, 30))) for _ in range(4_000)]
    encoded = tokenizer.encode_batch_with_offsets(texts)
    assert [ids for ids, _ in encoded] == tokenizer.encode_batch(texts)
    for text, (_, offsets) in zip(texts, encoded, strict=True):
        assert fast_offsets(text, tokenizer) == slow_offsets(text, tokenizer), repr(text)
        assert (offsets[1:] >= offsets[:-1]).all()
        assert (offsets[:, 0] < offsets[:, 1]).all()
