"""`bert-jax inspect`: its numbers against the dataset's own, and what a person sees."""

import json
from pathlib import Path

import numpy as np
import pytest

from bert_jax import cli
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.inspection import inspect_dataset, render


def test_numbers(dataset_dir: Path):
    report = inspect_dataset(str(dataset_dir), samples=5)
    dataset = PreparedDataset(str(dataset_dir))
    rows = dataset.instances("train", np.arange(dataset.size("train")))
    lengths = rows["sequence_ids"].sum(axis=1)
    train = report["splits"]["train"]
    assert train["instances"] == len(lengths) == sum(train["lengths"].values())
    assert train["lengths"]["57-64"] == (lengths > 56).sum()
    assert train["lengths"]["1-8"] == (lengths <= 8).sum()
    assert train["mean_length"] == pytest.approx(lengths.mean())
    assert train["padding_share"] == pytest.approx(1 - lengths.mean() / 64)
    assert train["packed_padding_share"] < train["padding_share"] / 2
    assert train["random_next_share"] == pytest.approx(rows["is_random_next"].mean())
    assert report["unk_rate"] == 0
    assert len(report["samples"]) == 5
    for sample in report["samples"]:
        assert sample["text"].count(">") == sample["predictions"]
        assert sample["text"].count("[CLS]") == 1
    assert [sample["text"] for sample in inspect_dataset(str(dataset_dir), samples=5, seed=1)["samples"]] != [
        sample["text"] for sample in report["samples"]
    ]


def test_unknown_words_are_told(tmp_path: Path, vocabulary_file: Path):
    import helpers

    (tmp_path / "text.txt").write_text("the ship Ω .\n\n" * 40)
    helpers.prepare_dataset(tmp_path / "text.txt", vocabulary_file, tmp_path / "data", eval_fraction=0.0)
    assert inspect_dataset(str(tmp_path / "data"))["unk_rate"] == pytest.approx(1 / 4)
    assert "[UNK] 25.000% of tokens" in render(inspect_dataset(str(tmp_path / "data")))


def test_command(dataset_dir: Path, capsys: pytest.CaptureFixture):
    assert cli.main(["inspect", str(dataset_dir), "--samples", "1"]) == 0
    text = capsys.readouterr().out
    assert "with a random B" in text
    assert ">[MASK]}" in text
    assert max(map(len, text.split("\n")[1:-2])) < 100  # but for the path and the instance
    assert cli.main(["inspect", str(dataset_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seq_len"] == 64
    assert cli.main(["inspect", str(dataset_dir), "--samples", "-1"]) == 2
    assert cli.main(["inspect", str(dataset_dir.parent)]) == 2
    assert "not a prepared dataset" in capsys.readouterr().err
