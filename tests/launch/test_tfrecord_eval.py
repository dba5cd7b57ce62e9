"""launch/tfrecord_eval.py, on records that protobuf and TensorBoard write."""

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from support import helpers
from tensorboard.summary.writer.record_writer import RecordWriter

from bert_jax.batch import HostBatch
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.loading.loader import EvalLoader

main = runpy.run_path(str(helpers.REPOSITORY / "launch" / "tfrecord_eval.py"))["main"]


def make_example_type() -> Any:
    """Returns the message tf.train.Example, with the fields that are written here."""

    def one(name: str, number: int, kind: str, *, many: bool = False) -> dict[str, Any]:
        basic = kind.isupper()
        types = {"type": f"TYPE_{kind}"} if basic else {"type": "TYPE_MESSAGE", "typeName": f".test.{kind}"}
        return {"name": name, "number": number, "label": "LABEL_REPEATED" if many else "LABEL_OPTIONAL", **types}

    messages = {
        "Floats": [one("value", 1, "FLOAT", many=True)],
        "Ints": [one("value", 1, "INT64", many=True)],
        "Feature": [one("floats", 2, "Floats"), one("ints", 3, "Ints")],
        "Entry": [one("key", 1, "STRING"), one("value", 2, "Feature")],
        "Features": [one("feature", 1, "Entry", many=True)],
        "Example": [one("features", 1, "Features")],
    }
    file = {"name": "example.proto", "package": "test", "syntax": "proto3",
            "messageType": [{"name": name, "field": found} for name, found in messages.items()]}  # fmt: skip
    pool = descriptor_pool.DescriptorPool()
    pool.Add(json_format.ParseDict(file, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("test.Example"))


EXAMPLE = make_example_type()


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
            entries = [{"key": key, "value": {"ints": {"value": value.tolist()}}} for key, value in ints.items()]
            weights = {"floats": {"value": batch["masked_weights"][row].tolist()}}
            entries.append({"key": "masked_lm_weights", "value": weights})
            kept = [entry for entry in entries if entry["key"] != without]
            writer.write(json_format.ParseDict({"features": {"feature": kept}}, EXAMPLE()).SerializeToString())


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
