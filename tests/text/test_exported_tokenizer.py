"""The exported tokenizer in `transformers` returns the ids of ours on text of every plane."""

import pytest
from support.reference_tokenizer import tokenize, words

from bert_jax.text.conversion import convert_vocabulary
from bert_jax.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from bert_jax.text.wordpiece import CONTINUATION, wordpiece_tokenizer

PLAIN = [
    "", " \t\r\n", "Hello, World! It's £3.50 (~€4) at 5^2 `o'clock`…", "un-BELIEVABLE ##ing # #ing @user https://a.b/c_d",
    "İstanbul ıI Straße ẞ ÅÅÅ naïve e\u0301 n\u0303 Ǆ ﬁ Ⅷ ⓐ", "ΟΔΌΣ. Ο.Σ. ΑΣ'Α ΣΊΣΥΦΟΣ Σ", "Москва Ёжик Й и\u0306",
    "中国人 汉字かなカナ 日本語テキスト、漢字。", "㐀鿿豈\ufaff𠀀𪛖\U0002b820x\U0002ceaf\U0002f800\U0002fa1d𰀀",
    "대한민국의 수도는 서울이다. 한\u1100\u1161각", "שָׁלוֹם العَرَبِيَّة؟ १२३ नमस्ते। สวัสดี ภาษาไทย",
    "👩\u200d👩\u200d👧 🇰🇷 ❤\ufe0f 👍🏽 ☃", "\U000e0041\U000e0100x \U0001e944y", "𝔘𝔫𝔦 𝒜 𐐀𐐨 𞤀𞤢 𓀀 𝄞 🜁", "a؝b⹃c⹕d෴e፡f",
    "a\u0000b\u0007c\u001cd\u0085e\u200bf\u00adg\ufeffh\ufffdi\u2060j",
    "a\u00a0b\u2003c\u3000d\u2028e\u2029f\u202fg\u1680h", "\ufdd0 \uffff \U0001fffe \U00050000",
    "private \ue000x \uf8ff \U000f0000 \U0010fffd", *("a" * count for count in (100, 101, 200, 201)),
    *("é" * count for count in (100, 101, 200, 201)), "中" * 201, "a." * 150, "Ab" * 100 + " " + "Ab" * 101,
    "e\u0301" * 200,
]  # fmt: skip
SPECIAL = ["the [MASK] of", "[MASK][SEP]x[UNK]", "[CLS] [PAD] [mask]", "x[MASK]y[MASK]", "[[SEP]]", "Σ[MASK]ΑΣ[SEP]"]
SPECIAL += ["[MASK]\u0301", "[MA\u200bSK]"]
MADE, RELEASED = ["made, uncased", "made, cased"], ["uncased", "cased", "multilingual-cased"]


def made(lowercase: bool) -> Tokenizer:
    """Vocabulary with an initial and a `##` piece for every character, so that all characters have different ids."""
    characters = sorted({c for text in [*PLAIN, *SPECIAL] for word in words(text, lowercase) for c in word})
    return wordpiece_tokenizer([*SPECIAL_TOKENS, *characters, *(CONTINUATION + c for c in characters)], lowercase)


@pytest.fixture(scope="module", params=[*MADE, *RELEASED])
def both(request, tmp_path_factory):
    """Pair of our tokenizer and that of `transformers`, loaded from our export."""
    transformers = pytest.importorskip("transformers", reason="needs the parity extra: torch and transformers")
    lowercase = request.param.endswith("uncased")
    if request.param in MADE:
        ours = made(lowercase)
    else:
        data_dir = request.getfixturevalue("data_dir")
        ours = convert_vocabulary(str(data_dir / f"vocab/bert-base-{request.param}-vocab.txt"))
    folder = tmp_path_factory.mktemp("exported")
    ours.save(folder, model_max_length=512)
    return ours, transformers.AutoTokenizer.from_pretrained(str(folder))


def test_plain_text(both):
    ours, theirs = both
    for text in PLAIN:
        expected = ["[CLS]", *tokenize(text, set(ours.vocab), ours.lowercase), "[SEP]"]
        ids, types = ours.encode_with_special_tokens(text)
        assert [ours.id_to_token(index) for index in ids] == expected, ascii(text)
        assert ours.encode_batch([text])[0] == ids[1:-1], ascii(text)
        encoded = theirs(text)
        assert (encoded["input_ids"], encoded["token_type_ids"]) == (ids, types), ascii(text)


def test_special_tokens(both):
    ours, theirs = both
    for text in SPECIAL:
        assert theirs(text)["input_ids"] == ours.encode_with_special_tokens(text)[0], ascii(text)
        assert ours.encode_batch([text])[0] == [
            ours.token_to_id(piece) for piece in tokenize(text, set(ours.vocab), ours.lowercase)
        ], ascii(text)


def test_pairs(both):
    ours, theirs = both
    texts = [*PLAIN, *SPECIAL]
    for first, second in zip(texts, texts[1:] + texts[2:3], strict=True):  # An empty second text is none to theirs.
        encoded = theirs(first, second)
        given = encoded["input_ids"], encoded["token_type_ids"]
        assert given == ours.encode_with_special_tokens(first, second), (ascii(first), ascii(second))
