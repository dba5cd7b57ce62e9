"""Fine-tuned models of `transformers`, read: the outputs of torch, and predictions with the names of labels."""

import json
import logging
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from support import sources

import bert_jax
from bert_jax import cli
from bert_jax.errors import InputError
from bert_jax.extras import install_hint
from bert_jax.interop import huggingface
from bert_jax.interop.importing import import_checkpoint
from bert_jax.training.checkpoints import Checkpoint

torch = pytest.importorskip("torch", reason="needs the parity extra: torch and transformers")
transformers = pytest.importorskip("transformers", reason="needs the parity extra: torch and transformers")

TEXTS = ["the ship sees the moon .", "a little storm near the harbour .", "the old clock"]
PAIRS = ["the moon hears a ghost .", "star .", "the old clock and the baker of the market ."]
LABELS = {"classify": ["bad", "fair", "good"], "tag": ["O", "B-PER", "I-PER"]}
ARCHITECTURES = {
    "classify": "BertForSequenceClassification",
    "regress": "BertForSequenceClassification",
    "choose": "BertForMultipleChoice",
    "span": "BertForQuestionAnswering",
    "tag": "BertForTokenClassification",
}


def save_torch(folder: Path, vocabulary: list[str], kind: str, **fields: object):
    """Saves a random fine-tuned model, and returns it."""
    names = LABELS.get(kind)
    labels = {"id2label": dict(enumerate(names))} if names else {"num_labels": 1} if kind == "regress" else {}
    config = transformers.BertConfig(vocab_size=len(vocabulary), **sources.SIZES, **{**labels, **fields})
    torch.manual_seed(0)
    model = getattr(transformers, ARCHITECTURES[kind])(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    transformers.BertTokenizer(vocab={piece: number for number, piece in enumerate(vocabulary)}).save_pretrained(folder)
    return model.eval()


def imported(folder: Path, name: str = "imported", **options) -> Checkpoint:
    return import_checkpoint(str(folder), str(folder.with_name(name)), **options)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_outputs_are_those_of_torch(kind: str, vocabulary: list[str], tmp_path: Path):
    model = save_torch(tmp_path / "hf", vocabulary, kind)
    checkpoint = imported(tmp_path / "hf")
    assert checkpoint.task is not None
    assert checkpoint.task["kind"] == kind
    assert checkpoint.task["max_seq_len"] == 64
    assert checkpoint.heads == (() if kind in ("span", "tag") else ("pooler",))
    loaded = bert_jax.load(str(checkpoint.path))
    batch = loaded.batch(TEXTS, PAIRS)
    outputs = np.asarray(jax.jit(lambda batch: loaded.model(batch))(batch))
    inputs = {"input_ids": "input_ids", "token_type_ids": "token_type_ids", "attention_mask": "sequence_ids"}
    given = {name: torch.tensor(np.asarray(batch[ours])).long() for name, ours in inputs.items()}
    if kind == "choose":
        given = {name: value[None] for name, value in given.items()}
    with torch.no_grad():
        expected = model(**given)
    real = np.asarray(batch["sequence_ids"]) > 0
    if kind == "span":
        theirs = np.stack([expected.start_logits, expected.end_logits], axis=-1)
        np.testing.assert_allclose(outputs[real], theirs[real], atol=1e-4)
    elif kind == "tag":
        np.testing.assert_allclose(outputs[real], expected.logits.numpy()[real], atol=1e-4)
    else:
        np.testing.assert_allclose(outputs, expected.logits.numpy().reshape(outputs.shape), atol=1e-4)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_exported_again_the_weights_are_the_same(kind: str, vocabulary: list[str], tmp_path: Path):
    save_torch(tmp_path / "hf", vocabulary, kind)
    checkpoint = imported(tmp_path / "hf")
    assert huggingface.export(checkpoint, str(tmp_path / "again")) == ARCHITECTURES[kind]
    before, after = (sources.weights_of(tmp_path / name) for name in ("hf", "again"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name], name)
    back = imported(tmp_path / "again", "back")
    assert (back.task, back.heads, back.bert_config) == (checkpoint.task, checkpoint.heads, checkpoint.bert_config)
    described = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "again")]
    assert kind not in LABELS or described[0]["id2label"] == described[1]["id2label"]


def test_predictions_have_the_names_of_labels(vocabulary: list[str], tmp_path: Path, capsys: pytest.CaptureFixture):
    model = save_torch(tmp_path / "hf", vocabulary, "classify")
    assert cli.main(["import", f"--source={tmp_path / 'hf'}", f"--output={tmp_path / 'imported'}"]) == 0
    assert "fine-tuned: text" in capsys.readouterr().out
    (tmp_path / "new.csv").write_text("text,label\n" + "".join(f"{text},good\n" for text in TEXTS))
    command = [f"--checkpoint={tmp_path / 'imported'}"]
    predict = ["predict", *command, f"--input={tmp_path / 'new.csv'}", f"--output={tmp_path / 'out.jsonl'}"]
    assert cli.main(predict) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        probabilities = model(**tokenizer(TEXTS, return_tensors="pt", padding=True)).logits.softmax(-1).numpy()
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for row, expected in zip(rows, probabilities, strict=True):
        assert row["prediction"] == LABELS["classify"][expected.argmax()]
        np.testing.assert_allclose([row["probabilities"][name] for name in LABELS["classify"]], expected, atol=1e-4)
    capsys.readouterr()
    assert cli.main(["evaluate", *command, f"--data={tmp_path / 'new.csv'}"]) == 0
    accuracy = json.loads(capsys.readouterr().out)["scores"]["new.csv"]["accuracy"]
    assert accuracy == pytest.approx(np.mean(probabilities.argmax(-1) == 2))


def test_a_choice_among_any_number_of_endings(vocabulary: list[str], tmp_path: Path):
    save_torch(tmp_path / "hf", vocabulary, "choose")
    model = bert_jax.load(str(imported(tmp_path / "hf").path))
    for endings in (["sees .", "hears ."], ["sees .", "hears .", "the moon ."]):
        (prediction,) = model.predict(["the ship"], [endings])
        assert len(prediction["probabilities"]) == len(endings)
    with pytest.raises(InputError, match=r"expected 2 endings.*got 3"):
        model.predict(["the ship", "the moon"], [["a", "b"], ["a", "b", "c"]])


def test_taggers_and_questions_predict(vocabulary: list[str], tmp_path: Path):
    for kind in ("tag", "span"):
        save_torch(tmp_path / kind, vocabulary, kind)
    tagger = bert_jax.load(str(imported(tmp_path / "tag", "tagger").path))
    (tags,) = tagger.predict("the ship sees the moon")
    assert len(tags["prediction"]) == len(tags["words"]) == 5
    assert {*tags["prediction"]} <= {*LABELS["tag"]}
    reader = bert_jax.load(str(imported(tmp_path / "span", "reader").path))
    (answer,) = reader.predict("the ship", "the old clock and the baker")
    assert answer["prediction"] in "the old clock and the baker"


def test_names_that_transformers_gives_by_default(vocabulary: list[str], tmp_path: Path):
    save_torch(tmp_path / "hf", vocabulary, "classify")
    sources.edit_json(tmp_path / "hf" / "config.json", id2label=None, label2id=None)
    checkpoint = imported(tmp_path / "hf")
    assert checkpoint.task is not None
    assert checkpoint.task["classes"] == ["LABEL_0", "LABEL_1", "LABEL_2"]


def test_the_longest_text_is_that_of_the_tokenizer(vocabulary: list[str], tmp_path: Path):
    save_torch(tmp_path / "hf", vocabulary, "classify")
    sources.edit_json(tmp_path / "hf" / "tokenizer_config.json", model_max_length=24)
    checkpoint = imported(tmp_path / "hf")
    assert checkpoint.task is not None
    assert checkpoint.task["max_seq_len"] == 24


def test_several_labels_of_a_text_leave_the_encoder(
    vocabulary: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging.getLogger("bert_jax"), "propagate", True)  # whatever a command has set
    save_torch(tmp_path / "hf", vocabulary, "classify", problem_type="multi_label_classification")
    checkpoint = imported(tmp_path / "hf")
    assert (checkpoint.task, checkpoint.heads) == (None, ("pooler",))
    assert "problem_type=multi_label_classification" in caplog.text


def test_poolers_of_old_taggers_are_dropped(vocabulary: list[str], tmp_path: Path):
    save_torch(tmp_path / "hf", vocabulary, "tag")
    pooler = {"bert.pooler.dense.weight": np.ones((48, 48)), "bert.pooler.dense.bias": np.ones(48)}
    sources.edit_weights(
        tmp_path / "hf", lambda weights: weights.update({k: v.astype(np.float32) for k, v in pooler.items()})
    )
    checkpoint = imported(tmp_path / "hf")
    assert "pooler" not in checkpoint.load_parameters()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, r"config\.json: id2label=.*0 to 2"),
        ({"id2label": {"0": "a", "1": "b", "2": "a"}}, r"config\.json: id2label="),
        ({"id2label": ["a", "b", "c"]}, r"config\.json: id2label="),
        ({"bert_jax_task": {"kind": "tag"}}, r"config\.json: bert_jax_task "),
        ({"bert_jax_task": 5}, r"config\.json: bert_jax_task "),
        ({"architectures": ["BertForQuestionAnswering"]}, r"BertForQuestionAnswering.*qa_outputs\.weight"),
        ({"architectures": ["BertForPreTraining"]}, r"missing: cls\."),
        ({"hidden_size": 24}, r"classifier\.weight \[3, 48\].*\[N, 24\]"),
    ],
)
def test_configs_that_do_not_match_the_output(fields: dict, message: str, vocabulary: list[str], tmp_path: Path):
    save_torch(tmp_path / "hf", vocabulary, "classify")
    sources.edit_json(tmp_path / "hf" / "config.json", **fields)
    with pytest.raises(InputError, match=message):
        imported(tmp_path / "hf")
    assert not (tmp_path / "imported").exists()


# --- Pickles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2])
def test_weights_that_torch_pickled(shards: int, vocabulary: list[str], tmp_path: Path):
    model = save_torch(tmp_path / "hf", vocabulary, "classify")
    whole = imported(tmp_path / "hf", "whole")
    (tmp_path / "hf" / "model.safetensors").unlink()
    weights = model.half().state_dict() if shards == 1 else model.state_dict()
    if shards == 1:
        torch.save(weights, tmp_path / "hf" / "pytorch_model.bin")
    else:
        files = {name: f"pytorch_model-0000{number % 2 + 1}-of-00002.bin" for number, name in enumerate(weights)}
        for file in set(files.values()):
            torch.save({name: weights[name] for name in weights if files[name] == file}, tmp_path / "hf" / file)
        sources.edit_json(tmp_path / "hf" / "pytorch_model.bin.index.json", weight_map=files)
    parameters = imported(tmp_path / "hf").load_parameters(parts=("embeddings", "pooler"))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3 if shards == 1 else 0),
        parameters, whole.load_parameters(parts=("embeddings", "pooler")),
    )  # fmt: skip


@pytest.mark.parametrize("content", [{"a": "text"}, [1, 2], {"model": {"x": torch.ones(1)}}])
def test_pickles_of_anything_else(content: object, vocabulary: list[str], tmp_path: Path):
    save_torch(tmp_path / "hf", vocabulary, "classify")
    (tmp_path / "hf" / "model.safetensors").unlink()
    torch.save(content, tmp_path / "hf" / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin: "):
        imported(tmp_path / "hf")


def test_a_pickle_without_torch_names_the_extra(vocabulary: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_torch(tmp_path / "hf", vocabulary, "classify")
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "hf" / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match=rf"pytorch_model\.bin.*{re.escape(install_hint('parity'))}"):
        imported(tmp_path / "hf")
