"""Folders that `transformers` has written, read: the same numbers come out of both, and the same files go back."""

import json
import logging
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import helpers, sources
from support.torch_models import require_torch, save_torch, torch_outputs

import bert_jax
from bert_jax import cli
from bert_jax.errors import InputError, install_hint
from bert_jax.finetuning.tasks.text import GlueTask
from bert_jax.interop import huggingface
from bert_jax.interop.importing import import_checkpoint
from bert_jax.model.bert import HEADS
from bert_jax.training.checkpoints import Checkpoint, open_checkpoint

torch, transformers = require_torch()

TEXTS = ["the ship sees the [MASK] .", "a little storm near the harbour .", "the Ówl"]
PAIRS = ["the moon hears a ghost .", "star .", "the old clock and the baker of the market ."]
PRE_TRAINED = {
    "BertForPreTraining": HEADS,
    "BertForMaskedLM": ("mlm_head",),
    "BertLMHeadModel": ("mlm_head",),
    "BertForNextSentencePrediction": ("pooler", "nsp_head"),
    "BertModel": ("pooler",),
    "BertModel without pooler": (),
}
FINE_TUNED = {
    "BertForSequenceClassification": "classify",
    "regression": "regress",
    "BertForMultipleChoice": "choose",
    "BertForQuestionAnswering": "span",
    "BertForTokenClassification": "tag",
}


def imported(folder: Path, name: str = "imported", **options) -> Checkpoint:
    return import_checkpoint(str(folder), str(folder.with_name(name)), **options)


def assert_close(ours, theirs) -> None:
    theirs = theirs.numpy()
    assert np.abs(np.asarray(ours) - theirs).max() <= 1e-6 * max(1, np.abs(theirs).max())


@pytest.mark.parametrize(
    ("architecture", "hidden_act"),
    [
        *((architecture, "gelu") for architecture in PRE_TRAINED),
        ("BertForPreTraining", "gelu_new"),
        *(pytest.param(name, "gelu_new", marks=pytest.mark.long) for name in list(PRE_TRAINED)[1:]),
    ],
)
def test_the_same_numbers_as_torch(architecture: str, hidden_act: str, vocabulary: list[str], tmp_path: Path):
    model = save_torch(tmp_path / "hf", vocabulary, architecture, hidden_act=hidden_act, layer_norm_eps=1e-2)
    checkpoint = imported(tmp_path / "hf")
    assert checkpoint.heads == PRE_TRAINED[architecture]
    assert checkpoint.bert_config.is_decoder == (architecture == "BertLMHeadModel")
    bert = bert_jax.load(str(tmp_path / "imported"))
    assert bert.config.hidden_act == hidden_act
    batch = bert.batch(TEXTS, PAIRS)
    (_, hidden), (mlm_logits, nsp_logits) = jax.jit(
        lambda batch: (bert.model.encode(batch, all_hidden_states=True), bert.model(batch))
    )(batch)

    encoded = transformers.BertTokenizer.from_pretrained(tmp_path / "hf")(TEXTS, PAIRS, padding=True)
    for ours, theirs in (("input_ids", "input_ids"), ("token_type_ids",) * 2, ("sequence_ids", "attention_mask")):
        np.testing.assert_array_equal(batch[ours], encoded[theirs])
    expected = torch_outputs(model, batch)
    real = np.asarray(batch["sequence_ids"]) > 0  # what is computed for padding means nothing
    assert not real.all()
    for ours, theirs in zip(hidden, expected.hidden_states, strict=True):
        assert_close(ours[real], theirs[real])
    if "mlm_head" in checkpoint.heads:
        logits = expected.prediction_logits if "nsp_head" in checkpoint.heads else expected.logits
        assert_close(mlm_logits[real][:, : len(vocabulary)], logits[real])
        assert np.isneginf(mlm_logits[..., len(vocabulary) :]).all()
    if "nsp_head" in checkpoint.heads:
        assert_close(
            nsp_logits[:, 0], expected.seq_relationship_logits if "mlm_head" in checkpoint.heads else expected.logits
        )
    if checkpoint.heads == ("pooler",):
        assert_close(bert.model.pooler(hidden[-1], batch["cls_positions"])[:, 0], expected.pooler_output)
    assert (mlm_logits is None) == ("mlm_head" not in checkpoint.heads)
    assert (nsp_logits is None) == ("nsp_head" not in checkpoint.heads)


@pytest.mark.parametrize("architecture", FINE_TUNED)
def test_outputs_of_fine_tuned_models_are_those_of_torch(architecture: str, vocabulary: list[str], tmp_path: Path):
    model, kind = save_torch(tmp_path / "hf", vocabulary, architecture), FINE_TUNED[architecture]
    checkpoint = imported(tmp_path / "hf")
    assert checkpoint.task is not None
    assert (checkpoint.task["kind"], checkpoint.task["max_seq_len"]) == (kind, 64)
    assert checkpoint.heads == (() if kind in ("span", "tag") else ("pooler",))
    loaded = bert_jax.load(str(checkpoint.path))
    batch = loaded.batch(TEXTS, PAIRS)
    outputs = np.asarray(jax.jit(lambda batch: loaded.model(batch))(batch))
    expected, real = torch_outputs(model, batch), np.asarray(batch["sequence_ids"]) > 0
    if kind == "span":
        assert_close(outputs[real], torch.stack([expected.start_logits, expected.end_logits], -1)[real])
    elif kind == "tag":
        assert_close(outputs[real], expected.logits[real])
    else:
        assert_close(outputs, expected.logits.reshape(outputs.shape))


@pytest.mark.parametrize("architecture", ["BertForTokenClassification", "BertForQuestionAnswering"])
def test_a_pooler_that_a_model_does_not_use_is_dropped(
    architecture: str, vocabulary: list[str], tmp_path: Path, caplog
):
    save_torch(tmp_path / "hf", vocabulary, architecture)
    given = (TEXTS[:1], PAIRS[:1]) if "Question" in architecture else (TEXTS[:1],)
    expected = bert_jax.load(str(tmp_path / "hf")).predict(*given)
    pooler = {"bert.pooler.dense.weight": np.zeros((48, 48), "f4"), "bert.pooler.dense.bias": np.zeros(48, "f4")}
    sources.edit_weights(tmp_path / "hf", lambda weights: weights.update(pooler))
    assert bert_jax.load(str(tmp_path / "hf")).predict(*given) == expected
    assert "dropped bert.pooler.dense." in caplog.text


@pytest.mark.parametrize("architecture", [*PRE_TRAINED, *FINE_TUNED])
def test_exported_again_it_is_what_it_was(architecture: str, vocabulary: list[str], tmp_path: Path):
    save_torch(tmp_path / "hf", vocabulary, architecture)
    name = "BertForSequenceClassification" if architecture == "regression" else architecture.split()[0]
    first = imported(tmp_path / "hf")
    assert huggingface.export(first, str(tmp_path / "again")) == name
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "again"))
    assert before.keys() == after.keys()
    for weight, value in before.items():
        assert (value.dtype, value.shape, value.tobytes()) == (
            after[weight].dtype, after[weight].shape, after[weight].tobytes()
        ), weight  # fmt: skip
    described, original = (json.loads((tmp_path / place / "config.json").read_text()) for place in ("again", "hf"))
    named = {"id2label", "label2id"} if architecture == "regression" else set()  # the name of its output means nothing
    kept = (described.keys() & original.keys()) - named
    assert {key: original[key] for key in kept} == {key: described[key] for key in kept}
    options = {"add_pooling_layer": False} if architecture == "BertModel without pooler" else {}
    _, info = getattr(transformers, name).from_pretrained(tmp_path / "again", output_loading_info=True, **options)
    assert not any(info.values()), info
    second = imported(tmp_path / "again", "second")
    assert (second.task, second.heads, second.bert_config) == (first.task, first.heads, first.bert_config)
    huggingface.export(second, str(tmp_path / "third"))
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "third" / file).read_bytes(), file


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_tokenizer_as_transformers_saves_it(lowercase: bool, vocabulary: list[str], tmp_path: Path):
    save_torch(tmp_path / "hf", vocabulary, "BertModel")
    tokenizer = transformers.BertTokenizer(vocab=str(tmp_path / "hf" / "vocab.txt"), do_lower_case=lowercase)
    for name in ("vocab.txt", "tokenizer_config.json"):
        (tmp_path / "hf" / name).unlink()
    tokenizer.save_pretrained(tmp_path / "hf")
    assert not (tmp_path / "hf" / "vocab.txt").exists()
    ours = imported(tmp_path / "hf").tokenizer
    assert (ours.vocab, ours.lowercase) == (tuple(vocabulary), lowercase)
    for text, pair in zip(TEXTS, PAIRS, strict=True):
        encoded = tokenizer(text, pair)
        assert (encoded["input_ids"], encoded["token_type_ids"]) == ours.encode_with_special_tokens(text, pair)
    (tmp_path / "hf" / "tokenizer_config.json").unlink()  # tokenizer.json alone says it too
    assert imported(tmp_path / "hf", "b").tokenizer.lowercase is lowercase


# --- Layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [(0, 2, 3), (3,), (0, 0, 1, 1, 2, 2, 3, 3)], ids=str)
@pytest.mark.parametrize("architecture", ["BertForPreTraining", "BertForTokenClassification"])
def test_layers_are_those_of_torch(
    architecture: str, layers: tuple[int, ...], vocabulary: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    model = save_torch(tmp_path / "hf", vocabulary, architecture, num_hidden_layers=4)
    model.bert.encoder.layer = torch.nn.ModuleList([model.bert.encoder.layer[number] for number in layers])
    model.config.num_hidden_layers = len(layers)
    with caplog.at_level(logging.INFO):
        checkpoint = imported(tmp_path / "hf", layers=layers)
    dropped = [str(number) for number in range(4) if number not in layers]
    assert f"dropped: {', '.join(dropped) or 'none'}" in caplog.text
    assert checkpoint.bert_config.num_hidden_layers == len(layers)
    loaded = bert_jax.load(str(checkpoint.path))
    batch = loaded.batch(TEXTS, PAIRS)
    outputs = jax.jit(lambda batch: loaded.model(batch))(batch)
    expected, real = torch_outputs(model, batch), np.asarray(batch["sequence_ids"]) > 0
    ours = outputs[0][..., : len(vocabulary)] if architecture == "BertForPreTraining" else outputs
    assert_close(ours[real], (expected.prediction_logits if ours is not outputs else expected.logits)[real])


def test_layers_of_the_command(vocabulary: list[str], tmp_path: Path):
    save_torch(tmp_path / "hf", vocabulary, "BertModel", num_hidden_layers=3)
    command = ["import", f"--source={tmp_path / 'hf'}", f"--output={tmp_path / 'cut'}", "--layers"]
    for wrong in ("0,3", "first"):
        assert helpers.run_cli(*command, wrong).returncode == 2
    assert cli.main([*command, "0,2", "--drop", "pooler"]) == 0
    found = open_checkpoint(str(tmp_path / "cut"))
    assert (found.bert_config.num_hidden_layers, found.heads) == (2, ())


# --- Tasks -----------------------------------------------------------------------------------------------------------


def test_id2label_decides_the_names(vocabulary: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """An exported folder that `transformers` saved again for other labels has the record of the first ones."""
    before = sources.write_checkpoint(tmp_path / "before", vocabulary)
    record = {"name": "glue/mnli", "classes": [*GlueTask.of("mnli").classes], "texts": ["premise", "hypothesis"]}
    huggingface.export(
        sources.write_fine_tuned(tmp_path / "task", before, "classify", record, size=3), str(tmp_path / "hf")
    )
    assert imported(tmp_path / "hf", "same").task["name"] == "glue/mnli"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "hf", id2label={0: "politics", 1: "sports", 2: "music"}, label2id={}
    )
    model.save_pretrained(tmp_path / "hf")
    task = imported(tmp_path / "hf").task
    assert (task["classes"], task["name"]) == (["politics", "sports", "music"], "text")
    assert "texts" not in task
    assert "id2label" in caplog.text
    (prediction,) = bert_jax.load(str(tmp_path / "hf")).predict("the ship .")
    assert prediction["probabilities"].keys() == {"politics", "sports", "music"}


@pytest.mark.parametrize("name", ["glue/new", "glue/stsb", "ner", "new"])
def test_a_record_of_another_task_is_not_read(
    name: str, vocabulary: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    save_torch(tmp_path / "hf", vocabulary, "BertForSequenceClassification")
    sources.edit_json(tmp_path / "hf" / "config.json", bert_jax_task={"name": name, "kind": "classify"})
    (prediction,) = bert_jax.load(str(tmp_path / "hf")).predict("the ship .")
    assert len(prediction["probabilities"]) == 3
    assert "not read" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, r"config\.json: id2label=.*0 to 2"),
        ({"id2label": {"0": "a", "1": "b", "2": "a"}}, r"config\.json: id2label="),
        ({"id2label": ["a", "b", "c"]}, r"config\.json: id2label="),
        ({"architectures": ["BertForQuestionAnswering"]}, r"BertForQuestionAnswering.*qa_outputs\.weight"),
        ({"architectures": ["BertForMultipleChoice"]}, r"classifier\.bias \[3\].*\[1\]"),
        ({"architectures": ["BertForPreTraining"]}, r"missing: cls\..*unexpected: classifier\."),
        ({"hidden_size": 24}, r"wrong shape: .*\[103, 48\], expected \[103, 24\]"),
        ({"problem_type": "multi_label_classification"}, r"problem_type=multi_label.*--drop classifier"),
        ({"is_decoder": True}, r"is_decoder=True.*--drop classifier"),
    ],
)
def test_configs_that_do_not_match_the_output(fields: dict, message: str, vocabulary: list[str], tmp_path: Path):
    save_torch(tmp_path / "hf", vocabulary, "BertForSequenceClassification")
    sources.edit_json(tmp_path / "hf" / "config.json", **fields)
    with pytest.raises(InputError, match=message):
        imported(tmp_path / "hf")
    assert not (tmp_path / "imported").exists()


# --- Unused weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["BertForPreTraining", *FINE_TUNED])
def test_unused_weights_are_refused_unless_they_are_dropped(
    architecture: str, vocabulary: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    save_torch(tmp_path / "hf", vocabulary, architecture)
    expected = imported(tmp_path / "hf", "before").load_parameters(parts=("encoder",))
    more = {"crf.transitions": np.ones((3, 3), np.float32), "hidden.weight": np.ones((48, 48), np.float32)}
    sources.edit_weights(tmp_path / "hf", lambda weights: weights.update(more))
    with pytest.raises(InputError, match=r"unexpected: crf\.transitions \[3, 3\]; hidden\.weight \[48, 48\].*--drop"):
        imported(tmp_path / "hf")
    with pytest.raises(InputError, match=r"crf\.transitions"):
        bert_jax.load(str(tmp_path / "hf"))
    with pytest.raises(InputError, match=r"drop=nothing"):
        imported(tmp_path / "hf", drop=("crf.", "hidden", "nothing"))
    with pytest.raises(InputError, match=r"drop=: "):
        imported(tmp_path / "hf", drop=("",))
    dropped = imported(tmp_path / "hf", drop=("crf.", "hidden"))
    assert "crf.transitions [3, 3]; hidden.weight [48, 48]" in caplog.text
    assert (dropped.task is None) == (architecture == "BertForPreTraining")
    sources.assert_same_parameters(dropped.load_parameters(parts=("encoder",)), expected)


def test_the_encoder_of_a_model_without_a_task_here(vocabulary: list[str], tmp_path: Path):
    fields = {"problem_type": "multi_label_classification"}
    save_torch(tmp_path / "hf", vocabulary, "BertForSequenceClassification", **fields)
    checkpoint = imported(tmp_path / "hf", drop=("classifier",))
    assert (checkpoint.task, checkpoint.heads) == (None, ("pooler",))


# --- Pickles, wrappers and single files ------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2])
def test_weights_that_torch_pickled(shards: int, vocabulary: list[str], tmp_path: Path):
    weights = save_torch(tmp_path / "hf", vocabulary, "BertForSequenceClassification").state_dict()
    whole = imported(tmp_path / "hf", "whole")
    (tmp_path / "hf" / "model.safetensors").unlink()
    if shards == 1:
        torch.save(weights, tmp_path / "hf" / "pytorch_model.bin")
    else:
        files = {name: f"pytorch_model-0000{number % 2 + 1}-of-00002.bin" for number, name in enumerate(weights)}
        for file in set(files.values()):
            torch.save({name: weights[name] for name in weights if files[name] == file}, tmp_path / "hf" / file)
        sources.edit_json(tmp_path / "hf" / "pytorch_model.bin.index.json", weight_map=files)
    parts = ("embeddings", "encoder", "pooler")
    sources.assert_same_parameters(
        imported(tmp_path / "hf").load_parameters(parts=parts), whole.load_parameters(parts=parts)
    )


def in_module(weights: dict, prefix: str) -> dict:
    return {f"{prefix}{name}": value for name, value in weights.items()}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda weights: {"model": weights, "epoch": 3, "optimizer": {"state": {}, "lr": 0.1}},
        lambda weights: {"state_dict": in_module(weights, "model."), "hyper_parameters": {"lr": 1.0}},
        lambda weights: {"model_state_dict": in_module(weights, "module.")},
        lambda weights: in_module(weights, "_orig_mod.module."),
    ],
    ids=["model", "state_dict", "model_state_dict", "module"],
)
@pytest.mark.parametrize("architecture", ["BertModel", "BertForMaskedLM", "BertForTokenClassification"])
def test_weights_that_a_trainer_wrapped(wrap, architecture: str, vocabulary: list[str], tmp_path: Path):
    weights = save_torch(tmp_path / "hf", vocabulary, architecture).state_dict()
    expected = bert_jax.load(str(tmp_path / "hf")).embed(TEXTS)
    torch.save(wrap(weights), tmp_path / "hf" / "last.ckpt")
    np.testing.assert_array_equal(bert_jax.load(str(tmp_path / "hf" / "last.ckpt")).embed(TEXTS), expected)
    (tmp_path / "hf" / "model.safetensors").unlink()
    np.testing.assert_array_equal(bert_jax.load(str(tmp_path / "hf")).embed(TEXTS), expected)


def test_a_single_file_of_safetensors(vocabulary: list[str], tmp_path: Path):
    save_torch(tmp_path / "hf", vocabulary, "BertForMaskedLM")
    whole = bert_jax.load(str(tmp_path / "hf")).embed(TEXTS)
    sources.edit_weights(tmp_path / "hf", lambda weights: [weights.update(in_module(weights, "module.")), [
        weights.pop(name) for name in [*weights] if not name.startswith("module.")]])  # fmt: skip
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "hf" / "best.safetensors")
    for place in (tmp_path / "hf", tmp_path / "hf" / "best.safetensors"):
        np.testing.assert_array_equal(bert_jax.load(str(place)).embed(TEXTS), whole)
    assert imported(tmp_path / "hf" / "best.safetensors").heads == ("mlm_head",)


WEIGHTS = {"x": torch.ones(1)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": "text"}, r"pytorch_model\.bin: "),
        ([1, 2], r"pytorch_model\.bin: "),
        ({"model": {"x": [1]}}, r"pytorch_model\.bin: "),
        ({"model": WEIGHTS, "state_dict": WEIGHTS}, r"pytorch_model\.bin: .*state_dict and model"),
        ({"a.bert.embeddings.position_embeddings.weight": WEIGHTS["x"],
          "b.bert.embeddings.position_embeddings.weight": WEIGHTS["x"]}, r"BertForMaskedLM|weights"),
    ],
)  # fmt: skip
def test_pickles_of_anything_else(content: object, message: str, vocabulary: list[str], tmp_path: Path):
    save_torch(tmp_path / "hf", vocabulary, "BertForMaskedLM")
    (tmp_path / "hf" / "model.safetensors").unlink()
    torch.save(content, tmp_path / "hf" / "pytorch_model.bin")
    with pytest.raises(InputError, match=message):
        imported(tmp_path / "hf")


def test_a_pickle_without_torch_names_the_extra(vocabulary: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_torch(tmp_path / "hf", vocabulary, "BertModel")
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "hf" / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match=rf"pytorch_model\.bin.*{re.escape(install_hint('parity'))}"):
        imported(tmp_path / "hf")
