"""A model in Python: its states and logits, and what `batch` makes of texts."""

from pathlib import Path

import jax
import numpy as np
import pytest
from support import sources

import bert_jax
from bert_jax.errors import InputError
from bert_jax.interop import huggingface
from bert_jax.training.checkpoints import open_checkpoint

TEXTS = ["the ship .", "a storm near the harbour sees the moon .", "", "the owl hears a ghost ."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, vocabulary: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    sources.write_checkpoint(folder, vocabulary, num_hidden_layers=1)
    return folder


@pytest.fixture(scope="module")
def bert(folder: Path) -> bert_jax.PreTrained:
    return bert_jax.load(str(folder))


def test_all_methods_encode_a_text_alike(bert: bert_jax.PreTrained):
    """Special tokens in a text are these tokens, as in `transformers`."""
    for text, pair in (("the [MASK] was old .", None), ("the ship [SEP] a", "the [MASK] ."), ("", ""), ("a", "")):
        ids, segments = bert.tokenizer.encode_with_special_tokens(text, pair)
        for given in ((text, pair), ([text], None if pair is None else [pair])):
            batch, encoded = bert.batch(*given), bert.encode(*given)
            assert batch["input_ids"].tolist() == encoded.input_ids.tolist() == [ids]
            assert batch["token_type_ids"].tolist() == [segments]
            hidden = jax.jit(lambda batch: bert.model.encode(batch)[0])(batch)
            np.testing.assert_allclose(encoded.hidden_states, hidden, atol=1e-5)
    long = bert.encode("the [MASK] . " * 40, "a ship .")
    assert long.input_ids.shape == (1, 64)
    assert long.input_ids[0, -5:].tolist() == bert.batch("x", "a ship .")["input_ids"][0, -5:].tolist()
    np.testing.assert_array_equal(bert.embed("the ship " * 60), bert.embed("the ship " * 31))


@pytest.mark.parametrize(
    ("text", "pair", "message"),
    [
        ([], None, r"\b0 texts"),
        (["a", "b"], ["c"], r"\b2 texts.*\b1 pair"),
        (["a", "b"], "c", r"\b2 texts.*\b1 pair"),
        ("the ship " * 40, None, r"\b82\b.*\b64\b"),
        ("the caf\udce9 .", None, r"'the caf\\udce9 .'.*UTF-8"),
        ("the ship .", "the caf\udce9 .", r"caf\\udce9.*UTF-8"),
        ([("the ship", "the owl")], None, r"text=\('the ship', 'the owl'\): .*tuple"),
        ([None], None, r"text=None"),
        (["a"], [["b"]], r"text=\['b'\]: .*list"),
    ],
)
def test_texts_that_cannot_be_read(text, pair, message: str, bert: bert_jax.PreTrained):
    with pytest.raises(InputError, match=message):
        bert.batch(text, pair)


RECORDS = {
    "classify": ({"name": "text", "classes": ["a", "b"], "texts": ["first", "second"]}, "star"),
    "choose": ({"name": "choice"}, ["star", "owl"]),
    "span": ({"name": "squad/1.1", "doc_stride": 16, "max_query_length": 8}, "the star"),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_pair_needs_a_second_segment(kind: str, vocabulary: list[str], tmp_path: Path):
    checkpoint = sources.write_checkpoint(tmp_path / "one", vocabulary, type_vocab_size=1)
    one_segment = bert_jax.load(str(tmp_path / "one"))
    for method in (one_segment.batch, one_segment.encode, one_segment.embed):
        with pytest.raises(InputError, match="type_vocab_size=1"):
            method(["the ship", "the owl"], [None, "star"])
    assert not np.any(one_segment.batch("the ship")["token_type_ids"])
    record, pair = RECORDS[kind]
    sources.write_fine_tuned(tmp_path / kind, checkpoint, kind, record, size=2)
    with pytest.raises(InputError, match="type_vocab_size=1"):
        bert_jax.load(str(tmp_path / kind)).predict("the ship", pair)


def test_calls_that_a_fine_tuned_model_refuses(vocabulary: list[str], tmp_path: Path):
    checkpoint = sources.write_checkpoint(tmp_path / "before", vocabulary, num_hidden_layers=1)
    for kind in ("classify", "choose"):
        sources.write_fine_tuned(tmp_path / kind, checkpoint, kind, RECORDS[kind][0], size=2)
    pairs, choice = (bert_jax.load(str(tmp_path / kind)) for kind in ("classify", "choose"))
    for model, text, pair, message in (
        (pairs, "a", None, "got 1 text"),
        (pairs, ["a", "b"], ["c", None], "got 1 text"),
        (pairs, [("a", "b")], None, "text="),
        (pairs, "a", 5, "text=5"),
        (choice, "a", ["b", 5], "text=5"),
        (choice, "a", "b", "endings"),
    ):
        with pytest.raises(InputError, match=message):
            model.predict(text, pair)
    assert len(pairs.predict(["a", "b"], ["c", "d"])) == 2
    ((first, second),) = (entry["probabilities"] for entry in choice.predict("a", ["b", "c"]))
    assert first + second == pytest.approx(1, abs=1e-5)


def test_calls_that_fill_mask_refuses(bert: bert_jax.PreTrained):
    for text, top, message in ((["a [MASK]"], 5, "text="), ("a", 5, r"\[MASK\]"), ("[MASK]", 0, "top=0")):
        with pytest.raises(InputError, match=message):
            bert.fill_mask(text, top)


def test_each_mask_is_filled_on_its_own(bert: bert_jax.PreTrained):
    text = "the [MASK] sees the [MASK] ."
    logits, _ = jax.jit(lambda batch: bert.model(batch))(bert.batch(text))
    found = bert.fill_mask(text, top=3)
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
@pytest.mark.parametrize("pool", ["mean", "cls"])
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
