"""Hidden states and vectors of texts in Python: against `model.encode` and, in the long test, against transformers."""

from pathlib import Path

import jax
import numpy as np
import pytest
from support import sources

import bert_jax
from bert_jax.errors import InputError
from bert_jax.inference.text_encoder import POOLS
from bert_jax.interop import huggingface
from bert_jax.training.checkpoints import open_checkpoint

TEXTS = ["the ship .", "a storm near the harbour sees the moon .", "", "the owl hears a ghost ."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, vocabulary: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    sources.write_checkpoint(folder, vocabulary)
    return folder


@pytest.fixture(scope="module")
def bert(folder: Path) -> bert_jax.PreTrained:
    return bert_jax.load(str(folder))


def test_hidden_states_of_each_text_with_its_mask(bert: bert_jax.PreTrained):
    encoded = bert.encode(TEXTS)
    lengths = [len(bert.tokenizer.encode_with_special_tokens(text)[0]) for text in TEXTS]
    assert encoded.hidden_states.shape == (4, max(lengths), 48)
    assert encoded.mask.sum(axis=1).tolist() == lengths
    assert not encoded.hidden_states[~encoded.mask].any()
    forward = jax.jit(lambda batch: bert.model.encode(batch)[0])
    for row, text in enumerate(TEXTS):
        batch = bert.batch(text)
        assert encoded.input_ids[row, : lengths[row]].tolist() == batch["input_ids"][0].tolist()
        np.testing.assert_allclose(encoded.hidden_states[row, : lengths[row]], forward(batch)[0], atol=1e-5)


def test_vectors_average_special_tokens_and_no_padding(bert: bert_jax.PreTrained):
    encoded, mean, cls = bert.encode(TEXTS), bert.embed(TEXTS), bert.embed(TEXTS, pool="cls")
    assert mean.dtype == np.float32
    for row in range(len(TEXTS)):
        states = encoded.hidden_states[row][encoded.mask[row]]
        np.testing.assert_allclose(mean[row], states.mean(axis=0), atol=1e-5)
        np.testing.assert_allclose(cls[row], states[0], atol=1e-5)
    np.testing.assert_allclose(bert.embed(TEXTS, batch_size=1), mean, atol=1e-5)
    np.testing.assert_allclose(bert.embed(TEXTS[1]), mean[1:2], atol=1e-5)


def test_a_pair_is_one_vector(bert: bert_jax.PreTrained):
    pair = bert.encode("the ship .", "the owl .")
    np.testing.assert_allclose(
        bert.embed(["the ship ."], ["the owl ."])[0], pair.hidden_states[0].mean(axis=0), atol=1e-5
    )
    assert np.abs(bert.embed("the ship .", "the owl .") - bert.embed("the ship .")).max() > 1e-3


def test_a_long_text_is_truncated(bert: bert_jax.PreTrained):
    assert bert.encode("the ship " * 60).mask.shape == (1, 64)
    np.testing.assert_array_equal(bert.embed("the ship " * 60), bert.embed("the ship " * 31))


def test_fillings_are_those_of_the_function(bert: bert_jax.PreTrained):
    from bert_jax.inference.pretrained import fill_mask

    assert bert.fill_mask("the [MASK] .", 2) == fill_mask(bert, "the [MASK] .", 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"text": TEXTS, "pool": "max"}, "pool=max.*mean.*cls"), ({"text": []}, r"\b0 texts"),
     ({"text": TEXTS, "batch_size": 0}, "batch_size")],
)  # fmt: skip
def test_refusals(arguments: dict, message: str, bert: bert_jax.PreTrained):
    with pytest.raises(InputError, match=message):
        bert.embed(**arguments)


def test_the_first_token_of_a_left_to_right_model_is_no_vector(vocabulary: list[str], tmp_path: Path):
    sources.write_checkpoint(tmp_path / "ltr", vocabulary, heads=("mlm_head",), is_decoder=True, num_hidden_layers=1)
    with pytest.raises(InputError, match="pool=cls"):
        bert_jax.load(str(tmp_path / "ltr")).embed("the ship .", pool="cls")


@pytest.mark.long
@pytest.mark.parametrize("pool", POOLS)
def test_vectors_are_those_of_transformers(pool: str, folder: Path, bert: bert_jax.PreTrained, tmp_path: Path):
    torch = pytest.importorskip("torch", reason="needs the parity extra: torch and transformers")
    transformers = pytest.importorskip("transformers", reason="needs the parity extra: torch and transformers")
    huggingface.export(open_checkpoint(str(folder)), str(tmp_path / "hf"))
    model = transformers.BertModel.from_pretrained(tmp_path / "hf").eval()
    inputs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][:, :, None].float()
    expected = hidden[:, 0] if pool == "cls" else (hidden * mask).sum(1) / mask.sum(1)
    np.testing.assert_allclose(bert.embed(TEXTS, pool=pool), expected.numpy(), atol=1e-5)
