import os
import random
import subprocess
import sys

import pytest

from bert_jax.errors import InputError
from bert_jax.text.tokenizer import SPECIAL_TOKENS
from bert_jax.text.vocabulary import count_words, train_wordpiece
from bert_jax.text.wordpiece import WordPieceTokenizer

TEXT = ["low lower lowest, newer newest wider widest", "Low slow SLOW slowly", "the the the a a an", "ééé Été"] * 3

HASH_OF_A_VOCABULARY = """
import hashlib, random
from bert_jax.text.vocabulary import train_wordpiece
letters = random.Random(0)
documents = [" ".join("".join(letters.choices("abcdefgh", k=5)) for _ in range(20)) for _ in range(200)]
print(hashlib.sha256("\\n".join(train_wordpiece(documents, 400, True)).encode()).hexdigest())
"""


def test_special_tokens_come_first_then_the_alphabet_then_merges():
    vocabulary = train_wordpiece(TEXT, 60, lowercase=True)
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


def test_words_are_counted_as_the_tokenizer_splits_them():
    counts = count_words(["Été, ÉTÉ! 中国", "x" * 201, "été\u2028\n" * 30_000], lowercase=True)
    assert counts == {"!": 1, ",": 1, "ete": 30_002, "x" * 201: 1, "中": 1, "国": 1}
    assert count_words(["Été ÉTÉ"], lowercase=False) == {"Été": 1, "ÉTÉ": 1}


def test_every_word_of_the_text_can_be_written():
    vocabulary = train_wordpiece(TEXT, 80, lowercase=True)
    tokenizer = WordPieceTokenizer(vocabulary, lowercase=True)
    assert tokenizer.unk_id not in [index for ids in tokenizer.encode_batch(TEXT) for index in ids]


def test_words_too_long_for_the_tokenizer_are_dropped():
    vocabulary = train_wordpiece(["ab", "x" * 201, "y" * 200], 100, lowercase=True)
    assert {"a", "y", "##y"} <= set(vocabulary)
    assert not any("x" in piece for piece in vocabulary)


def test_vocabulary_size_is_reached_unless_the_text_is_too_small(caplog):
    letters = random.Random(1)
    documents = [" ".join("".join(letters.choices("abcdé€§", k=6)) for _ in range(50)) for _ in range(100)]
    assert len(train_wordpiece(documents, 600, lowercase=False)) == 600
    documents += [f"q{chr(0x1200 + i)}" for i in range(300)]  # "q" is common, but no word with it is kept.
    vocabulary = train_wordpiece(documents, 600, lowercase=False, character_coverage=0.985)
    assert len(vocabulary) == 600
    assert "q" not in vocabulary
    assert not caplog.records
    assert len(train_wordpiece(TEXT, 5000, lowercase=True)) < 100
    assert "5000" in caplog.text


def test_rare_characters_stay_out_of_the_alphabet():
    documents = ["plain words of plain text"] * 10_000 + ["a \U00010cc0b c\U00010cc0"]
    assert not any("\U00010cc0" in piece for piece in train_wordpiece(documents, 100, True))
    assert any("\U00010cc0" in piece for piece in train_wordpiece(documents[-100:], 100, True))


def test_rare_pairs_are_not_merged():
    assert train_wordpiece(["aa aa aa", "bb"], 50, True)[-1] == "aa"
    assert "bb" in train_wordpiece(["aa aa aa", "bb bb"], 50, True)


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


def test_the_order_of_the_documents_does_not_matter():
    shuffled = random.Random(0).sample(TEXT, len(TEXT))
    assert train_wordpiece(shuffled, 60, True) == train_wordpiece(iter(TEXT), 60, True)


def test_an_empty_corpus_and_a_size_too_small_are_refused():
    with pytest.raises(InputError, match="--input: "):
        train_wordpiece(["", " \n "], 100, True)
    with pytest.raises(InputError, match=r"--size=9: .*\b10 \(5\b"):
        train_wordpiece(["abc"], 9, True)
    assert train_wordpiece(["abc"], 10, True) == [*SPECIAL_TOKENS, "a", "b", "c", "##b", "##c"]
