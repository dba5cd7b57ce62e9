"""Endings to choose from: SWAG, and files of one's own."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
from etils import epath

from bert_jax.errors import InputError
from bert_jax.finetuning.batches import EncodedExamples
from bert_jax.finetuning.task import BadRows, Split
from bert_jax.finetuning.tasks.choice import ChoiceExample, ChoiceTask
from bert_jax.text.tokenizer import Tokenizer

SWAG = "video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3"
ROW = 'anet_dm5,18419,He rides. He,He rides.,He,gold,"stops, then",looks.,walks.,"says ""no""."'
ENDINGS = ("stops, then", "looks.", "walks.", 'says "no".')
OWN = {"context": "It rained.", "endings": ["a", "b"], "label": 1}
OWN_EXAMPLE = ChoiceExample("1", "It rained.", "", ("a", "b"), 1)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def read(path: Path, bad_rows: BadRows | None = None, **options) -> list[ChoiceExample]:
    return ChoiceTask().read(str(path), bad_rows or BadRows(strict=True), **options)


@pytest.mark.parametrize(
    ("name", "lines", "labels", "expected"),
    [
        ("train.csv", (f",{SWAG},label", f"17,{ROW},2"), "required",
         ChoiceExample("17", "He rides.", "He", ENDINGS, 2)),
        ("test.csv", (SWAG, ROW), "optional", ChoiceExample("1", "He rides.", "He", ENDINGS)),
        *(("a.jsonl", (json.dumps({**OWN, "label": label}),), "optional",
           ChoiceExample("1", "It rained.", "", ("a", "b"))) for label in (-1, "-1", math.nan)),
        ("a.csv", (f"{SWAG},label", f"{ROW},X"), "ignored", ChoiceExample("1", "He rides.", "He", ENDINGS)),
        ("a.tsv", ("context\tending0\tending1\tlabel", "It rained.\ta\tb\t1"), "required", OWN_EXAMPLE),
        ("a.jsonl", (json.dumps({**OWN, "label": "1"}),), "required", OWN_EXAMPLE),
        ("a.jsonl", (json.dumps({**OWN, "label": 1.0}),), "required", OWN_EXAMPLE),
        ("a.jsonl", (json.dumps({**OWN, "id": "q1", "start": "So", "label": "b"}),), "ignored",
         ChoiceExample("q1", "It rained.", "So", ("a", "b"))),
    ],
)  # fmt: skip
def test_rows_of_each_format(name: str, lines: tuple, labels: str, expected: ChoiceExample, tmp_path: Path):
    assert read(write(tmp_path / name, *lines), labels=labels) == [expected]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"context": " "}, "context"),
        ({"start": 5}, "start"),
        ({"endings": ["a"]}, "2 endings, got 1"),
        ({"endings": "ab"}, "endings"),
        ({"endings": 5}, "endings"),
        ({"endings": ["a", ""]}, "endings"),
        ({"endings": ["a", "b", "c"]}, "2 endings, got 3"),
        ({"label": None}, "label"),
        ({"label": 3}, "label 3: "),
        ({"label": True}, "label True: "),
        ({"label": "b"}, "label 'b': "),
    ],
)
def test_bad_rows_are_named_and_skipped(tmp_path: Path, change: dict, problem: str):
    path = write(tmp_path / "a.jsonl", *map(json.dumps, (OWN, {**OWN, **change}, OWN)))
    bad_rows = BadRows()
    assert [example.id for example in read(path, bad_rows)] == ["1", "3"]
    assert bad_rows.counts == {str(path): 1}
    with pytest.raises(InputError, match=rf"^{path}:2: .*{problem}"):
        read(path)


@pytest.mark.parametrize("label", [2, "2", 2.0])
def test_labels_that_count_from_1_are_refused(tmp_path: Path, label: object):
    """All others would be taken for the next ending."""
    path = write(tmp_path / "a.jsonl", json.dumps(OWN), json.dumps({**OWN, "label": label}))
    with pytest.raises(InputError, match=rf"^{path}:2: label .*count from 0"):
        read(path, BadRows())


def test_files_of_other_formats_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"a\.txt: .*\.csv.*\.tsv.*\.jsonl"):
        read(tmp_path / "a.txt")
    with pytest.raises(InputError, match=r"a\.csv: .*2 endings"):
        read(write(tmp_path / "a.csv", "text,label", "a,1"), BadRows())


def test_encoding(tokenizer: Tokenizer):
    example = ChoiceExample("0", "the ship sees", "the wave", ("near", "hears the owl"), 0)
    bare = ChoiceExample("1", "the", "", ("near", "old"), 1)
    encoded = ChoiceTask(max_seq_len=9).encode([example, bare], tokenizer, labelled=True)
    one, two, three, _ = encoded.sequences
    the, ship, sees, wave, near, hears = map(tokenizer.token_to_id, ("the", "ship", "sees", "wave", "near", "hears"))
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    assert (one.input_ids, one.first_length) == ((cls, the, ship, sees, sep, the, wave, near, sep), 5)
    assert two.input_ids == (cls, the, ship, sees, sep, the, wave, hears, sep)
    assert (three.input_ids, three.first_length) == ((cls, the, sep, near, sep), 3)
    assert (encoded.group, encoded.labels.tolist()) == (2, [1, 0, 0, 1])


def test_the_leaderboard_file_is_csv_for_any_id(tmp_path: Path):
    examples = [ChoiceExample(name, "It rained.", "", ("a", "b"), None) for name in ("1", 'a,"b"')]
    outputs = [np.array([0.0, 1.0], np.float32), np.array([1.0, 0.0], np.float32)]
    ChoiceTask().write(Split("test", examples, EncodedExamples([])), outputs, epath.Path(tmp_path))
    with (tmp_path / "test.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["", "pred"], ["1", "1"], ['a,"b"', "0"]]
