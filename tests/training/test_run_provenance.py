"""Provenance of each folder on the way from text to an exported model."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from support import helpers
from support.devices import one_device  # noqa: F401

import bert_jax
from bert_jax.cli import main
from bert_jax.training.checkpoints import open_checkpoint

KEYS = {"time", "software", "inputs"}


@pytest.fixture(scope="module")
def workdir(dataset_dir: Path, tmp_path_factory: pytest.TempPathFactory, one_device: None) -> Path:  # noqa: F811
    """A run of two steps that was resumed for two more."""
    folder = tmp_path_factory.mktemp("runs") / "base"
    for steps in (2, 4):
        config = helpers.small_config(
            dataset_dir, model__num_hidden_layers=1, total_steps=steps, optimizer__warmup_steps=1, eval_batches=0,
            checkpoint__every_steps=2,
        )  # fmt: skip
        bert_jax.pretrain(config, str(folder))
    return folder


def runs(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "provenance.json").read_text())["runs"]


def item(step: Path) -> dict[str, Any]:
    """The record in a checkpoint."""
    return json.loads((step / "provenance" / "metadata").read_text())


def test_a_dataset_names_its_corpus_and_vocabulary(dataset_dir: Path, corpus_file: Path, vocabulary_file: Path):
    (entry,) = runs(dataset_dir)
    assert set(entry) == {*KEYS, "dataset_hash"}
    dataset = bert_jax.PreparedDataset(str(dataset_dir))
    assert entry["dataset_hash"] == dataset.info.hash
    assert entry["inputs"]["vocabulary"] == {"sha256": dataset.tokenizer.sha256}
    corpus, size = entry["inputs"]["corpus"], corpus_file.stat().st_size
    assert (corpus["count"], corpus["bytes"]) == (1, size)
    (file,) = corpus["files"]
    assert (file["path"], file["bytes"]) == (str(corpus_file), size)


def test_a_resumed_run_has_an_entry_for_each_start(workdir: Path, dataset_dir: Path):
    first, second = runs(workdir)
    assert set(first) == {*KEYS, "devices", "start_step"}
    assert (first["start_step"], second["start_step"]) == (0, 2)
    dataset = {"path": str(dataset_dir), "hash": bert_jax.PreparedDataset(str(dataset_dir)).info.hash}
    assert first["inputs"]["datasets"] == [dataset]
    assert first["devices"]["count"] == jax.device_count()
    assert item(workdir / "checkpoints" / "2") == first
    assert item(workdir / "checkpoints" / "4") == second


def test_an_export_and_an_import_name_their_sources(workdir: Path, tmp_path: Path):
    assert main(["export", "--checkpoint", str(workdir), "--output", str(tmp_path / "hf")]) == 0
    (entry,) = runs(tmp_path / "hf")
    source = open_checkpoint(str(workdir)).reference()
    assert entry["inputs"] == {"checkpoint": source}
    assert source["path"] == str(workdir / "checkpoints" / "4")
    assert source["step"] == 4
    earlier = open_checkpoint(str(workdir / "checkpoints" / "2")).reference()
    assert len(source["digest"]) == 64
    assert source["digest"] != earlier["digest"]
    assert main(["import", "--source", str(tmp_path / "hf"), "--output", str(tmp_path / "imported")]) == 0
    imported = item(tmp_path / "imported")["inputs"]["source"]
    assert imported["path"] == str(tmp_path / "hf")


def test_a_fine_tuning_names_its_encoder_and_examples(workdir: Path, tmp_path: Path):
    (tmp_path / "train.csv").write_text("text,label\n" + "the ship .,sea\nthe owl .,night\n" * 8)
    overrides = {
        "init": workdir, "data.path": tmp_path, "task.train": "train.csv", "task.max_seq_len": 16, "num_epochs": 1,
        "global_batch_size": 8,
    }  # fmt: skip
    bert_jax.finetune(
        bert_jax.load_config("finetune/text", overrides, kind=bert_jax.FinetuneConfig), str(tmp_path / "r")
    )
    (entry,) = runs(tmp_path / "r")
    assert entry["inputs"]["init"] == open_checkpoint(str(workdir)).reference()
    task = entry["inputs"]["task"]
    assert (task["name"], task["path"], task["files"]) == ("text", str(tmp_path), {"train": "train.csv"})
    assert len(task["hash"]) == 16
