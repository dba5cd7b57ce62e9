"""Tokenizers of every kind: ids, offsets and words, here and in `transformers`."""

import functools
import gzip
import json
import random
import unicodedata

import numpy as np
import pytest
import sentencepiece
import tokenizers
from support import helpers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from bert_jax.errors import InputError
from bert_jax.text.conversion import convert_vocabulary
from bert_jax.text.tokenizer import SPECIAL_TOKENS, Tokenizer, read_tokenizer
from bert_jax.text.vocabulary_options import KINDS, VocabularyOptions
from bert_jax.text.vocabulary_training import train_vocabulary
from bert_jax.text.word_cache import WordCache
from bert_jax.text.wordpiece import wordpiece_tokenizer

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


@functools.cache
def trained(kind: str, rules: str = "strip") -> Tokenizer:
    options = {"strip": {}, "keep": {"keep_accents": True}, "cased": {"cased": True}}[rules]
    texts = [*OWN_TEXT * 3, *helpers.make_corpus(40).split("\n")]
    return train_vocabulary(texts, VocabularyOptions(kind=kind, size=500, **options))


@functools.cache
def like_roberta() -> Tokenizer:
    """A tokenizer with the parts of RoBERTa's: no space before a text, `<mask>` with the space before it."""
    fast = tokenizers.Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "<pad>", "</s>", "<unk>", tokenizers.AddedToken("<mask>", lstrip=True, special=True)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator([*OWN_TEXT, *helpers.make_corpus(40).split("\n")], trainer)
    fast.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True)
    return _with_library(fast)


@functools.cache
def like_modernbert() -> Tokenizer:
    """A tokenizer with the parts of ModernBERT's: NFC, byte-level BPE, and runs of spaces as added tokens."""
    fast = tokenizers.Tokenizer(models.BPE())
    fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    fast.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator([*OWN_TEXT, *helpers.make_corpus(40).split("\n")], trainer)
    fast.add_tokens([tokenizers.AddedToken(" " * count, normalized=True) for count in (3, 2)])
    fast.add_special_tokens(
        [tokenizers.AddedToken("[MASK]", lstrip=True), "[UNK]", "[CLS]", "[SEP]", "[PAD]", "<|end|>"]
    )
    return _with_library(fast)


LIBRARY: dict[str, tokenizers.Tokenizer] = {}  # by hash


def _with_library(fast: tokenizers.Tokenizer) -> Tokenizer:
    tokenizer = Tokenizer(json.loads(fast.to_str()))
    LIBRARY[tokenizer.sha256] = fast
    return tokenizer


CASES = [*((kind, rules) for kind in KINDS for rules in ("strip", "keep", "cased")), "roberta", "modernbert"]


@pytest.fixture(scope="module", params=CASES, ids=str)
def tokenizer(request) -> Tokenizer:
    other = {"roberta": like_roberta, "modernbert": like_modernbert}.get(request.param)
    return other() if other else trained(*request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_the_first_ids(kind: str):
    tokenizer = trained(kind)
    assert tokenizer.vocab[:5] == SPECIAL_TOKENS == tokenizer.special_tokens
    ids = (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)
    assert ids == (0, 1, 2, 3, 4)
    assert (tokenizer.kind, tokenizer.lowercase, tokenizer.strip_accents) == (kind, True, True)
    cased = trained(kind, "cased")
    assert (cased.lowercase, cased.strip_accents, trained(kind, "keep").strip_accents) == (False, False, False)
    assert 150 < tokenizer.vocab_size <= 500


def test_ids_in_transformers(tokenizer: Tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the parity extra: torch and transformers")
    tokenizer.save(tmp_path, model_max_length=10_000)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    mask = tokenizer.special_tokens[4]
    for text in [*OWN_TEXT, *ODD_TEXT, *noise(300, seed=1), f" {mask}x {mask} y[SEP]\u0301z", f"中{mask}人"]:
        encoded = theirs(text)
        ids, types = tokenizer.encode_with_special_tokens(text)
        assert (encoded["input_ids"], encoded["token_type_ids"]) == (ids, types), ascii(text)
        if not any(special in text for special in (*tokenizer.special_tokens, "<|end|>")):
            assert tokenizer.encode_batch([text])[0] == ids[1:-1], ascii(text)
    pair = theirs("a b", f"c {mask}")
    assert (pair["input_ids"], pair["token_type_ids"]) == tokenizer.encode_with_special_tokens("a b", f"c {mask}")
    assert len(theirs) == tokenizer.vocab_size
    roles = (theirs.pad_token, theirs.unk_token, theirs.cls_token, theirs.sep_token, theirs.mask_token)
    assert roles == tokenizer.special_tokens


def mixed_text(data_dir, size: int = 2 << 20) -> list[str]:
    """Returns lines of ten languages: English and Korean articles, and the names of things in eight more."""
    babel = pytest.importorskip("babel", reason="needs the docs extra: babel")
    lines: list[str] = []
    for path in (
        data_dir / "corpus/kowiki/kowiki.jsonl.gz", data_dir / "corpus/enwiki/enwiki-00000-of-00012.jsonl.gz"
    ):  # fmt: skip
        with gzip.open(path, "rt", encoding="utf-8") as file:
            size_read = 0
            while size_read < size // 4:
                lines += (text := json.loads(file.readline())["text"]).split("\n")
                size_read += len(text.encode())
    rng = random.Random(0)
    for code in ("de", "fr", "ru", "ar", "hi", "th", "ja", "zh"):
        locale = babel.Locale(code)
        names = [*locale.languages.values(), *locale.territories.values(), *locale.currencies.values()]
        size_read = 0
        while size_read < size // 16:
            lines.append((" " if code not in ("th", "ja", "zh") else "").join(rng.choices(names, k=10)))
            size_read += len(lines[-1].encode())
    rng.shuffle(lines)
    return lines


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_ids_in_transformers_on_two_megabytes_of_ten_languages(kind: str, data_dir, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the parity extra: torch and transformers")
    lines = mixed_text(data_dir)
    assert sum(len(line.encode()) for line in lines) > 2 << 20
    tokenizer = train_vocabulary(lines, VocabularyOptions(kind=kind, size=16_000))
    assert tokenizer.vocab_size == 16_000
    tokenizer.save(tmp_path, model_max_length=1 << 20)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    texts = [*lines, *noise(3000)]
    assert tokenizer.encode_batch(texts) == theirs(texts, add_special_tokens=False)["input_ids"]


@pytest.mark.long
@pytest.mark.parametrize("normalization", ["nmt_nfkc_cf", "identity"])
def test_ids_in_sentencepiece_on_two_megabytes_of_ten_languages(normalization: str, data_dir, tmp_path):
    lines = mixed_text(data_dir)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(tmp_path / "m"), vocab_size=16_000, minloglevel=2, pad_id=0,
        unk_id=1, bos_id=-1, eos_id=-1, control_symbols=["[CLS]", "[SEP]", "[MASK]"],
        normalization_rule_name=normalization, max_sentence_length=1 << 20,
    )  # fmt: skip
    tokenizer = convert_vocabulary(str(tmp_path / "m.model"))
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    words = sorted({word for line in lines for word in line.split(" ") if word})
    pairs = zip(words, tokenizer.encode_batch(words), library.encode(words), strict=True)
    differ = [word for word, ours, theirs in pairs if ours != theirs]
    print(f"{len(differ)} of {len(words)} words have other ids, such as {differ[:5]}")
    assert len(differ) < 2e-3 * len(words)


def test_added_tokens_keep_their_ids_and_are_matched_in_words(tmp_path):
    """Special tokens that are no pieces of the model, and a plain added token after them."""
    transformers = pytest.importorskip("transformers", reason="needs the parity extra: torch and transformers")
    (tmp_path / "a").mkdir()
    wordpiece_tokenizer([*SPECIAL_TOKENS, "the", "co", "##vid", "-", "19", "c", "+"], True).save(tmp_path / "a")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "a"))
    theirs.add_special_tokens({"additional_special_tokens": ["[E1]", "[E2]"]})
    theirs.add_tokens(["covid-19", "C++", "new york"])
    theirs.save_pretrained(tmp_path / "b")
    tokenizer = read_tokenizer(tmp_path / "b" / "tokenizer.json")
    texts = ["covid-19 the", "the C++ [E2] c +", "the new york new york", "[E1]covid"]
    expected = theirs(texts, add_special_tokens=False)["input_ids"]
    assert tokenizer.encode_batch(texts) == expected
    assert [np.frombuffer(ids, "<u2").tolist() for ids in WordCache(tokenizer).encode(texts)] == expected
    assert tokenizer.sha256 != read_tokenizer(tmp_path / "a" / "tokenizer.json").sha256


@pytest.mark.parametrize("name", ["words", "no marks", "prefix"])
def test_words_of_pieces_with_other_marks(name: str):
    pieces, options, ids, tails = {
        "words": (["the", "cat"], None, [5, 6, 5], [False, False, False]),
        "no marks": (["the", "cat"], {}, [5, 6, 5], [False, False, False]),
        "prefix": (["ca", "##t", "the"], {"continuing_subword_prefix": "##"}, [7, 5, 6], [False, False, True]),
    }[name]  # fmt: skip
    vocab = {piece: index for index, piece in enumerate([*SPECIAL_TOKENS, *pieces])}
    model = models.WordLevel(vocab, "[UNK]") if options is None else models.BPE(vocab, [], unk_token="[UNK]", **options)
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(json.loads(fast.to_str()))
    assert tokenizer.continues_word(np.array([[2, *ids, 3]]))[0].tolist() == [False, *tails, False]


def test_dropout_of_merges_is_left_out():
    content = json.loads(json.dumps(trained("bpe").content))
    content["model"]["dropout"] = 0.9
    assert Tokenizer(content).encode_batch(OWN_TEXT) == trained("bpe").encode_batch(OWN_TEXT)


def test_a_text_after_another_has_a_space_before_it(tokenizer: Tokenizer):
    after = tokenizer.encode_batch(["x the ship"])[0]
    assert [*tokenizer.encode_batch(["x"])[0], *tokenizer.encode_words(["the ship"])[0]] == after


def test_literal_special_tokens_are_text_or_ids(tokenizer: Tokenizer):
    mask = tokenizer.special_tokens[4]
    text = f"the {mask} sees a{mask}"
    special = {tokenizer.token_to_id(token) for token in tokenizer.special_tokens} - {tokenizer.unk_id}
    plain = "".join(f" {token}a{token}" for token in (*tokenizer.special_tokens, "<|end|>"))
    assert not special & {*tokenizer.encode_batch([plain])[0]}
    ids, _ = tokenizer.encode_with_special_tokens(text)
    assert ids.count(tokenizer.mask_id) == 2
    assert tokenizer.decode(ids[1:-1]).replace(mask, f" {mask} ").split() == ["the", mask, "sees", "a", mask]
    # A word that follows a mask without a space continues it, as in the middle of training text.
    after = tokenizer.encode_with_special_tokens(f"{mask}the")[0][2]
    if tokenizer.kind in ("unigram", "bpe"):
        assert not tokenizer.vocab[after].startswith("▁")


def test_offsets_are_of_the_original_text(tokenizer: Tokenizer):
    for text in [*OWN_TEXT, *ODD_TEXT, *noise(60, seed=3)]:
        ((ids, offsets),) = tokenizer.encode_batch_with_offsets([text])
        assert ids == tokenizer.encode_batch([text])[0]
        assert offsets.shape == (len(ids), 2)
        assert offsets.dtype == np.int32
        assert (np.diff(offsets, axis=0) >= 0).all(), ascii(text)
        assert (offsets[:, 0] <= offsets[:, 1]).all()
        for token, (begin, end) in zip(ids, offsets.tolist(), strict=True):
            piece = tokenizer.vocab[token].strip("▁Ġ").removeprefix("##")
            if token != tokenizer.unk_id and piece.isascii() and piece.strip() and text.isascii():
                assert (text[begin:end].lower() if tokenizer.lowercase else text[begin:end]) == piece


def test_offsets_of_accents_and_of_characters_that_become_several():
    tokenizer = train_vocabulary(["abc é ab 株式会社 한국"] * 20, VocabularyOptions(kind="unigram", size=40))
    ((_, offsets),) = tokenizer.encode_batch_with_offsets(["a e\u0301 ㍿ 한"])
    ends = {tuple(pair) for pair in offsets.tolist()}
    assert (2, 4) in ends  # the accent with its letter
    ((_, stripped),) = trained("wordpiece").encode_batch_with_offsets(["a e\u0301 b"])
    assert stripped.tolist() == [[0, 1], [2, 4], [5, 6]]
    assert (5, 6) in ends  # all of 株式会社
    assert max(end for _, end in ends) == 8


@pytest.mark.parametrize("kind", ["unigram", "bpe", "byte_bpe", "roberta"])
def test_whole_words_begin_after_spaces_at_punctuation_and_anywhere_in_scripts_without_spaces(kind: str):
    words = "(the, old;ship) 42 ab北京的 cไปเดิน l'été"
    tokenizer = like_roberta() if kind == "roberta" else trained(kind, "cased")
    ((ids, offsets),) = tokenizer.encode_batch_with_offsets([words])
    assert tokenizer.unk_id not in ids
    continues = tokenizer.continues_word(np.array([ids]))[0]
    begins = {*offsets[:, 0].tolist()}
    starts = {begin for begin, tail in zip(offsets[:, 0].tolist(), continues, strict=True) if not tail}
    expected = [0, 1, 4, 6, 9, 10, 14, 16, 19, 21, 22, 23, 25, *range(26, 32), 33, 34, 35]
    # A piece may have several characters. In byte-level BPE it may also begin within one.
    ambiguous = {21, 22, 23, *range(26, 32)} if tokenizer.kind == "byte_bpe" else set()
    assert starts - ambiguous == ({*expected} & begins) - ambiguous


@pytest.mark.parametrize("made", [like_roberta, like_modernbert])
def test_special_tokens_in_a_text_take_the_spaces_that_the_file_says(made):
    tokenizer = made()
    mask = tokenizer.special_tokens[4]
    for text in (f"the {mask} ship", f"the{mask}ship", f"{mask}  ship {mask}"):
        expected = LIBRARY[tokenizer.sha256].encode(text, add_special_tokens=False).ids
        again = Tokenizer.from_json(tokenizer.to_json())
        assert tokenizer.encode_with_special_tokens(text)[0][1:-1] == expected
        assert again.encode_with_special_tokens(text)[0][1:-1] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_in_a_text_takes_the_place_of_a_word(kind: str):
    tokenizer = trained(kind)
    (word,) = tokenizer.encode_words(["the"])
    expected = [tokenizer.cls_id, *word, tokenizer.mask_id, *word, tokenizer.sep_id]
    assert tokenizer.encode_with_special_tokens("the [MASK] the")[0] == expected


def test_the_hash_is_of_all_that_decides_the_ids():
    found = [trained(kind, rules).sha256 for kind in KINDS for rules in ("strip", "keep", "cased")]
    assert len({*found, like_roberta().sha256, like_modernbert().sha256}) == len(found) + 2
    content = trained("wordpiece").content
    options = [("normalizer", {"clean_text": False}), ("normalizer", {"handle_chinese_chars": False}),
               ("model", {"max_input_chars_per_word": 3})]  # fmt: skip
    changed = [Tokenizer({**content, part: {**content[part], **option}}).sha256 for part, option in options]
    assert len({trained("wordpiece").sha256, *changed}) == 4


def test_the_hash_is_not_of_what_special_tokens_take():
    content = like_roberta().content
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
    without = Tokenizer({**content, "added_tokens": [{**token, **flags} for token in content["added_tokens"]]})
    assert without.content != content
    assert without.sha256 == like_roberta().sha256


def settings(folder, **values: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def test_special_tokens_are_those_that_the_settings_name(tmp_path):
    content = trained("bpe").content
    names = {"[PAD]": "<empty>", "[CLS]": "<begin>", "[SEP]": "<end>", "[MASK]": "<hole>"}
    text = json.dumps(content)
    for old, new in names.items():
        text = text.replace(old, new)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(InputError, match=r"lacks special tokens: \[PAD\] \[CLS\] \[SEP\] \[MASK\].*tokenizer_config"):
        read_tokenizer(tmp_path / "tokenizer.json")
    settings(
        tmp_path, pad_token="<empty>", cls_token={"content": "<begin>"}, sep_token="<end>", mask_token="<hole>", x=1
    )
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.special_tokens == ("<empty>", "[UNK]", "<begin>", "<end>", "<hole>")
    assert tokenizer.encode_with_special_tokens("a <hole>")[0][-2:] == [tokenizer.mask_id, tokenizer.sep_id]
    settings(tmp_path, mask_token="<other>")
    with pytest.raises(InputError, match=r"special tokens"):
        read_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    "content",
    [
        [], "x", 5, {}, {"model": 5}, {"model": {"type": "WordPiece", "vocab": {"[PAD]": "0"}}},
        {"model": {"type": "BPE", "vocab": {token: n for n, token in enumerate(SPECIAL_TOKENS)}}},
        {"model": {"type": "Other", "vocab": {token: n for n, token in enumerate(SPECIAL_TOKENS)}}},
        {"added_tokens": [{"id": 3}], "model": {"type": "WordPiece", "vocab": {}}},
        {"model": {"type": "WordLevel", "unk_token": "?", "vocab": dict(zip(SPECIAL_TOKENS, range(5), strict=True))}},
        {"model": {"type": "Unigram", "unk_id": None, "vocab": [(token, 0.0) for token in SPECIAL_TOKENS]}},
    ],
    ids=str,
)  # fmt: skip
def test_a_file_that_is_no_tokenizer_is_refused(content: object, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"tokenizer\.json: "):
        read_tokenizer(tmp_path / "tokenizer.json")


def test_a_template_of_a_token_that_is_nowhere_is_refused(tmp_path):
    """The library panics at it, with what is no Exception."""
    content = json.loads(json.dumps(wordpiece_tokenizer([*SPECIAL_TOKENS, "a"], lowercase=True).content))
    del content["post_processor"]["special_tokens"]["[SEP]"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"tokenizer\.json: .*no entry found for key"):
        read_tokenizer(tmp_path / "tokenizer.json")


def test_a_file_that_is_no_json_is_refused(tmp_path):
    for content in (b"", b"[PAD]\n[UNK]\n", b"\xff\xfe", b"[" * 100_000):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(InputError, match=r"tokenizer\.json: .*expected a tokenizer\.json"):
            read_tokenizer(tmp_path / "tokenizer.json")
