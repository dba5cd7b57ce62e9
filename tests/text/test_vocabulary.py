import logging
import random
from collections.abc import Iterable

import pytest
from support import helpers

from bert_jax.errors import InputError
from bert_jax.text import vocabulary_training
from bert_jax.text.tokenizer import SPECIAL_TOKENS
from bert_jax.text.vocabulary_options import KINDS, VocabularyOptions
from bert_jax.text.vocabulary_training import train_vocabulary

TEXT = ["low lower lowest, newer newest wider widest", "Low slow SLOW slowly", "the the the a a an", "ééé Été"] * 3

HASH_OF_A_VOCABULARY = """
import hashlib, random
from bert_jax.text.vocabulary_options import VocabularyOptions
from bert_jax.text.vocabulary_training import train_vocabulary
letters = random.Random(0)
documents = [" ".join("".join(letters.choices("abcdefgh", k=5)) for _ in range(20)) for _ in range(200)]
for kind in ("wordpiece", "bpe", "byte_bpe"):
    content = train_vocabulary(documents, VocabularyOptions(kind=kind, size=400)).file_bytes()
    print(hashlib.sha256(content).hexdigest())
"""


def pieces(documents: Iterable[str], size: int, **options: object) -> list[str]:
    return list(train_vocabulary(documents, VocabularyOptions(size=size, **options)).vocab)


def test_special_tokens_come_first_then_the_alphabet_then_merges():
    vocabulary = pieces(TEXT, 60)
    assert tuple(vocabulary[:5]) == SPECIAL_TOKENS
    words = " ".join(TEXT).lower().replace("é", "e").replace(",", " ").split()
    alphabet = sorted({",", *"".join(words)})
    continuations = sorted({f"##{character}" for word in words for character in word[1:]})
    assert vocabulary[5 : 5 + len(alphabet) + len(continuations)] == alphabet + continuations
    merges = vocabulary[5 + len(alphabet) + len(continuations) :]
    assert merges
    assert all(len(piece.removeprefix("##")) > 1 for piece in merges)
    assert len(set(vocabulary)) == len(vocabulary)
    assert {"low", "the"} <= set(vocabulary)


def test_words_too_long_for_the_tokenizer_are_dropped():
    vocabulary = pieces(["ab", "x" * 101, "y" * 100], 100)
    assert {"a", "y", "##y"} <= set(vocabulary)
    assert not any("x" in piece for piece in vocabulary)


def test_vocabulary_size_is_reached(caplog, monkeypatch):
    letters = random.Random(1)
    documents = [" ".join("".join(letters.choices("abcdé€§", k=6)) for _ in range(50)) for _ in range(100)]
    assert len(pieces(documents, 600, cased=True)) == 600
    documents += [f"q{chr(0x1200 + i)}" for i in range(300)]  # "q" is common, but no word with it is kept.
    monkeypatch.setattr(vocabulary_training, "COVERAGE", 0.985)
    vocabulary = pieces(documents, 600, cased=True)
    assert len(vocabulary) == 600
    assert "q" not in vocabulary
    assert not caplog.records


def test_rare_characters_stay_out_of_the_alphabet():
    documents = ["plain words of plain text"] * 10_000 + ["a \U00010cc0b c\U00010cc0"]
    assert not any("\U00010cc0" in piece for piece in pieces(documents, 100))
    assert any("\U00010cc0" in piece for piece in pieces(documents[-100:], 100))


def test_uncased_korean_keeps_its_syllables():
    korean = ["우산을 쓰고 걷는다.", "아이들이 운동장에서 공을 찬다.", "BOOK 나는 학교에 간다."] * 4
    tokenizer = train_vocabulary(korean, VocabularyOptions(size=400, keep_accents=True))
    assert tokenizer.decode(tokenizer.encode_batch(["우산을 BOOK"])[0]) == "우산을 book"
    assert not any("\u1100" <= character <= "\u11ff" for piece in tokenizer.vocab for character in piece)


def test_rare_pairs_are_not_merged():
    assert pieces(["aa aa aa", "bb"], 50)[-1] == "aa"
    assert "bb" in pieces(["aa aa aa", "bb bb"], 50)


def test_vocabulary_is_deterministic_across_processes_and_threads():
    hashes = {
        helpers.run_python(HASH_OF_A_VOCABULARY, RAYON_NUM_THREADS=threads, TOKENIZERS_PARALLELISM=parallel)
        for threads, parallel in (("1", "true"), ("4", "true"), ("4", "false"))
    }
    assert len(hashes) == 1


# --- Every kind: deterministic, of any order of documents, of the size that is asked for -------------------------


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
    kilobytes, seconds = helpers.run_python(PROGRAM, kind, count, separator).split()
    return float(kilobytes), float(seconds)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["unigram", "wordpiece"])
def test_a_long_line_takes_neither_more_memory_nor_more_than_linear_time(kind):
    """16 MB as documents, and with white space that is no line end in one document."""
    (kilobytes, seconds), (line_kilobytes, line_seconds) = (grown(kind, 600, separator) for separator in (" ", "\t"))
    assert line_kilobytes < kilobytes + 150_000
    assert line_seconds < 2 * seconds + 2
