import json
import pickle

import pytest
from etils import epath

from bert_jax.errors import InputError
from bert_jax.text.conversion import convert_vocabulary, read_vocab_file
from bert_jax.text.tokenizer import SPECIAL_TOKENS, Tokenizer, read_tokenizer
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


@pytest.fixture
def tokenizer() -> Tokenizer:
    return wordpiece_tokenizer(PIECES, lowercase=True)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.id_to_token(index) for index in tokenizer.encode_batch([text])[0]]


def test_words_are_cut_as_bert_cuts_them(tokenizer):
    assert pieces(tokenizer, "UNaffable, running!") == ["un", "##aff", "##able", ",", "runn", "##ing", "!"]
    assert pieces(tokenizer, "Café\u0000 the\u00a0中国\ufffd\t") == ["cafe", "the", "中", "国"]
    assert pieces(tokenizer, "unaffablex the") == ["[UNK]", "the"]
    assert pieces(tokenizer, "") == []


def test_words_above_100_characters_are_unknown(tokenizer):
    assert pieces(tokenizer, "a" * 100) == ["a", *["##a"] * 99]
    assert pieces(tokenizer, "a" * 101) == ["[UNK]"]


def test_it_survives_pickle_json_and_files(tokenizer, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.file_bytes())
    copies = [
        pickle.loads(pickle.dumps(tokenizer)),
        Tokenizer.from_json(json.loads(json.dumps(tokenizer.to_json()))),
        read_tokenizer(tmp_path / "tokenizer.json"),
    ]
    for copy in copies:
        assert copy.sha256 == tokenizer.sha256
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
