import os
import random
import subprocess
import sys
from collections.abc import Iterable

from bert_jax.text import vocabulary_training
from bert_jax.text.tokenizer import SPECIAL_TOKENS
from bert_jax.text.vocabulary_options import VocabularyOptions
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


def test_vocabulary_size_is_reached_unless_the_text_is_too_small(caplog, monkeypatch):
    letters = random.Random(1)
    documents = [" ".join("".join(letters.choices("abcdé€§", k=6)) for _ in range(50)) for _ in range(100)]
    assert len(pieces(documents, 600, cased=True)) == 600
    documents += [f"q{chr(0x1200 + i)}" for i in range(300)]  # "q" is common, but no word with it is kept.
    monkeypatch.setattr(vocabulary_training, "COVERAGE", 0.985)
    vocabulary = pieces(documents, 600, cased=True)
    assert len(vocabulary) == 600
    assert "q" not in vocabulary
    assert not caplog.records
    assert len(pieces(TEXT, 5000)) < 100
    assert "5000" in caplog.text


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
        subprocess.run(
            [sys.executable, "-c", HASH_OF_A_VOCABULARY],
            env={**os.environ, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": parallel},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for threads, parallel in (("1", "true"), ("4", "true"), ("4", "false"))
    }
    assert len(hashes) == 1
