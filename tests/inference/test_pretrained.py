"""A model in Python: its states and logits, and what `batch` makes of texts."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from support import sources

import bert_jax
from bert_jax.errors import InputError
from bert_jax.inference.pretrained import fill_mask


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory, vocabulary: list[str]) -> bert_jax.PreTrained:
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    sources.write_checkpoint(folder, vocabulary, num_hidden_layers=1)
    return bert_jax.load(str(folder))


def test_shapes_of_states_and_logits(bert: bert_jax.PreTrained, vocabulary: list[str]):
    batch = bert.batch("the ship sees a [MASK] .", "the storm sees the moon .")
    length = batch["input_ids"].shape[1]
    hidden, (mlm_logits, nsp_logits) = jax.jit(lambda batch: (bert.model.encode(batch)[0], bert.model(batch)))(batch)
    assert hidden.shape == (1, length, 48)
    assert mlm_logits.shape == (1, length, 128)
    assert nsp_logits.shape == (1, 1, 2)
    mask = batch["input_ids"][0].tolist().index(bert.tokenizer.mask_id)
    best = [bert.tokenizer.id_to_token(int(i)) for i in jax.lax.top_k(mlm_logits[0, mask], 5)[1]]
    assert len(set(best) & set(vocabulary)) == 5


def test_a_text_is_the_same_alone_and_padded(bert: bert_jax.PreTrained):
    texts, pairs = ["the ship .", "a storm near the harbour sees the moon ."], ["the old owl hears a ghost .", "star ."]
    batch = bert.batch(texts, pairs)
    assert not np.asarray(batch["sequence_ids"]).all()
    forward = jax.jit(lambda batch: (bert.model.encode(batch)[0], bert.model(batch)))
    together, (mlm, nsp) = forward(batch)
    for row, (text, pair) in enumerate(zip(texts, pairs, strict=True)):
        alone = bert.batch(text, pair)
        length = alone["input_ids"].shape[1]
        assert alone["token_type_ids"][0].tolist() == bert.tokenizer.encode_with_special_tokens(text, pair)[1]
        encoded, (mlm_alone, nsp_alone) = forward(alone)
        np.testing.assert_allclose(encoded[0], together[row, :length], atol=1e-5)
        np.testing.assert_allclose(mlm_alone[0], mlm[row, :length], atol=1e-4)
        np.testing.assert_allclose(nsp_alone[0], nsp[row], atol=1e-5)


def test_texts_without_pairs(bert: bert_jax.PreTrained):
    for given in ("the ship .", ["the ship ."], ("the ship .",)):
        batch = bert.batch(given)
        assert batch["input_ids"][0].tolist() == bert.tokenizer.encode_with_special_tokens("the ship .")[0]
        assert not np.any(batch["token_type_ids"])


@pytest.mark.parametrize(
    ("text", "pair", "message"),
    [
        ([], None, r"\b0 texts"),
        (["a", "b"], ["c"], r"\b2 texts.*\b1 pair"),
        (["a", "b"], "c", r"\b2 texts.*\b1 pair"),
        ("the ship " * 40, None, r"\b82\b.*\b64\b"),
        ("the caf\udce9 .", None, r"'the caf\\udce9 .'.*UTF-8"),
        ("the ship .", "the caf\udce9 .", r"caf\\udce9.*UTF-8"),
    ],
)
def test_texts_that_cannot_be_read(text, pair, message: str, bert: bert_jax.PreTrained):
    with pytest.raises(InputError, match=message):
        bert.batch(text, pair)


def test_a_pair_needs_a_second_segment(vocabulary: list[str], tmp_path: Path):
    sources.write_checkpoint(tmp_path, vocabulary, type_vocab_size=1)
    one_segment = bert_jax.load(str(tmp_path))
    with pytest.raises(InputError, match="type_vocab_size=1"):
        one_segment.batch(["the ship", "the owl"], [None, "star"])
    assert not np.any(one_segment.batch("the ship")["token_type_ids"])


def test_each_mask_is_filled_on_its_own(bert: bert_jax.PreTrained):
    text = "the [MASK] sees the [MASK] ."
    logits, _ = jax.jit(lambda batch: bert.model(batch))(bert.batch(text))
    found = fill_mask(bert, text, top=3)
    for position, place, fillings in (
        (2, "the {} sees the [MASK] .", found[0]),
        (5, "the [MASK] sees the {} .", found[1]),
    ):
        best = [bert.tokenizer.id_to_token(int(i)) for i in np.argsort(-np.asarray(logits[0, position]))[:3]]
        assert [filling.token for filling in fillings] == best
        chances = np.sort(np.asarray(jax.nn.softmax(logits[0, position])))[::-1][:3]
        np.testing.assert_allclose([filling.probability for filling in fillings], chances, rtol=1e-4)
        joined = [place.format(token).replace(" ##", "") for token in best]
        assert [filling.text for filling in fillings] == joined


def test_the_package_does_not_wait_for_jax_until_it_is_asked():
    code = """
import sys, bert_jax
assert 'jax' not in sys.modules
assert not hasattr(bert_jax, 'nothing')
from bert_jax import load, PreTrained
assert 'jax' in sys.modules and load.__module__ == 'bert_jax.inference.pretrained'
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
