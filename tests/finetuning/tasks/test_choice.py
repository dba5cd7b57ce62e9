"""Endings to choose from: SWAG, CODAH, and files of one's own."""

import json
from pathlib import Path

import pytest

from bert_jax.errors import InputError
from bert_jax.finetuning.rows import BadRows
from bert_jax.finetuning.tasks.choice import ChoiceExample, ChoiceTask
from bert_jax.text.tokenizer import read_tokenizer

SWAG = "video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3"
ROW = 'anet_dm5,18419,He rides. He,He rides.,He,gold,"stops, then",looks.,walks.,"says ""no""."'
CODAH = "o\tPolice came. They\trun.\tbring it.\tstart.\tdrive.\t3"
OWN = {"context": "It rained.", "endings": ["a", "b"], "label": 1}


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def read(path: Path, bad_rows: BadRows | None = None, **options) -> list[ChoiceExample]:
    return ChoiceTask().read(str(path), bad_rows or BadRows(strict=True), **options)


def test_swag(tmp_path: Path):
    endings = ("stops, then", "looks.", "walks.", 'says "no".')
    path = write(tmp_path / "train.csv", f",{SWAG},label", f"17,{ROW},2", f"18,{ROW},0")
    assert read(path) == [
        ChoiceExample("17", "He rides.", "He", endings, 2), ChoiceExample("18", "He rides.", "He", endings, 0),
    ]  # fmt: skip
    path = write(tmp_path / "test.csv", SWAG, ROW)
    assert read(path, labels="optional") == [ChoiceExample("1", "He rides.", "He", endings, None)]
    with pytest.raises(InputError, match=r"test\.csv:1: .*label"):
        read(path)


def test_codah(tmp_path: Path):
    path = write(tmp_path / "train.tsv", CODAH, '\tHe said "no\ta\tb\tc\td\t0')
    assert read(path) == [
        ChoiceExample("1", "Police came. They", "", ("run.", "bring it.", "start.", "drive."), 3),
        ChoiceExample("2", 'He said "no', "", ("a", "b", "c", "d"), 0),
    ]


def test_ignored_labels_may_be_anything_or_missing(tmp_path: Path):
    row = CODAH.removesuffix("\t3")
    for name, lines in (("a.tsv", (row, row)), ("b.tsv", (CODAH, f"{row}\tX")), ("a.csv", (SWAG, ROW, ROW)),
                        ("a.jsonl", [json.dumps(row) for row in ({**OWN, "label": "b"}, OWN)])):  # fmt: skip
        examples = read(write(tmp_path / name, *lines), labels="ignored")
        assert [example.label for example in examples] == [None, None]


def test_own_files(tmp_path: Path):
    rows = [{**OWN, "id": "q1", "start": "So"}, {**OWN, "label": "0"}, {**OWN, "label": 1.0}]
    path = write(tmp_path / "a.jsonl", *map(json.dumps, rows))
    assert read(path) == [
        ChoiceExample("q1", "It rained.", "So", ("a", "b"), 1),
        ChoiceExample("2", "It rained.", "", ("a", "b"), 0),
        ChoiceExample("3", "It rained.", "", ("a", "b"), 1),
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"context": " "}, "context"),
        ({"context": None}, "context"),
        ({"start": 5}, "start"),
        ({"endings": ["a"]}, "endings"),
        ({"endings": "ab"}, "endings"),
        ({"endings": ["a", 5]}, "endings"),
        ({"endings": ["a", ""]}, "endings[1]"),
        ({"endings": ["a", "b", "c"]}, "2 endings, got 3"),
        ({"label": None}, "label"),
        ({"label": 2}, "label 2: "),
        ({"label": -1}, "label -1: "),
        ({"label": True}, "label True: "),
        ({"label": "b"}, "label 'b': "),
    ],
)
def test_bad_rows_are_named_and_skipped(tmp_path: Path, change: dict, problem: str):
    path = write(tmp_path / "a.jsonl", *map(json.dumps, (OWN, {**OWN, **change}, OWN)))
    bad_rows = BadRows()
    assert [example.id for example in read(path, bad_rows)] == ["1", "3"]
    assert bad_rows.counts == {str(path): 1}
    with pytest.raises(InputError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("name", "bad"),
    [("a.tsv", "o\tprompt\ta\tb\tc\t1"), ("a.tsv", "o\tp\ta\tb\tc\td\t4"), ("a.csv", ROW), ("a.csv", f"{ROW},5")],
)
def test_bad_rows_of_swag_and_codah(tmp_path: Path, name: str, bad: str):
    lines = (CODAH, bad, CODAH) if name == "a.tsv" else (f"{SWAG},label", f"{ROW},1", bad, f"{ROW},1")
    path = write(tmp_path / name, *lines)
    assert [example.id for example in read(path, BadRows())] == ["1", "3"]
    with pytest.raises(InputError, match=rf"{name}:{len(lines) - 1}: "):
        read(path)


def test_files_of_other_formats_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"a\.txt: .*\.csv.*\.tsv.*\.jsonl"):
        read(tmp_path / "a.txt")
    with pytest.raises(InputError, match="sent1, sent2, ending0"):
        read(write(tmp_path / "a.csv", "text,label", "a,1"))
    with pytest.raises(InputError, match=r"a\.jsonl: .*a\.jsonl:1: "):
        read(write(tmp_path / "a.jsonl", "{}"), BadRows())


def test_encoding(vocabulary_file: Path):
    tokenizer = read_tokenizer(vocabulary_file)
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


def test_real_files(data_dir: Path):
    splits = [read(data_dir / "codah" / f"{split}.tsv") for split in ("train", "dev", "test")]
    assert sum(map(len, splits)) == 2_776
    assert {example.label for example in splits[0]} == {0, 1, 2, 3}
