"""Training of SentencePiece models: deterministic, of any order, and on a sample of bounded size."""

import logging
import random
import resource
import subprocess
import sys

import pytest
from support import helpers

from bert_jax.errors import InputError
from bert_jax.text.sentencepiece.sentencepiece_training import train_sentencepiece
from bert_jax.text.vocabulary_options import VocabularyOptions
from bert_jax.text.vocabulary_training import train_vocabulary


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("sample_bytes", [1 << 20, 10_000], ids=["all", "sample"])
def test_the_model_does_not_depend_on_the_order_of_documents(kind, sample_bytes, caplog):
    caplog.set_level(logging.INFO)
    documents = helpers.make_corpus(60).split("\n\n")
    models = []
    for seed in (1, 2):
        random.Random(seed).shuffle(documents)
        models.append(
            train_sentencepiece(
                documents, 200, kind=kind, lowercase=True, strip_accents=True, sample_bytes=sample_bytes
            ).vocabulary_bytes()
        )
    assert models[0] == models[1]
    assert ("a sample of" in caplog.text) is (sample_bytes == 10_000)


def test_a_sample_is_of_the_whole_text():
    """The second half has other characters; both halves are in a sample of a tenth."""
    documents = [f"{a}{b}{a}" for a in "abcdefgh" for b in "ijklmnop"] + [
        f"{a}{b}" for a in "αβγδεζηθ" for b in "κλμνξοπρ"
    ]
    tokenizer = train_sentencepiece(
        documents * 3, 100, kind="bpe", lowercase=False, strip_accents=False, sample_bytes=120, character_coverage=1
    )
    letters = set("".join(tokenizer.vocab[5:]))
    assert letters & set("abcdefgh")
    assert letters & set("αβγδεζηθ")
    assert len(letters) < 20


def test_a_small_text_gives_fewer_pieces_and_says_so(caplog):
    tokenizer = train_sentencepiece(["a b c"] * 3, 500, kind="unigram", lowercase=True, strip_accents=True)
    assert tokenizer.vocab_size < 20
    assert "--size=500" in caplog.text


def test_a_size_below_the_number_of_characters_names_one_that_works():
    documents = ["abcdefghijklmnop"] * 5
    with pytest.raises(InputError, match=r"--size=10: .* 22\b") as error:
        train_sentencepiece(documents, 10, kind="bpe", lowercase=True, strip_accents=True, character_coverage=1)
    assert "--character_coverage" in str(error.value)
    assert (
        train_sentencepiece(
            documents, 22, kind="bpe", lowercase=True, strip_accents=True, character_coverage=1
        ).vocab_size
        == 22
    )


def test_no_words_is_an_error():
    with pytest.raises(InputError, match="--input"):
        train_sentencepiece(["", " \n\u200b"], 100, kind="unigram", lowercase=True, strip_accents=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "word"}, "--kind='word'"),
        ({"kind": "unigram", "pretokenized": True}, "--pretokenized"),
        ({"sample_bytes": 5}, "--sample_bytes=5"),
        ({"character_coverage": 1.5}, "--character_coverage=1.5"),
        ({"size": 0}, "--size=0"),
    ],
)
def test_options_that_contradict(options, message):
    with pytest.raises(InputError, match=message):
        VocabularyOptions(**options)


def test_long_lines_without_spaces_are_used_whole():
    rng = random.Random(0)
    line = "".join(rng.choice("กขคงจ") for _ in range(30_000)) + "ฮ" * 40
    tokenizer = train_vocabulary([line], VocabularyOptions(kind="unigram", size=60))
    assert any("ฮ" in piece for piece in tokenizer.vocab)


PROGRAM = """
import resource, sys
from bert_jax.text.sentencepiece.sentencepiece_training import train_sentencepiece
def documents():
    for number in range(int(sys.argv[1])):
        yield " ".join(f"w{(number * 31 + k) % 4001} x{number % 977}y{k}" for k in range(2000))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
train_sentencepiece(documents(), 300, kind="bpe", lowercase=True, strip_accents=True, sample_bytes=1 << 21)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.long
def test_memory_does_not_grow_with_the_text():
    """4 and 64 MB of text with a sample of 2 MB."""
    grown = [
        int(subprocess.run([sys.executable, "-c", PROGRAM, count], capture_output=True, check=True, text=True).stdout)
        for count in ("150", "2400")
    ]
    assert grown[1] < grown[0] + 20_000  # kB
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0
