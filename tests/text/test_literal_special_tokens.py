"""Literal special tokens are ordinary text in a corpus, and special in the input of fill-mask."""

import numpy as np
import pytest
from support import helpers, sources

import bert_jax
from bert_jax.data.dataset import PreparedDataset
from bert_jax.text.tokenizer import SPECIAL_TOKENS
from bert_jax.text.wordpiece import wordpiece_tokenizer

LITERALS = [
    "[SEP] the ship [SEP]", "the [MASK] ship", "[CLS] the ship", "[PAD] [PAD] the ship", "the ship [UNK] sees",
    "the[SEP]ship", "ship[MASK]", "[MASK]s", "[MASK][MASK]", "[[MASK]]", "[mask] [sep]", "[Mask] the", "[ MASK ]",
    "the ##s ship", "##the", "\u200b[MASK]\u200b", "[SEP]\u0301 ship", "[MASK].", "(the [CLS])",
]  # fmt: skip
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


@pytest.mark.parametrize("lowercase", [True, False])
def test_no_special_token_comes_out_of_a_corpus(pieces, tmp_path, lowercase):
    corpus = tmp_path / "corpus.txt"
    documents = ["\n".join(f"the ship sees {text}\n{text}" for text in LITERALS[n:] + LITERALS[:n]) for n in range(19)]
    corpus.write_text("\n\n".join(documents) + "\n")
    tokenizer = wordpiece_tokenizer(pieces, lowercase)
    helpers.prepare(
        [str(corpus)],
        tokenizer,
        str(tmp_path / "data"),
        helpers.PrepareOptions(seq_len=64, eval_fraction=0.1, sentences="lines"),
        workers=1,
    )
    dataset = PreparedDataset(str(tmp_path / "data"))
    special = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    seen: set[str] = set()
    for split in ("train", "eval"):
        arrays = dataset.instances(split, np.arange(dataset.size(split)))
        text = arrays["input_ids"][arrays["maskable"]]
        assert text.size
        assert not np.isin(text, special).any()
        seen |= {tokenizer.id_to_token(index) for index in np.unique(text).tolist()}
        in_place = np.where(arrays["maskable"], -1, arrays["input_ids"])
        assert ((in_place == tokenizer.cls_id).sum(axis=1) == 1).all()
        assert ((in_place == tokenizer.sep_id).sum(axis=1) == 2).all()
    assert seen >= {"[", "]", "#", *(WORDS if lowercase else (word.upper() for word in WORDS))}


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
