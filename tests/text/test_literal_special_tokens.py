"""Literal special tokens are ordinary text in a corpus, and special in the input of fill-mask."""

import pytest
from support import sources

import bert_jax

WORDS = ["pad", "unk", "cls", "sep", "mask"]


@pytest.fixture(scope="module")
def pieces(vocabulary) -> list[str]:
    """Tokenizer with the names of the special tokens as words, in both cases, and the characters around them."""
    names = [*WORDS, *(word.upper() for word in WORDS), "Mask", *"[]().#", "\u0301", "##\u0301"]
    return list(dict.fromkeys([*vocabulary, *names]))


@pytest.fixture(scope="module")
def bert(pieces, tmp_path_factory) -> bert_jax.PreTrained:
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    sources.write_checkpoint(folder, pieces)
    return bert_jax.load(str(folder))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("the [MASK] ship", "the [MASK] ship"),
        ("[MASK]", "[MASK]"),
        ("[MASK]the", "[MASK] the"),
        ("ship[MASK].", "ship [MASK] ."),
        ("[[MASK]]", "[ [MASK] ]"),
        ("[MASK][MASK]", "[MASK] [MASK]"),
        ("[mask] [Mask] [MASK]", "[ mask ] [ mask ] [MASK]"),
        ("the ship [SEP] [MASK] [sep]", "the ship [SEP] [MASK] [ sep ]"),
        ("the[SEP]ship [MASK]", "the [SEP] ship [MASK]"),
        ("##s [MASK]", "# # s [MASK]"),
        ("[MASK]##s", "[MASK] # # s"),
        ("[ MASK ] [MASK]", "[ mask ] [MASK]"),
        ("[MA\u200bSK] [MASK]\u0301 s", "[ mask ] [MASK] s"),
    ],
)
def test_special_tokens_are_special_where_a_mask_is_filled(bert, text, tokens):
    ids = bert.batch(text)["input_ids"][0].tolist()
    assert [bert.tokenizer.id_to_token(index) for index in ids] == ["[CLS]", *tokens.split(), "[SEP]"]
