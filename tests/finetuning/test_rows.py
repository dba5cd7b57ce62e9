"""Rows of a task's files: bad ones, ids, and the files of predictions."""

import csv
import io
from pathlib import Path

import pytest

from bert_jax.errors import InputError
from bert_jax.files.tables import read_table
from bert_jax.finetuning.task import BadRows, format_predictions, read_rows, row_id

ROWS = [
    {"id": "a", "text": 'say "ho",\tship\n', "prediction": "sea", "probabilities": {"sea": 0.75, "wood": 0.25}},
    {"id": "b", "text": "näss", "prediction": "wood", "probabilities": {"sea": 0.5, "wood": 0.5}},
]


def written(name: str, rows: list[dict]) -> str:
    return format_predictions(name, rows).decode()


def test_bad_rows_are_counted_by_reason_and_logged_with_their_place(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "a.csv"
    path.write_bytes(b"text,label\na,1\nb\n" + b"caf\xe9,1\n" * 9 + b'"two\nlines",2\n')
    bad_rows = BadRows()
    assert [(number, place, row["text"]) for number, place, row in read_rows(str(path), bad_rows)] == [
        (1, 2, "a"), (12, 13, "two\nlines"),
    ]  # fmt: skip
    assert bad_rows.counts == {str(path): 10}
    bad_rows.check_usable(str(path), [1], "a text")
    assert [line.split(": ")[1] for line in caplog.messages[:-1]] == [f"{path}:{line}" for line in range(3, 8)]
    assert "10" in caplog.messages[-1]
    with pytest.raises(InputError, match=rf"{path}:3: .*\b2\b.*\b1\b"):
        list(read_rows(str(path), BadRows(strict=True)))


def test_a_table_has_a_column_per_class():
    (first, second) = csv.DictReader(io.StringIO(written("out.CSV", ROWS), newline=""))
    assert first == {
        "id": "a", "text": ROWS[0]["text"], "prediction": "sea", "probability_sea": "0.75", "probability_wood": "0.25",
    }  # fmt: skip
    assert second["id"] == "b"
    lines = written("out.tsv", ROWS).split("\n")
    assert lines[0].split("\t") == list(first)
    assert lines[1].split("\t")[:2] == ["a", 'say "ho", ship ']
    assert lines[3:] == [""]


@pytest.mark.parametrize(
    ("row", "identity"),
    [({"text": "a", "guid": "g7"}, "g7"), ({"index": "0", "id": "q"}, "q"), ({"idx": 5}, "5"),
     ({"index": "1", "id": ""}, "1"), ({"text": "a"}, "3"), ({"key": "k", "id": "q"}, "k")],
)  # fmt: skip
def test_ids_are_those_of_the_row_or_its_number(row: dict, identity: str):
    assert row_id(row, 3, "key") == identity


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl"])
def test_predictions_are_read_again_row_by_row(name: str, tmp_path: Path):
    rows = [{"id": "a\tb", "text": text} for text in ("x\ry", 'say "ho"\n', "a,b", "")]
    (tmp_path / name).write_bytes(format_predictions(name, rows))
    again = [row for _, row in read_table(str(tmp_path / name))]
    assert again == [
        {
            key: value.translate(str.maketrans("\t\r\n", "   ")) if name == "a.tsv" else value
            for key, value in row.items()
        }
        for row in rows
    ]
