"""Files of predictions: JSON lines and tables, and the ids and texts that `predict` writes."""

import csv
import io
import json
from pathlib import Path

import pytest
from etils import epath
from support.models import initialize

from bert_jax.cli import main
from bert_jax.finetuning.inputs.task_files import BadRows
from bert_jax.finetuning.inputs.text_files import read_texts
from bert_jax.finetuning.prediction_files import write_predictions
from bert_jax.model.task_heads import BertForTask, TaskHead
from bert_jax.training.checkpoints import open_checkpoint, save_parameters

ROWS = [
    {"id": "a", "text": 'say "ho",\tship\n', "prediction": "sea", "probabilities": {"sea": 0.75, "wood": 0.25}},
    {"id": "b", "text": "näss", "prediction": "wood", "probabilities": {"sea": 0.5, "wood": 0.5}},
]


@pytest.fixture(scope="module")
def classifier(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A classifier with its initial values."""
    before, folder = open_checkpoint(str(checkpoint)), tmp_path_factory.mktemp("classifier") / "model"
    head = TaskHead("classify", 2)
    _, parameters = initialize(before.bert_config, 3, build=BertForTask, head=head)
    task = {"name": "text", "classes": ["sea", "wood"], "texts": [], "id": "id", "is_pair": False, "max_seq_len": 48}
    save_parameters(
        epath.Path(folder), parameters, bert_config=before.bert_config, tokenizer=before.tokenizer, heads=("pooler",),
        task={**head.to_dict(), **task},
    )  # fmt: skip
    return str(folder)


def written(name: str, rows: list[dict]) -> str:
    file = io.BytesIO()
    write_predictions(file, name, rows)
    return file.getvalue().decode()


def test_json_lines_are_the_predictions():
    assert [json.loads(line) for line in written("out", ROWS).splitlines()] == ROWS
    assert "näss" in written("out.jsonl", ROWS)


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


def test_lists_and_missing_values_in_a_table():
    rows = [{"id": "1", "words": ["the", "ship"], "prediction": ["O", "B-SEA"], "probabilities": [0.25, 0.75]},
            {"id": "2", "words": ["x"], "prediction": [], "probabilities": [1, 0], "null_odds": None}]  # fmt: skip
    assert written("out.tsv", rows).splitlines() == [
        "id\twords\tprediction\tprobability_0\tprobability_1\tnull_odds",
        "1\tthe ship\tO B-SEA\t0.25\t0.75\t", "2\tx\t\t1\t0\t",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "ids"),
    [
        ("a.csv", "text,guid\nthe ship,g7\nthe owl,g8\n", ["g7", "g8"]),
        ("a.tsv", "idx\ttext\n10\tthe ship\n11\tthe owl\n", ["10", "11"]),
        ("a.tsv", "index\tid\ttext\n0\tq\tthe ship\n1\t\tthe owl\n", ["q", "1"]),
        ("a.csv", "text\nthe ship\nthe owl\n", ["1", "2"]),
        ("a.csv", 'text\n""\nthe owl\n', ["2"]),
        ("a.jsonl", '{"text": "the ship"}\n{"text": "the owl", "idx": 5}\n', ["1", "5"]),
    ],
)
def test_ids_are_those_of_the_input_or_row_numbers(name: str, content: str, ids: list[str], tmp_path: Path):
    (tmp_path / name).write_text(content)
    examples, _ = read_texts(tmp_path / name, BadRows(), labelled=False)
    assert [example.id for example in examples] == ids


def test_the_command_writes_a_table_with_texts(classifier: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "new.csv").write_text('guid,text\nx,"the ship, old"\ny,the owl\n')
    command = ["predict", "--checkpoint", classifier, "--input", str(tmp_path / "new.csv")]
    for name, options in (("out.csv", ["--with_text"]), ("out.jsonl", ["--with_text"]), ("plain.csv", [])):
        assert main([*command, "--output", str(tmp_path / name), *options]) == 0
    with open(tmp_path / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["id", "text", "prediction", "probability_sea", "probability_wood"]
    assert [(row["id"], row["text"]) for row in rows] == [("x", "the ship, old"), ("y", "the owl")]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for row, line in zip(rows, lines, strict=True):
        assert (row["text"], row["prediction"]) == (line["text"], line["prediction"])
        assert float(row["probability_sea"]) == line["probabilities"]["sea"]
    assert (tmp_path / "plain.csv").read_text().startswith("id,prediction,probability_sea,probability_wood\nx,")
