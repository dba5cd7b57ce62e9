"""SentencePiece tokenizers: ids of the `sentencepiece` library and of `transformers`, offsets, words, files."""

import functools
import io
import json
import pickle
import random
import unicodedata

import numpy as np
import pytest
import sentencepiece
from support import helpers

from bert_jax.errors import InputError
from bert_jax.text import tokenizer_files
from bert_jax.text.sentencepiece import model_proto
from bert_jax.text.sentencepiece.sentencepiece_tokenizer import SPACE, SentencePieceTokenizer
from bert_jax.text.sentencepiece.sentencepiece_training import train_sentencepiece
from bert_jax.text.tokenizer import SPECIAL_TOKENS
from bert_jax.text.word_cache import WordCache
from bert_jax.text.wordpiece import WordPieceTokenizer

OWN_TEXT = [
    "The old ship sees a wave near the harbour, and the little gull fears it.",
    "Die Königin läuft über die Brücke; l'été dernier, naïve façade — ÉCOLE!",
    "서울의 봄은 짧고 겨울은 길다. 학교에 가는 아이들이 노래를 부른다.",
    "今日は天気がいいから、散歩しましょう。 北京的秋天很美丽。",
    "วันนี้อากาศดีมาก เราไปเดินเล่นกันเถอะ",
    "Привет, мир! Ёжик идёт домой. Ёлка и ещё 42 шишки (№ 7).",
    "नमस्ते दुनिया। यह एक छोटा वाक्य है।",
]
ODD_TEXT = [
    "", " ", "\t\r\n", "İ ß ẞ Σ ΟΔΌΣ", "a  b\u00a0c\u3000d\u200be", "\ufeffx \u0301y", "e\u0301 \u1112\u1161\u11ab 각",
    "㍿ ﬁ Ⅷ ⓐ ﷺ",
    "☃☃☃ \U0001f469\u200d\U0001f469 \u0000\u0007x", "▁a ▁ b▁c", "[SEP] un[MASK]able", "x" * 3000, "中" * 3000,
    "\ue000 \ufdd0 \U0010fffd", "a\u0327\u0301b क्\u200dष",
]  # fmt: skip


@functools.cache
def assigned() -> list[int]:
    return [c for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cs", "Cn", "Co")]


@functools.cache
def noise(count: int, seed: int = 0) -> tuple[str, ...]:
    """Words of random characters of all of Unicode."""
    rng, codes = random.Random(seed), assigned()

    def word() -> str:
        near = rng.random() < 0.7
        return "".join(chr(rng.choice(codes[:3000] if near else codes)) for _ in range(rng.randint(1, 8)))

    return tuple(" ".join(word() for _ in range(6)) for _ in range(count))


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=[(True, True), (True, False), (False, False)], ids=["strip", "keep", "cased"])
def tokenizer(request, kind: str) -> SentencePieceTokenizer:
    lowercase, strip_accents = request.param
    texts = [*OWN_TEXT * 3, *helpers.make_corpus(40).split("\n")]
    return train_sentencepiece(texts, 500, kind=kind, lowercase=lowercase, strip_accents=strip_accents)


def test_special_tokens_have_the_first_ids(tokenizer):
    assert tokenizer.vocab[:5] == SPECIAL_TOKENS
    ids = (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)
    assert ids == (0, 1, 2, 3, 4)
    assert 150 < tokenizer.vocab_size <= 500


def test_ids_are_those_of_the_library_for_the_normalized_text(tokenizer):
    library = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.vocabulary_bytes())
    texts = [*OWN_TEXT, *ODD_TEXT, *noise(100)]
    expected = library.encode([tokenizer.normalize(text).strip(" ") for text in texts])
    assert tokenizer.encode_batch(texts) == expected
    assert sum(map(len, expected)) > 1000


def test_ids_in_transformers(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the parity extra: torch and transformers")
    tokenizer.save_huggingface(str(tmp_path), model_max_length=10_000)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for text in [*OWN_TEXT, *ODD_TEXT, *noise(300, seed=1), " [MASK]x [MASK] y[SEP]\u0301z", "中[MASK]人"]:
        encoded = theirs(text)
        ids, types = tokenizer.encode_with_special_tokens(text)
        assert (encoded["input_ids"], encoded["token_type_ids"]) == (ids, types), ascii(text)
    pair = theirs("a b", "c [MASK]")
    assert (pair["input_ids"], pair["token_type_ids"]) == tokenizer.encode_with_special_tokens("a b", "c [MASK]")


@pytest.mark.long
@pytest.mark.parametrize("size", [16_000])
def test_ids_in_transformers_on_a_megabyte_of_each_corpus(kind, size, data_dir, tmp_path):
    import gzip

    transformers = pytest.importorskip("transformers", reason="needs the parity extra: torch and transformers")
    lines: list[str] = []
    for path in (
        data_dir / "corpus/kowiki/kowiki.jsonl.gz", data_dir / "corpus/enwiki/enwiki-00000-of-00012.jsonl.gz"
    ):  # fmt: skip
        with gzip.open(path, "rt", encoding="utf-8") as file:
            size_read = 0
            while size_read < 1 << 20:
                lines += (text := json.loads(file.readline())["text"]).split("\n")
                size_read += len(text.encode())
    tokenizer = train_sentencepiece(lines, size, kind=kind, lowercase=True, strip_accents=True)
    assert tokenizer.vocab_size == size
    tokenizer.save_huggingface(str(tmp_path), model_max_length=1 << 20)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    words = sorted({word for line in [*lines, *noise(3000)] for word in tokenizer.normalize(line).split()})
    scores = [piece.score for piece in model_proto.parse(tokenizer.vocabulary_bytes()).pieces]
    ours = tokenizer.encode_batch(words)
    ties = 0
    for word, expected, ids in zip(words, ours, theirs(words, add_special_tokens=False)["input_ids"], strict=True):
        if expected != ids:  # only splits of equal probability may differ
            assert kind == "unigram", word
            assert sorted(scores[token] for token in expected) == sorted(scores[token] for token in ids), word
            ties += 1
    assert ties < 1e-4 * len(words)


def test_words_are_encoded_independently(tokenizer):
    texts = [*OWN_TEXT, *ODD_TEXT, *noise(50, seed=2)]
    cached = WordCache(tokenizer).encode(texts)
    assert [np.frombuffer(ids, "<u2").tolist() for ids in cached] == tokenizer.encode_batch(texts)


def test_literal_special_tokens_are_text_or_ids(tokenizer):
    text = "the [MASK] sees a[MASK]"
    assert tokenizer.mask_id not in tokenizer.encode_batch([text])[0]
    ids, _ = tokenizer.encode_with_special_tokens(text)
    assert ids.count(tokenizer.mask_id) == 2
    assert tokenizer.decode(ids[1:-1]).split() == ["the", "[MASK]", "sees", "a", "[MASK]"]
    # A word that follows a mask without a space continues it, as in the middle of training text.
    after = tokenizer.encode_with_special_tokens("[MASK]the")[0][2]
    assert not tokenizer.id_to_token(after).startswith(SPACE)


def test_offsets_are_of_the_original_text(tokenizer):
    for text in [*OWN_TEXT, *ODD_TEXT, *noise(60, seed=3)]:
        ((ids, offsets),) = tokenizer.encode_batch_with_offsets([text])
        assert ids == tokenizer.encode_batch([text])[0]
        assert offsets.shape == (len(ids), 2)
        assert offsets.dtype == np.int32
        assert (np.diff(offsets, axis=0) >= 0).all(), ascii(text)
        assert (offsets[:, 0] <= offsets[:, 1]).all()
        for token, (begin, end) in zip(ids, offsets.tolist(), strict=True):
            piece = tokenizer.piece_text(token)
            if token != tokenizer.unk_id and piece.isascii() and text.isascii():
                assert (text[begin:end].lower() if tokenizer.lowercase else text[begin:end]) == piece


def test_offsets_of_accents_and_of_characters_that_become_several():
    tokenizer = train_sentencepiece(
        ["abc é ab 株式会社 한국"] * 20, 40, kind="unigram", lowercase=True, strip_accents=True
    )
    ((_, offsets),) = tokenizer.encode_batch_with_offsets(["a e\u0301 ㍿ 한"])
    ends = {tuple(pair) for pair in offsets.tolist()}
    assert (2, 4) in ends  # the accent with its letter
    assert (5, 6) in ends  # all of 株式会社
    assert max(end for _, end in ends) == 8


def test_whole_words_begin_after_spaces_at_punctuation_and_anywhere_in_scripts_without_spaces():
    words = "(Hello, the-ship) 12 ab北京人 cไปเดิน don't"
    tokenizer = train_sentencepiece([words] * 30, 400, kind="unigram", lowercase=False, strip_accents=False)
    single = SentencePieceTokenizer(_characters_only(tokenizer), False, False)
    ids = single.encode_batch([words])[0]
    continues = single.continues_word(np.array([ids]))[0]
    starts = "".join(
        "|" + single.piece_text(token) if not tail else single.piece_text(token)
        for token, tail in zip(ids, continues, strict=True)
    )
    # A space mark alone begins the word that follows it, but for punctuation.
    assert starts == "||(|Hello|,|the|-|ship|)|12|ab|北|京|人|c|ไ|ป|เ|ด|ิ|น|don|'|t"


def _characters_only(tokenizer: SentencePieceTokenizer) -> bytes:
    """Returns the model without pieces of several characters."""
    proto = model_proto.parse(tokenizer.vocabulary_bytes())
    kept = [piece for piece in proto.pieces if piece.type != model_proto.NORMAL or len(piece.piece) == 1]
    copies = [type(piece).FromString(piece.SerializeToString()) for piece in kept]
    del proto.pieces[:]
    proto.pieces.extend(copies)
    return proto.SerializeToString()


def test_json_and_pickle_restore_the_tokenizer(tokenizer):
    value = json.loads(json.dumps(tokenizer.to_json()))
    for copy in (tokenizer_files.from_json(value), pickle.loads(pickle.dumps(tokenizer))):
        assert copy.to_json() == tokenizer.to_json()
        assert copy.sha256 == tokenizer.sha256
        assert copy.encode_batch(OWN_TEXT) == tokenizer.encode_batch(OWN_TEXT)
    assert len({tokenizer.sha256, _other_case(tokenizer).sha256}) == 2


def _other_case(tokenizer: SentencePieceTokenizer) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(tokenizer.vocabulary_bytes(), not tokenizer.lowercase, tokenizer.strip_accents)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"kind": "bytes"}, "kind"),
        ({"model": "%"}, "model"),
        ({"model": "aGFsbG8="}, "SentencePiece"),
        ({"lowercase": 1}, "lowercase"),
        ({"strip_accents": None}, "strip_accents"),
        ({"normalization": "nfd"}, "normalization"),
    ],
)
def test_invalid_json_is_refused(change, key):
    tokenizer = train_sentencepiece(OWN_TEXT, 300, kind="bpe", lowercase=True, strip_accents=True)
    with pytest.raises(InputError, match=key):
        tokenizer_files.from_json({**tokenizer.to_json(), **change})


def foreign(**options: object) -> bytes:
    """Returns a model as other programs train them, with SentencePiece's own normalization."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*OWN_TEXT * 5, *helpers.make_corpus(40).split("\n")]),
        model_writer=file,
        **{
            "vocab_size": 500, "hard_vocab_limit": False, "minloglevel": 2, "pad_id": 0, "unk_id": 1,
            "bos_id": -1, "eos_id": -1, "control_symbols": ["[CLS]", "[SEP]", "[MASK]"], "num_threads": 2, **options,
        },
    )  # fmt: skip
    return file.getvalue()


@pytest.mark.parametrize(
    "name", ["nmt_nfkc_cf", *(pytest.param(name, marks=pytest.mark.long) for name in ("nmt_nfkc", "identity"))]
)
def test_a_foreign_model_keeps_its_own_normalization(name, tmp_path, caplog):
    model = foreign(normalization_rule_name=name)
    tokenizer = SentencePieceTokenizer.from_other_source(model)
    assert tokenizer.lowercase is (name == "nmt_nfkc_cf")
    assert tokenizer.special_tokens == ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    texts = [*OWN_TEXT, "㍿ ﬁ e\u0301 x", "a  b \u200b c", "Ⅷ\u1112\u1161\u11ab"]
    assert tokenizer.encode_batch(texts) == library.encode(texts)
    for text, (ids, offsets) in zip(texts, tokenizer.encode_batch_with_offsets(texts), strict=True):
        assert len(ids) == len(offsets), text
        assert (np.diff(offsets, axis=0) >= 0).all(), text
    transformers = pytest.importorskip("transformers", reason="needs the parity extra: torch and transformers")
    tokenizer.save_huggingface(str(tmp_path), model_max_length=512)
    assert "differently" in caplog.text
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert theirs(OWN_TEXT, add_special_tokens=False)["input_ids"] == tokenizer.encode_batch(OWN_TEXT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"control_symbols": ["[CLS]", "[SEP]"]}, r"lacks special tokens: \[MASK\]"),
        ({"pad_id": -1, "unk_id": 0}, r"lacks special tokens: \[PAD\]"),
        ({"byte_fallback": True, "vocab_size": 700}, "byte_fallback"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
        ({"split_by_whitespace": False, "model_type": "bpe"}, "split_by_whitespace"),
        ({"model_type": "char"}, "model_type=4"),
        ({"add_dummy_prefix": False}, "add_dummy_prefix=false"),
        ({"remove_extra_whitespaces": False}, "remove_extra_whitespaces=false"),
    ],
)
def test_foreign_models_that_are_not_supported(options, message):
    with pytest.raises(InputError, match=message):
        SentencePieceTokenizer.from_other_source(foreign(**options))


def test_user_defined_symbols_of_a_foreign_model(tmp_path, caplog):
    model = foreign(model_type="bpe", user_defined_symbols=["<ent>"])
    tokenizer = SentencePieceTokenizer.from_other_source(model)
    ids = tokenizer.encode_batch(["see <ent>"])
    assert ids == sentencepiece.SentencePieceProcessor(model_proto=model).encode(["see <ent>"])
    assert tokenizer.token_to_id("<ent>") in ids[0]
    tokenizer.save_huggingface(str(tmp_path), model_max_length=512)
    assert "<ent>" in caplog.text
    assert tokenizer.fast_tokenizer.encode("see <ent>", add_special_tokens=False).ids != ids[0]


@pytest.mark.parametrize("data", [b"", b"\n", b"hello", b"\x1a\x00", b"\n\x05\n\x03abc"[:-1]])
def test_bytes_that_are_not_a_model(data):
    with pytest.raises(InputError, match="SentencePiece"):
        SentencePieceTokenizer.from_other_source(data)


def test_a_wordpiece_json_is_read_as_wordpiece(vocabulary):
    value = WordPieceTokenizer(vocabulary, True).to_json()
    assert isinstance(tokenizer_files.from_json(value), WordPieceTokenizer)


@pytest.mark.parametrize("size", [1, 10])
def test_vocabulary_smaller_than_the_characters_is_refused(size: int, kind: str):
    with pytest.raises(InputError, match=rf"--size={size}: too small .* at least \d+"):
        train_sentencepiece(["the ship sees the storm"], size, kind=kind, lowercase=True, strip_accents=True)
