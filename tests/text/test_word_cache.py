"""The word cache returns the ids of the tokenizer."""

import pickle
import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bert_jax.text import word_cache as module
from bert_jax.text.word_cache import WordCache, word_cache
from bert_jax.text.wordpiece import wordpiece_tokenizer


def assert_same(tokenizer, texts, cache=None):
    cache = cache or WordCache(tokenizer)
    for start in range(0, len(texts), 1000):
        some = texts[start : start + 1000]
        found = [np.frombuffer(ids, cache.dtype).tolist() for ids in cache.encode(some)]
        assert found == tokenizer.encode_batch(some)


@pytest.mark.parametrize("lowercase", [True, False])
def test_odd_texts(vocabulary, lowercase):
    """Samples of disputed white space, context-dependent characters and long words."""
    tokenizer = wordpiece_tokenizer([*dict.fromkeys([*vocabulary, *"σςabé.", "##σ", "##ς", "##a", "##b"])], lowercase)
    odd = [
        *" \t\r\x0b\x0c\x1c\x1f\x85\xa0\u2028\u2029\u3000\u200b\ufeff\x00'.,-<=[#~\u0338\u0345·’",
        "Σ",
        "σ",
        "á",
        "\u0301",
        "a",
        "ab",
        "中",
    ]
    rng = random.Random(0)
    texts = ["".join(rng.choices(odd, k=rng.randint(0, 20))) for _ in range(5000)]
    texts += ["", " ", "  ", "a" * 200, "a" * 201, f"{'a' * 201} a", "the [MASK] [SEP]", "ΑΣ Σ ΑΣ' ΑΣ. ΑΣ"]
    assert_same(tokenizer, texts)


def test_cache_evicts_words_and_skips_long_ones(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "CAPACITY", 50)
    cache = WordCache(tokenizer)
    words = [f"the{number}" for number in range(300)]
    for start in range(0, 300, 30):
        assert_same(tokenizer, [" ".join(words[start : start + 30]), "x" * 100], cache)
        assert len(cache._ids) <= 50 + 31
        assert "x" * 100 not in cache._ids


def test_one_for_a_process(tokenizer):
    """Tasks unpickle a tokenizer each, but share one cache."""
    assert pickle.loads(pickle.dumps(tokenizer)) is pickle.loads(pickle.dumps(tokenizer))
    assert word_cache(tokenizer) is word_cache(tokenizer)
    other = wordpiece_tokenizer(tokenizer.vocab, not tokenizer.lowercase)
    assert pickle.loads(pickle.dumps(other)).lowercase is other.lowercase


def test_threads(tokenizer, monkeypatch):
    """Threads of a Beam worker: one clears the cache while another reads it."""
    monkeypatch.setattr(module, "CAPACITY", 6)
    texts = [f"the old ship {'x' * number}" for number in range(1, 41)]
    expected = [WordCache(tokenizer).encode([text]) for text in texts]
    cache = WordCache(tokenizer)

    class Slow:
        follows_bert = True

        def encode_batch(self, words):
            time.sleep(0.002)
            return tokenizer.encode_batch(words)

    monkeypatch.setattr(cache, "tokenizer", Slow())
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: cache.encode([text]), texts)) == expected
