import json
import pickle

import pytest
from etils import epath
from tokenizers import Tokenizer as FastTokenizer

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


def test_words_above_200_characters_are_unknown(tokenizer):
    assert pieces(tokenizer, "a" * 200) == ["a", *["##a"] * 199]
    assert pieces(tokenizer, "a" * 201) == ["[UNK]"]


def test_a_cased_vocabulary_keeps_case_and_accents():
    tokenizer = wordpiece_tokenizer(PIECES, lowercase=False)
    assert pieces(tokenizer, "Unaffable café UN") == ["Un", "##aff", "##able", "café", "[UNK]"]


def test_attributes(tokenizer):
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id) == (
        0,
        1,
        2,
        3,
        4,
    )
    assert tokenizer.vocab == tuple(PIECES)
    assert tokenizer.vocab_size == len(PIECES)
    assert tokenizer.token_to_id("runn") == PIECES.index("runn")
    assert tokenizer.token_to_id("nothing") == tokenizer.unk_id
    with pytest.raises(IndexError):
        tokenizer.id_to_token(-1)
    with pytest.raises(IndexError):
        tokenizer.decode([len(PIECES)])


def test_the_hash_is_of_all_that_decides_the_ids(tokenizer):
    assert tokenizer.sha256 == wordpiece_tokenizer(list(PIECES), lowercase=True).sha256
    others = [wordpiece_tokenizer(PIECES, lowercase=False), wordpiece_tokenizer([*PIECES[:-2], "the", "##a"], True)]
    assert len({tokenizer.sha256, *(other.sha256 for other in others)}) == 3


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
    assert tuple(read_vocab_file(epath.Path(path))) == (*SPECIAL_TOKENS, "a\u2028b", "\x85", "c")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n[UNK]\n", r"vocab\.txt:7: .*'\[UNK\]'.*\b2\b"),
        ("[PAD]\n[UNK]\n\n[CLS]\n[SEP]\n[MASK]\n", r"vocab\.txt:3: "),
        ("[PAD]\n[UNK]\n[CLS]\na\n", r"vocab\.txt: .*\[SEP\].*\[MASK\]"),
        ("", r"vocab\.txt: .*bert-jax vocab"),
        (b"[PAD]\n[UNK]\n\xe9\n", r"vocab\.txt:3: .*UTF-8"),
    ],
)
def test_a_faulty_vocabulary_is_refused(tmp_path, content, message):
    path = tmp_path / "vocab.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message):
        convert_vocabulary(str(path))


def test_a_vocabulary_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nothing\.txt: "):
        convert_vocabulary(str(tmp_path / "nothing.txt"))


@pytest.mark.parametrize("lowercase", [True, False])
def test_the_exported_files_are_the_tokenizer(tmp_path, lowercase):
    tokenizer = wordpiece_tokenizer(PIECES, lowercase)
    (tmp_path / "new").mkdir()
    tokenizer.save(tmp_path / "new", model_max_length=128)
    config = json.loads((tmp_path / "new/tokenizer_config.json").read_text())
    assert config["do_lower_case"] is lowercase
    assert config["model_max_length"] == 128
    assert config["mask_token"] == "[MASK]"
    loaded = FastTokenizer.from_file(str(tmp_path / "new/tokenizer.json"))
    text = "Unaffable [MASK] " + "a" * 150
    assert loaded.encode(text).ids == tokenizer.encode_with_special_tokens(text)[0]
