"""`bert-jax inspect`: its numbers compared with the dataset, and its output."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from bert_jax import cli
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.inspection import inspect_dataset, render
from bert_jax.data.loading.loader import TrainRows
from bert_jax.data.loading.masking import Masking, prediction_counts
from bert_jax.data.loading.packing import pack_lengths


def test_report_has_the_share_of_unknown_tokens(tmp_path: Path, vocabulary_file: Path):
    from support import helpers

    (tmp_path / "text.txt").write_text("the ship Ω sees a wave near .\n\n" * 40)
    helpers.prepare_dataset(tmp_path / "text.txt", vocabulary_file, tmp_path / "data", eval_fraction=0.0, pairs="none")
    assert "random" not in render(inspect_dataset(str(tmp_path / "data")))
    assert inspect_dataset(str(tmp_path / "data"))["unk_rate"] == pytest.approx(1 / 8)
    assert "[UNK] 12.500% of tokens" in render(inspect_dataset(str(tmp_path / "data")))


def test_command(dataset_dir: Path, capsys: pytest.CaptureFixture):
    assert cli.main(["inspect", str(dataset_dir), "--samples", "1"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"train: [0-9,]+ instances, [0-9.]+% .*; shards: [0-9]+", text)
    assert ">[MASK]}" in text
    assert max(map(len, text.split("\n")[1:-2])) < 100  # but for the path and the instance
    assert cli.main(["inspect", str(dataset_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seq_len"] == 64
    assert cli.main(["inspect", str(dataset_dir), "--samples", "-1"]) == 2
    assert cli.main(["inspect", str(dataset_dir.parent)]) == 2
    assert "dataset.json" in capsys.readouterr().err


def test_report_agrees_with_the_dataset(dataset_dir: Path):
    report, dataset = inspect_dataset(str(dataset_dir), samples=20), PreparedDataset(str(dataset_dir))
    lengths = dataset.lengths("train")
    rows = sum(count for count, _ in pack_lengths(lengths, 64, 8))
    packed = report["splits"]["train"]["packed_padding_share"]
    assert packed == pytest.approx(1 - lengths.sum() / (rows * 64), abs=1e-9)
    assert report["unused_pieces"] == (dataset.token_counts()[5:] == 0).sum()  # the special ones come first here
    batch = TrainRows(dataset, seed=0, masking=Masking(int(prediction_counts(64)))).rows(np.arange(20))
    for row, sample in enumerate(report["samples"]):
        assert sample["b_is"] == ("random" if batch["next_sentence_labels"][row, 0] else "next")
        ids = batch["input_ids"][row]
        for position, was, weight in zip(
            *(batch[f"masked_{name}"][row] for name in ("positions", "ids", "weights")), strict=True
        ):
            pieces = [dataset.tokenizer.id_to_token(int(token)) for token in (was, ids[position])]
            assert not weight or f"{{{pieces[0]}>{pieces[1]}}}" in sample["text"]
    assert {sample["b_is"] for sample in report["samples"]} == {"random", "next"}
