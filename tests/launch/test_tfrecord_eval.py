"""launch/tfrecord_eval.py, on records of TFDS's message types that TensorBoard writes."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import helpers
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorflow_datasets.proto.tf_example_generated_pb2 import Example

from bert_jax.batch import HostBatch
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.loading.loader import EvalLoader

main = runpy.run_path(str(helpers.REPOSITORY / "launch" / "tfrecord_eval.py"))["main"]


def write(path: Path, batch: HostBatch, *, without: str = "") -> None:
    """Writes the masked rows of a batch as Google's create_pretraining_data.py does."""
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for row in range(len(batch["input_ids"])):
            ints = {
                "input_ids": batch["input_ids"][row], "input_mask": (batch["sequence_ids"][row] > 0).astype(int),
                "segment_ids": batch["token_type_ids"][row], "masked_lm_positions": batch["masked_positions"][row],
                "masked_lm_ids": batch["masked_ids"][row], "next_sentence_labels": batch["next_sentence_labels"][row],
            }  # fmt: skip
            example = Example()
            for key, value in ints.items():
                example.features.feature[key].int64_list.value.extend(value.tolist())
            example.features.feature["masked_lm_weights"].float_list.value.extend(batch["masked_weights"][row].tolist())
            example.features.feature.pop(without, None)
            writer.write(example.SerializeToString())


@pytest.fixture
def masked(dataset_dir: Path) -> HostBatch:
    return EvalLoader([PreparedDataset(str(dataset_dir))], batch_size=8).batch(0)


@pytest.fixture
def without_eval(tmp_path: Path, corpus_file: Path, vocabulary_file: Path) -> Path:
    helpers.prepare_dataset(corpus_file, vocabulary_file, tmp_path / "data", eval_fraction=0)
    return tmp_path / "data"


def test_the_sequences_are_those_of_the_records_unmasked(
    masked: HostBatch, dataset_dir: Path, without_eval: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    write(tmp_path / "a", {name: rows[:5] for name, rows in masked.items()})
    write(tmp_path / "b", {name: rows[5:] for name, rows in masked.items()})
    assert main([str(without_eval), str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.startswith("8 sequences")
    before, after = PreparedDataset(str(dataset_dir)), PreparedDataset(str(without_eval))
    described = json.loads((without_eval / "provenance.json").read_text())["runs"][-1]
    assert described["dataset_hash"] == after.info.hash
    assert described["inputs"] == {"eval_files": [str(tmp_path / name) for name in "ab"]}
    found, expected = (dataset.instances("eval", np.arange(8)) for dataset in (after, before))
    for name in ("input_ids", "token_type_ids", "sequence_ids", "is_random_next", "is_single"):
        np.testing.assert_array_equal(found[name], expected[name])
    assert (after.size("eval"), after.size("train") > 0) == (8, True)
    np.testing.assert_array_equal(after.lengths("eval"), (expected["sequence_ids"] > 0).sum(axis=1))
    assert main([str(without_eval), str(tmp_path / "a")]) == 2
    assert "has an eval split" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path, batch: write(path, batch, without="masked_lm_ids"), "record 0: no feature masked_lm_ids"),
        (lambda path, batch: write(path, {**batch, "input_ids": batch["input_ids"] + 1}), "another vocabulary"),
        (lambda path, batch: write(path, {**batch, "input_ids": batch["input_ids"][:, :60]}), "60 tokens.* 64"),
        (lambda path, batch: path.write_bytes(path.read_bytes()[:-3]), "truncated"),
        (lambda path, batch: path.write_text("no records at all"), "truncated"),
        (lambda path, batch: path.write_bytes(b""), "no records"),
        (lambda path, batch: path.unlink(), "No such file"),
    ],
)
def test_other_files_are_refused_and_the_dataset_stays(
    change: Any, message: str, masked: HostBatch, without_eval: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    write(tmp_path / "a", masked)
    change(tmp_path / "a", masked)
    before = (without_eval / "dataset.json").read_bytes()
    assert main([str(without_eval), str(tmp_path / "a")]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert (without_eval / "dataset.json").read_bytes() == before


def test_a_dataset_without_next_sentences_is_refused(
    masked: HostBatch, tmp_path: Path, corpus_file: Path, vocabulary_file: Path, capsys: pytest.CaptureFixture
):
    write(tmp_path / "a", masked)
    helpers.prepare_dataset(corpus_file, vocabulary_file, tmp_path / "data", eval_fraction=0, pairs="none")
    assert main([str(tmp_path / "data"), str(tmp_path / "a")]) == 2
    assert "--pairs none" in capsys.readouterr().err
