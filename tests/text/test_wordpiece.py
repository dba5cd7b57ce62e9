import json
import pickle
import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from etils import epath

from bert_jax.errors import InputError
from bert_jax.text import word_cache as module
from bert_jax.text.conversion import convert_vocabulary, read_vocab_file
from bert_jax.text.tokenizer import SPECIAL_TOKENS, Tokenizer, read_tokenizer
from bert_jax.text.word_cache import WordCache, word_cache
from bert_jax.text.wordpiece import wordpiece_tokenizer

PIECES = [
    *SPECIAL_TOKENS,
    *"[]!,.",
    "un",
    "##aff",
    "##able",
    "runn",
    "##ing",
    "cafe",
    "café",
    "Un",
    "mask",
    "sep",
    "cls",
]
PIECES += ["中", "国", "a", "##a", "the"]
TOKENIZER = wordpiece_tokenizer(PIECES, lowercase=True)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.id_to_token(index) for index in tokenizer.encode_batch([text])[0]]


def test_words_are_cut_as_bert_cuts_them():
    assert pieces(TOKENIZER, "UNaffable, running!") == ["un", "##aff", "##able", ",", "runn", "##ing", "!"]
    assert pieces(TOKENIZER, "Café\u0000 the\u00a0中国\ufffd\t") == ["cafe", "the", "中", "国"]
    assert pieces(TOKENIZER, "unaffablex the") == ["[UNK]", "the"]
    assert pieces(TOKENIZER, "") == []


def test_words_above_100_characters_are_unknown():
    assert pieces(TOKENIZER, "a" * 100) == ["a", *["##a"] * 99]
    assert pieces(TOKENIZER, "a" * 101) == ["[UNK]"]


def test_it_survives_pickle_json_and_files(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER.file_bytes())
    copies = [
        pickle.loads(pickle.dumps(TOKENIZER)),
        Tokenizer.from_json(json.loads(json.dumps(TOKENIZER.to_json()))),
        read_tokenizer(tmp_path / "tokenizer.json"),
    ]
    for copy in copies:
        assert copy.sha256 == TOKENIZER.sha256
        assert pieces(copy, "Unaffable 中") == ["un", "##aff", "##able", "中"]
    for value in ({"kind": "sentencepiece"}, [], {"special_tokens": [], "tokenizer": {}}):
        with pytest.raises(InputError):
            Tokenizer.from_json(value)


def test_only_a_newline_ends_a_line_of_a_vocabulary(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_bytes(("\ufeff" + "\r\n".join([*SPECIAL_TOKENS, "a\u2028b", "\x85", "c"]) + "\r\n").encode())
    assert read_vocab_file(epath.Path(path), True).vocab == (*SPECIAL_TOKENS, "a\u2028b", "\x85", "c")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n[UNK]\n", r"vocab\.txt: .*'\[UNK\]'; rename one"),
        ("[PAD]\n[UNK]\n\n[CLS]\n[SEP]\n[MASK]\n", r"vocab\.txt: .*''"),
        ("[PAD]\n[UNK]\n[CLS]\na\n", r"vocab\.txt: .*\[SEP\].*\[MASK\]"),
        ("", r"vocab\.txt: .*''"),
        (b"[PAD]\n[UNK]\n\xe9\n", r"vocab\.txt: .*UTF-8"),
    ],
)
def test_a_faulty_vocabulary_is_refused(tmp_path, content, message):
    path = tmp_path / "vocab.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message):
        convert_vocabulary(str(path))


# --- The word cache ----------------------------------------------------------------------------------------------


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
