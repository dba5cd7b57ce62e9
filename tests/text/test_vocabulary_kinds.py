"""Vocabularies of every kind: deterministic, of any order of documents, of the size that is asked for."""

import logging
import random
import subprocess
import sys

import pytest
from support import helpers

from bert_jax.errors import InputError
from bert_jax.text import vocabulary_training
from bert_jax.text.vocabulary_options import KINDS, VocabularyOptions
from bert_jax.text.vocabulary_training import train_vocabulary


@pytest.mark.parametrize(("kind", "limit"), [*((kind, 1 << 20) for kind in KINDS), ("unigram", 200)])
def test_the_vocabulary_does_not_depend_on_the_order_of_documents(kind, limit, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(vocabulary_training, "_SAMPLE_BYTES", limit)
    documents = helpers.make_corpus(60).split("\n\n")
    found = []
    for seed in (1, 2):
        random.Random(seed).shuffle(documents)
        options = VocabularyOptions(kind=kind, size=300)
        found.append(train_vocabulary(documents, options).file_bytes())
    assert found[0] == found[1]
    assert ("a sample of" in caplog.text) is (limit == 200)


def test_a_sample_for_unigram_has_the_most_frequent_words(monkeypatch):
    monkeypatch.setattr(vocabulary_training, "_SAMPLE_BYTES", 100)
    rare = [" ".join(f"{letter}{other}" for other in "abcdefghij") for letter in "abcdefghij"]
    pieces = train_vocabulary([*rare, *["zebra zebras"] * 50], VocabularyOptions(kind="unigram", size=60)).vocab
    assert "▁zebra" in pieces


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_text_gives_fewer_pieces_and_says_so(kind, caplog):
    tokenizer = train_vocabulary(["a b c"] * 3, VocabularyOptions(kind=kind, size=500))
    assert tokenizer.vocab_size < (270 if kind == "byte_bpe" else 20)
    assert "--size=500" in caplog.text


@pytest.mark.parametrize(("kind", "needed"), [("unigram", 22), ("bpe", 22), ("wordpiece", 36), ("byte_bpe", 261)])
def test_a_size_below_the_number_of_characters_names_one_that_works(kind, needed):
    documents = ["abcdefghijklmnop"] * 5
    for size in (10, needed - 1):
        with pytest.raises(InputError, match=rf"size={size}: .*\b{needed}$"):
            train_vocabulary(documents, VocabularyOptions(kind=kind, size=size))
    assert train_vocabulary(documents, VocabularyOptions(kind=kind, size=needed)).vocab_size == needed


@pytest.mark.parametrize("kind", KINDS)
def test_no_words_is_an_error(kind):
    with pytest.raises(InputError, match="input"):
        train_vocabulary(["", " \n" if kind == "byte_bpe" else " \n\u200b"], VocabularyOptions(kind=kind))


def test_byte_level_bpe_has_a_piece_for_every_byte():
    tokenizer = train_vocabulary(["the ship"] * 3, VocabularyOptions(kind="byte_bpe", size=300))
    text = "ЖΩ中\U0001f600 \x00\x7f\u2028"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.unk_id not in ids
    assert tokenizer.decode(ids) == text.lower()


@pytest.mark.parametrize(("options", "message"), [({"kind": "word"}, "kind=word"), ({"size": 0}, "^size=0")])
def test_options_out_of_range(options, message):
    with pytest.raises(InputError, match=message):
        VocabularyOptions(**options)


def test_words_are_split_at_the_mark_of_the_unigram_trainer():
    tokenizer = train_vocabulary(["a▅b the ship"] * 20, VocabularyOptions(kind="unigram", size=30))
    assert {"a", "b"} < {*tokenizer.vocab}
    assert "▅" not in tokenizer.vocab
    with pytest.raises(InputError, match="input: the corpus has no words"):
        train_vocabulary(["▅ ▅"] * 3, VocabularyOptions(kind="unigram", size=30))


def test_long_lines_without_spaces_are_used_whole():
    rng = random.Random(0)
    line = "".join(rng.choice("กขคงจ") for _ in range(30_000)) + "ฮ" * 40
    tokenizer = train_vocabulary([line], VocabularyOptions(kind="unigram", size=60))
    assert any("ฮ" in piece for piece in tokenizer.vocab)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_rare_character_leaves_the_rest_of_a_line_without_spaces(kind):
    line = "กขคง" * 10_000 + "ฮ" + "งคขก" * 10_000
    tokenizer = train_vocabulary([line], VocabularyOptions(kind=kind, size=40))
    assert {*"กขคง"} < {*tokenizer.vocab}
    assert "ฮ" not in tokenizer.vocab


PROGRAM = """
import resource, sys, time
from bert_jax.text import vocabulary_training
from bert_jax.text.vocabulary_options import VocabularyOptions
from bert_jax.text.vocabulary_training import train_vocabulary
kind, count, separator = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def documents():
    for number in range(count):
        words = (f"w{(number * 31 + k) % 4001} x{number % 977}y{k}" for k in range(2000))
        yield separator.join(words)
texts = documents() if separator == " " else [separator.join(documents())]
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
train_vocabulary(texts, VocabularyOptions(kind=kind, size=500))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, time.perf_counter() - start)
"""


def grown(kind: str, count: int, separator: str = " ") -> tuple[float, float]:
    """Returns the kB that training took, and its seconds."""
    words = [sys.executable, "-c", PROGRAM, kind, str(count), separator]
    kilobytes, seconds = subprocess.run(words, capture_output=True, check=True, text=True).stdout.split()
    return float(kilobytes), float(seconds)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["unigram", "wordpiece"])
def test_a_long_line_takes_neither_more_memory_nor_more_than_linear_time(kind):
    """16 MB as documents, and with white space that is no line end in one document."""
    (kilobytes, seconds), (line_kilobytes, line_seconds) = (grown(kind, 600, separator) for separator in (" ", "\t"))
    assert line_kilobytes < kilobytes + 150_000
    assert line_seconds < 2 * seconds + 2
