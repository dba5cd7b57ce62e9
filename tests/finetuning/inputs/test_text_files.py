"""Texts of one's own: CSV, TSV and JSON lines."""

import bz2
import gzip
import json
import re
from pathlib import Path

import pytest
import zstandard

from bert_jax.errors import InputError
from bert_jax.finetuning.inputs.task_files import BadRows
from bert_jax.finetuning.inputs.text_files import TextFields, are_scores, find_fields, read_texts
from bert_jax.text.sequences import TextExample


def write(path: Path, content: str) -> Path:
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    return path


ROWS = [{"text": 'a "b", c', "label": "good"}, {"text": "d", "label": "bad"}, {"text": "é", "label": "good"}]
CONTENT = {
    ".csv": 'text,label\n"a ""b"", c",good\nd,bad\né,good\n',
    ".tsv": 'text\tlabel\r\na "b", c\tgood\r\nd\tbad\r\né\tgood\r\n',
    ".jsonl": "".join(f"{json.dumps(row)}\n\n" for row in ROWS),
}


@pytest.mark.parametrize("kind", CONTENT)
@pytest.mark.parametrize("compressed", ["", ".gz", ".bz2", ".zst"])
def test_formats(tmp_path: Path, kind: str, compressed: str):
    data = CONTENT[kind].encode()
    pack = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstandard.ZstdCompressor().compress}
    path = tmp_path / f"train{kind.upper()}{compressed}"
    path.write_bytes(pack[compressed](data))
    examples, labels = read_texts(path, BadRows(strict=True))
    assert labels == ("bad", "good")
    assert [(example.text_a, example.text_b, example.label) for example in examples] == [
        ('a "b", c', None, 1), ("d", None, 0), ("é", None, 1),
    ]  # fmt: skip
    assert [example.id for example in examples] == ["1", "2", "3"]


def test_a_quoted_field_may_hold_lines(tmp_path: Path):
    path = write(tmp_path / "a.csv", 'text,label\n"one\ntwo,\n\nthree",x\n"bad\nrow"\nend,y\n')
    bad_rows = BadRows()
    examples, _ = read_texts(path, bad_rows)
    assert [(example.id, example.text_a) for example in examples] == [("1", "one\ntwo,\n\nthree"), ("3", "end")]
    with pytest.raises(InputError, match=r"a\.csv:6: .*\b2\b.*\b1\b"):
        read_texts(path, BadRows(strict=True))


@pytest.mark.parametrize(
    "names",
    [("text_a", "text_b"), ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"),
     ("question", "sentence"), ("sentence",), ("text",)],
)  # fmt: skip
def test_names_that_need_not_be_said(tmp_path: Path, names: tuple[str, ...]):
    row = {"id": "x7", **{name: f"the {name}" for name in names}, "label": 3}
    path = write(tmp_path / "a.jsonl", json.dumps(row))
    (example,), labels = read_texts(path, BadRows(strict=True))
    texts = [f"the {name}" for name in names]
    assert example == TextExample("x7", texts[0], texts[1] if len(texts) > 1 else None, 0)
    assert labels == ("3",)


def test_names_that_are_said(tmp_path: Path):
    path = write(tmp_path / "a.csv", "key,text,query,stars\n7,no,yes,4.5\n")
    fields = TextFields(texts=("query", "text"), label="stars", id="key")
    assert read_texts(path, BadRows(), fields=fields, regression=True) == ([TextExample("7", "yes", "no", 4.5)], ())
    with pytest.raises(InputError, match=r"a\.csv:2: .*'label'.*'key', 'text', 'query', 'stars'"):
        read_texts(path, BadRows())
    with pytest.raises(InputError, match="'body'"):
        read_texts(path, BadRows(), fields=TextFields(texts=("body",)))
    with pytest.raises(InputError, match=r"\b3\b"):
        read_texts(path, BadRows(), fields=TextFields(texts=("key", "text", "query")))
    path = write(tmp_path / "b.csv", "key,stars\n7,4\n")
    with pytest.raises(InputError, match="'key', 'stars'"):
        read_texts(path, BadRows())


@pytest.mark.parametrize(
    ("written", "classes"),
    [
        (["10", "9", "2"], ("2", "9", "10")),
        ([10, 9, 2], ("2", "9", "10")),
        (["b", "10", "a"], ("10", "a", "b")),
        ([True, False], ("false", "true")),
        ([1.5, 1], ("1", "1.5")),
        ([1, 1.0, 0], ("0", "1")),
        ([0.0, 1.0], ("0.0", "1.0")),
        (["1.0", "1", "a.0", "a"], ("1", "a", "a.0")),
    ],
)
def test_classes_of_a_training_file(tmp_path: Path, written: list, classes: tuple[str, ...]):
    rows = "\n".join(json.dumps({"text": "a", "label": label}) for label in written)
    assert read_texts(write(tmp_path / "a.jsonl", rows), BadRows(strict=True))[1] == classes


def test_classes_that_are_given(tmp_path: Path):
    path = write(tmp_path / "dev.csv", "text,label\na,good\nb,ugly\nc,bad\n")
    bad_rows = BadRows()
    examples, labels = read_texts(path, bad_rows, labels=("good", "bad"))
    assert ([example.label for example in examples], labels) == ([0, 1], ("good", "bad"))
    assert bad_rows.counts == {str(path): 1}
    with pytest.raises(InputError, match=r"dev\.csv:3: .*'ugly'.*'good', 'bad'"):
        read_texts(path, BadRows(strict=True), labels=("good", "bad"))


def test_whole_numbers_are_the_classes_that_are_given(tmp_path: Path):
    floats = write(tmp_path / "dev.jsonl", '{"text": "a", "label": 1.0}\n{"text": "b", "label": 0.0}\n')
    whole = write(tmp_path / "dev.csv", "text,label\na,1\nb,0\n")
    for path in (floats, whole):
        for classes in (("0", "1"), ("0.0", "1.0")):
            examples, _ = read_texts(path, BadRows(strict=True), labels=classes)
            assert [example.label for example in examples] == [1, 0]


def test_no_class_is_no_example(tmp_path: Path):
    with pytest.raises(InputError, match=r"a\.csv: "):
        read_texts(write(tmp_path / "a.csv", "text,label\na,good\n"), BadRows(), labels=())


def test_texts_to_be_predicted(tmp_path: Path):
    path = write(tmp_path / "a.tsv", "text\na\nb\n")
    assert read_texts(path, BadRows(strict=True), labelled=False) == (
        [TextExample("1", "a", None, None), TextExample("2", "b", None, None)],
        (),
    )
    path = write(tmp_path / "b.tsv", "text\tlabel\na\t?\n")
    assert read_texts(path, BadRows(strict=True), labelled=False)[0] == [TextExample("1", "a", None, None)]


@pytest.mark.parametrize(
    ("kind", "row", "problem"),
    [
        (".csv", "a,b,c", r"\b2\b.*\b3\b"),
        (".csv", "", r":3: .*\b2\b"),
        (".csv", '"a"b,c', "RFC 4180"),
        (".csv", " ,1", "'text'"),
        (".csv", "a,", "'label'"),
        (".tsv", "a", r"\b2\b.*\b1\b"),
        (".tsv", "\udcff\t1", "UTF-8.*0xff"),
        (".jsonl", "[1]", "object.*list"),
        (".jsonl", "{", "JSON"),
        (".jsonl", '{"label": "1"}', "'text'"),
        (".jsonl", '{"text": null, "label": "1"}', "'text'"),
        (".jsonl", '{"text": 5, "label": "1"}', r"'text'.*\bint\b"),
        (".jsonl", '{"text": "a"}', "'label'"),
        (".jsonl", '{"text": "a", "label": ["1"]}', r"label.*\blist\b"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("regression", [True, False])
def test_bad_rows_are_named_and_left_out(tmp_path: Path, kind: str, row: str, problem: str, regression: bool):
    good = {".csv": "a,1", ".tsv": "a\t1", ".jsonl": '{"text": "a", "label": "1"}'}[kind]
    header = {".csv": "text,label", ".tsv": "text\tlabel", ".jsonl": good}[kind]
    path = write(tmp_path / f"a{kind}", "\n".join([header, good, row, good]) + "\n")
    bad_rows = BadRows()
    examples, _ = read_texts(path, bad_rows, regression=regression)
    assert [example.id for example in examples][-2:] == (["2", "4"] if kind == ".jsonl" else ["1", "3"])
    assert bad_rows.counts == {str(path): 1}
    with pytest.raises(InputError) as error:
        read_texts(path, BadRows(strict=True), regression=regression)
    assert str(error.value).startswith(f"{path}:3: ")
    assert re.search(problem, str(error.value))


@pytest.mark.parametrize("label", ["high", "nan", "inf", True, ""])
def test_scores_are_finite_numbers(tmp_path: Path, label: object):
    rows = [{"text": "a", "label": value} for value in ("-2", 3, label)]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    bad_rows = BadRows()
    examples, _ = read_texts(path, bad_rows, regression=True)
    assert [example.label for example in examples] == [-2.0, 3.0]
    assert bad_rows.counts == {str(path): 1}


def test_a_quote_that_nothing_closes_takes_its_line_alone(tmp_path: Path):
    rows = ['"he said ""no"""', '"two\nlines"', '"open', "plain", '"closed"', '"again', "last"]
    path = write(tmp_path / "a.csv", "text,label\n" + "".join(f"{row},1\n" for row in rows))
    bad_rows = BadRows()
    examples, _ = read_texts(path, bad_rows)
    assert [(example.id, example.text_a) for example in examples] == [
        ("1", 'he said "no"'), ("2", "two\nlines"), ("4", "plain"), ("5", "closed"), ("7", "last"),
    ]  # fmt: skip
    assert bad_rows.counts == {str(path): 2}


@pytest.mark.timeout(60)
def test_rows_without_their_first_quotes_are_read_in_linear_time(tmp_path: Path):
    """Each line opens a quote that the next one closes: one row to the file's end, from every line on."""
    path = write(tmp_path / "a.csv", "text,label\n" + 'nice film","1\n' * 12_000 + '\n"end\nof it",0\n')
    bad_rows = BadRows()
    examples, _ = read_texts(path, bad_rows)
    assert examples[-1].text_a == "end\nof it"
    assert bad_rows.counts[str(path)] >= 12_000
    with pytest.raises(InputError, match=r"a\.csv:2: .*\b2\b.*\b100\b.*quote"):
        read_texts(path, BadRows(strict=True))


def test_a_field_may_hold_many_lines_but_not_all(tmp_path: Path):
    long, longest, too_long = ("\n".join(f"{n}, and, so" for n in range(lines)) for lines in (150, 20_000, 20_001))
    path = write(tmp_path / "a.csv", f'text,label\n"{long}",1\n"{longest}",1\nend,0\n')
    assert [example.text_a for example in read_texts(path, BadRows(strict=True))[0]] == [long, longest, "end"]
    path = write(tmp_path / "b.csv", f'text,label\n"{too_long}",1\nend,0\n')
    with pytest.raises(InputError, match=r"b\.csv:2: .*\b20000\b"):
        read_texts(path, BadRows(strict=True))


def test_an_open_quote_that_a_later_line_closes_is_not_one_row(tmp_path: Path):
    rows = "".join(f"text {number},1\n" for number in range(3_000))
    for name, text in (("open", f'"never closed,0\n{rows}size 5",1\n'), ("lines", f'"first\n{rows}last",0\n')):
        path = write(tmp_path / f"{name}.csv", f"text,label\nshort,0\n{text}end,0\n")
        with pytest.raises(InputError, match=r"csv:3: a row of 3,002 lines, .* close it, else"):
            read_texts(path, BadRows())


def test_a_field_may_be_a_book(tmp_path: Path):
    book = "word " * 100_000
    path = write(tmp_path / "a.csv", f'text,label\nshort,a\n"{book}",b\n')
    assert [example.text_a for example in read_texts(path, BadRows(strict=True))[0]] == ["short", book]


@pytest.mark.parametrize("kind", [".csv", ".tsv"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, kind: str):
    path = write(tmp_path / f"a{kind}", "text,text,label\na,b,1\n".replace(",", "," if kind == ".csv" else "\t"))
    with pytest.raises(InputError, match=r"a\.\wsv: .*'text'"):
        read_texts(path, BadRows())


def test_what_a_file_calls_its_texts(tmp_path: Path):
    path = write(tmp_path / "a.csv", "sentence2,sentence1,label\na,b,1\n")
    fields = TextFields(label="stars", id="key")
    assert find_fields(path, fields) == TextFields(("sentence1", "sentence2"), "stars", "key")
    assert find_fields(path, TextFields(("sentence2",))) == TextFields(("sentence2",))
    assert find_fields(write(tmp_path / "b.csv", "text,label\n"), fields) == fields


@pytest.mark.parametrize(
    ("labels", "expected"),
    [(("0.5", "1"), True), (("0", "1"), False), (("1.0", "2.0"), False), (("0.5", "high"), False)],
)
def test_labels_that_look_like_scores(labels: tuple[str, ...], expected: bool):
    assert are_scores(labels) == expected


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(InputError, match=r"a\.xlsx\.gz: .*\.csv, \.tsv, \.jsonl"):
        read_texts(tmp_path / "a.xlsx.gz", BadRows())
    with pytest.raises(InputError, match=r"a\.csv: "):
        read_texts(tmp_path / "a.csv", BadRows())
    for content in ("", "text,label\n", "text,label\n,1\n"):
        with pytest.raises(InputError, match=r"b\.csv: "):
            read_texts(write(tmp_path / "b.csv", content), BadRows())
