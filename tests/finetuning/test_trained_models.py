"""Fine-tuned checkpoints of every kind of task: predictions for unlabelled files, scores, and use in Python."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import sources

import bert_jax
from bert_jax.errors import InputError
from bert_jax.finetuning.fine_tuned import evaluate_finetuned, predict
from bert_jax.training.checkpoints import open_checkpoint


@pytest.fixture(scope="module")
def models(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A checkpoint of each record, with random values."""
    before, folder = open_checkpoint(str(checkpoint)), tmp_path_factory.mktemp("models")
    return {kind: str(sources.write_fine_tuned(folder / kind, before, kind).path) for kind in sources.RECORDS}


def said(model: str, folder: Path, name: str, content: str, **options: Any) -> list[dict]:
    (folder / name).write_text(content)
    count = predict(open_checkpoint(model), str(folder / name), str(folder / "said.jsonl"), **options)
    lines = [json.loads(line) for line in (folder / "said.jsonl").read_text().splitlines()]
    assert len(lines) == count
    return lines


def test_a_tagger_reads_columns_and_rows_alike(models: dict[str, str], tmp_path: Path):
    words = ["the", "old", "ship", "sees", "a", "storm", "."]
    text = " ".join(words)
    (expected,) = said(models["tag"], tmp_path, "a.conll", "\n".join(words))
    assert (expected["id"], expected["words"]) == ("1", words)
    assert {*expected["prediction"]} <= {"O", "B-SEA", "I-SEA"}
    for name, content, columns in (
        ("test.txt", "".join(f"{word} DT O\n" for word in words), ()),
        ("words.tsv", "".join(f"{word}\tO\n" for word in words), ()),
        ("row.tsv", f"no\tbody\nx\t{text}\n", ("body",)),
    ):  # fmt: skip
        assert said(models["tag"], tmp_path, name, content, texts=columns) == [expected], name
    assert bert_jax.load(models["tag"]).predict(text) == [{key: expected[key] for key in ("words", "prediction")}]


def test_a_tagger_reads_one_text_and_needs_tags_to_be_scored(models: dict[str, str], tmp_path: Path):
    pair = json.dumps({"sentence1": "the ship", "sentence2": "the fox"})
    for texts in ((), ("sentence1", "sentence2")):
        with pytest.raises(InputError, match=r"--text"):
            said(models["tag"], tmp_path, "a.jsonl", pair, texts=texts)
    (tmp_path / "dev.conll").write_text("the O\nship\n")
    with pytest.raises(InputError, match=r"dev\.conll:1: .*'ship'"):
        evaluate_finetuned(open_checkpoint(models["tag"]), str(tmp_path / "dev.conll"))
    (tmp_path / "dev.conll").write_text("the O\nship B-SEA\n")
    (tmp_path / "test.conll").write_text("the\n")
    rows = evaluate_finetuned(open_checkpoint(models["tag"]), str(tmp_path))["rows"]
    assert rows == {"dev": {"scored": 1, "left_out": 0}}


def test_endings_without_a_label_are_chosen_from(models: dict[str, str], tmp_path: Path):
    row = {"context": "the ship", "endings": ["sees a wave .", "hears the owl ."]}
    (one,) = said(models["choose"], tmp_path, "a.jsonl", json.dumps(row))
    assert one["prediction"] == int(np.argmax(one["probabilities"]))
    assert sum(one["probabilities"]) == pytest.approx(1, abs=1e-5)
    loaded = bert_jax.load(models["choose"])
    assert loaded.predict(row["context"], row["endings"]) == [
        {"prediction": one["prediction"], "probabilities": pytest.approx(one["probabilities"], abs=1e-5)}
    ]
    for bad in ({**row, "endings": ["a", "b", "c"]}, {**row, "label": None}):
        (tmp_path / "bad.jsonl").write_text(json.dumps(bad))
        with pytest.raises(InputError, match=r"bad\.jsonl"):
            evaluate_finetuned(open_checkpoint(models["choose"]), str(tmp_path / "bad.jsonl"))
    with pytest.raises(InputError, match=r"\b2 endings.* 3\b"):
        loaded.predict("the ship", ["a", "b", "c"])


def test_a_paragraph_answers_in_python(models: dict[str, str]):
    loaded = bert_jax.load(models["span"])
    context = "the old fox sees a ship near the island ."
    (one,) = loaded.predict("the ship ?", context)
    assert one["prediction"]
    assert one["prediction"] in context
    batch = loaded.batch("the ship ?", context)
    assert loaded.model(batch).shape == (1, batch["input_ids"].shape[1], 2)
    with pytest.raises(InputError, match="pair"):
        loaded.predict("the ship ?")
