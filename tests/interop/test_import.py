"""Folders that `transformers` has written, read: the same numbers come out of both, and the same files go back."""

import json
import logging
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import sources

import bert_jax
from bert_jax.interop import huggingface
from bert_jax.interop.importing import import_checkpoint
from bert_jax.model.bert import HEADS
from bert_jax.training.checkpoints import Checkpoint

torch = pytest.importorskip("torch", reason="needs the parity extra: torch and transformers")
transformers = pytest.importorskip("transformers", reason="needs the parity extra: torch and transformers")

TEXTS = ["the ship sees the [MASK] .", "a little storm near the harbour .", "the Ówl"]
PAIRS = ["the moon hears a ghost .", "star .", "the old clock and the baker of the market ."]


def save_torch(folder: Path, vocabulary: list[str], architecture: str, *, dtype=None, shards: str = "", **fields):
    """A random model saved by `transformers`, and in memory; no bias is zero, no LayerNorm one."""
    fields = {"is_decoder": architecture == "BertLMHeadModel", **fields}
    config = transformers.BertConfig(vocab_size=len(vocabulary), **sources.SIZES, **fields)
    torch.manual_seed(0)
    options = {"add_pooling_layer": False} if architecture == "BertModel without pooler" else {}
    model = getattr(transformers, architecture.split()[0])(config, **options).to(dtype or torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    model.save_pretrained(folder, **({"max_shard_size": shards} if shards else {}))
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    sources.edit_json(folder / "tokenizer_config.json", do_lower_case=True)
    return model.eval()


def imported(folder: Path, name: str = "imported", **options) -> Checkpoint:
    return import_checkpoint(str(folder), str(folder.with_name(name)), **options)


ARCHITECTURES = {
    "BertForPreTraining": HEADS,
    "BertForMaskedLM": ("mlm_head",),
    "BertLMHeadModel": ("mlm_head",),
    "BertForNextSentencePrediction": ("pooler", "nsp_head"),
    "BertModel": ("pooler",),
    "BertModel without pooler": (),
}


@pytest.mark.parametrize(
    ("architecture", "hidden_act"),
    [
        *((architecture, "gelu") for architecture in ARCHITECTURES),
        ("BertForPreTraining", "gelu_new"),
        *(pytest.param(name, "gelu_new", marks=pytest.mark.long) for name in list(ARCHITECTURES)[1:]),
    ],
)
def test_the_same_numbers_as_torch(architecture: str, hidden_act: str, vocabulary: list[str], tmp_path: Path):
    model = save_torch(tmp_path / "hf", vocabulary, architecture, hidden_act=hidden_act, layer_norm_eps=1e-2)
    checkpoint = imported(tmp_path / "hf")
    assert checkpoint.heads == ARCHITECTURES[architecture]
    assert checkpoint.bert_config.is_decoder == (architecture == "BertLMHeadModel")
    bert = bert_jax.load(str(tmp_path / "imported"))
    assert bert.config.hidden_act == hidden_act
    batch = bert.batch(TEXTS, PAIRS)
    (_, hidden), (mlm_logits, nsp_logits) = jax.jit(
        lambda batch: (bert.model.encode(batch, all_hidden_states=True), bert.model(batch))
    )(batch)

    tokenizer = transformers.BertTokenizer.from_pretrained(tmp_path / "hf")
    encoded = tokenizer(TEXTS, PAIRS, return_tensors="pt", padding=True)
    np.testing.assert_array_equal(batch["input_ids"], encoded["input_ids"])
    np.testing.assert_array_equal(batch["token_type_ids"], encoded["token_type_ids"])
    np.testing.assert_array_equal(batch["sequence_ids"], encoded["attention_mask"])
    with torch.no_grad():
        expected = model(**encoded, output_hidden_states=True)
    real = encoded["attention_mask"].numpy().astype(bool)  # what is computed for padding means nothing
    assert not real.all()
    for ours, theirs in zip(hidden, expected.hidden_states, strict=True):
        np.testing.assert_allclose(ours[real], theirs.numpy()[real], atol=2e-5)
    if "mlm_head" in checkpoint.heads:
        logits = expected.prediction_logits if "nsp_head" in checkpoint.heads else expected.logits
        np.testing.assert_allclose(mlm_logits[real][:, : len(vocabulary)], logits.numpy()[real], atol=1e-4)
        assert np.isneginf(mlm_logits[..., len(vocabulary) :]).all()
    if "nsp_head" in checkpoint.heads:
        logits = expected.seq_relationship_logits if "mlm_head" in checkpoint.heads else expected.logits
        np.testing.assert_allclose(nsp_logits[:, 0], logits, atol=1e-4)
    if checkpoint.heads == ("pooler",):
        pooled = bert.model.pooler(hidden[-1], batch["cls_positions"])
        np.testing.assert_allclose(pooled[:, 0], expected.pooler_output, atol=1e-4)
    assert (mlm_logits is None) == ("mlm_head" not in checkpoint.heads)
    assert (nsp_logits is None) == ("nsp_head" not in checkpoint.heads)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_exported_again_it_is_what_it_was(architecture: str, vocabulary: list[str], tmp_path: Path):
    save_torch(tmp_path / "hf", vocabulary, architecture)
    name = architecture.split()[0]
    assert huggingface.export(imported(tmp_path / "hf"), str(tmp_path / "again")) == name
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "again"))
    assert before.keys() == after.keys()
    for weight, value in before.items():
        assert (value.dtype, value.shape, value.tobytes()) == (
            after[weight].dtype, after[weight].shape, after[weight].tobytes()
        ), weight  # fmt: skip
    described = json.loads((tmp_path / "again" / "config.json").read_text())
    assert described["architectures"] == [name]
    original = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert {key: original[key] for key in described if key in original} == described
    options = {"add_pooling_layer": False} if architecture == "BertModel without pooler" else {}
    _, info = getattr(transformers, name).from_pretrained(tmp_path / "again", output_loading_info=True, **options)
    assert not any(info.values()), info


def test_shards_are_one_model(vocabulary: list[str], tmp_path: Path):
    save_torch(tmp_path / "whole", vocabulary, "BertForPreTraining")
    save_torch(tmp_path / "shards", vocabulary, "BertForPreTraining", shards="50KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, shards = imported(tmp_path / "whole", "a"), imported(tmp_path / "shards", "b")
    sources.assert_same_parameters(whole.load_parameters(), shards.load_parameters())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_read_as_what_it_is(dtype: str, vocabulary: list[str], tmp_path: Path):
    model = save_torch(tmp_path / "hf", vocabulary, "BertForPreTraining", dtype=getattr(torch, dtype))
    huggingface.export(imported(tmp_path / "hf"), str(tmp_path / "again"))
    weights = sources.weights_of(tmp_path / "again")
    for name, value in model.state_dict().items():
        if name in weights:
            np.testing.assert_array_equal(weights[name], value.float().numpy())


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_tokenizer_as_transformers_saves_it(lowercase: bool, vocabulary: list[str], tmp_path: Path):
    save_torch(tmp_path / "hf", vocabulary, "BertModel")
    tokenizer = transformers.BertTokenizer(vocab=str(tmp_path / "hf" / "vocab.txt"), do_lower_case=lowercase)
    for name in ("vocab.txt", "tokenizer_config.json"):
        (tmp_path / "hf" / name).unlink()
    tokenizer.save_pretrained(tmp_path / "hf")
    assert not (tmp_path / "hf" / "vocab.txt").exists()
    checkpoint = imported(tmp_path / "hf")
    assert checkpoint.tokenizer.vocab == tuple(vocabulary)
    assert checkpoint.tokenizer.lowercase is lowercase
    for text, pair in zip(TEXTS, PAIRS, strict=True):
        encoded = tokenizer(text, pair)
        assert (encoded["input_ids"], encoded["token_type_ids"]) == checkpoint.tokenizer.encode_with_special_tokens(
            text, pair
        )
    (tmp_path / "hf" / "tokenizer_config.json").unlink()  # tokenizer.json alone says it too
    assert imported(tmp_path / "hf", "b").tokenizer.lowercase is lowercase


def test_a_masked_lm_folder_that_holds_all_heads(vocabulary: list[str], tmp_path: Path):
    """The first released models are like this: their config names BertForMaskedLM."""
    save_torch(tmp_path / "hf", vocabulary, "BertForPreTraining")
    sources.edit_json(tmp_path / "hf" / "config.json", architectures=["BertForMaskedLM"])
    assert imported(tmp_path / "hf").heads == HEADS


def test_without_a_head_pooler_and_masked_lm_go_out_as_masked_lm(
    vocabulary: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging.getLogger("bert_jax"), "propagate", True)  # whatever a command has set
    checkpoint = sources.write_checkpoint(tmp_path / "checkpoint", vocabulary, ("pooler", "mlm_head"))
    huggingface.export(checkpoint, str(tmp_path / "hf"))
    assert re.search(r"BertForMaskedLM\b.*\bpooler", caplog.text)
    _, info = transformers.BertForMaskedLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values()), info
