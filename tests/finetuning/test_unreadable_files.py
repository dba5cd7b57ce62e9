"""Task files in another encoding, of another layout or with values that nothing can hold: each is named once."""

import json
import re
from pathlib import Path

import pytest
from support import squad_examples

from bert_jax.config import FinetuneConfig, load_config
from bert_jax.errors import InputError
from bert_jax.finetuning.inputs.batching import Encoding
from bert_jax.finetuning.inputs.choice_files import read_choices
from bert_jax.finetuning.inputs.squad_files import read_questions
from bert_jax.finetuning.inputs.task_files import BadRows
from bert_jax.finetuning.inputs.text_files import read_texts
from bert_jax.finetuning.tasks.glue import get_task, read_split
from bert_jax.finetuning.tasks.text_tasks import own_task
from bert_jax.text.wordpiece import wordpiece_tokenizer

DEEP = "[" * 100_000 + "]" * 100_000
GOOD = {"text": "the ship .", "label": 1}


@pytest.mark.parametrize(
    "bad",
    [
        r'{"text": "\ud83d x", "label": 1}', r'{"text": "a", "id": "\ud800", "label": 1}',
        r'{"text": "a", "label": "\udc00"}', r'{"\ud800": 1, "text": "a", "label": 1}',
        f'{{"text": "a", "label": {DEEP}}}', f'{{"text": "a", "label": {"9" * 5_000}}}',
    ],
    ids=["text", "id", "label", "key", "deep", "digits"],
)  # fmt: skip
def test_json_that_nothing_can_hold_is_a_bad_row(tmp_path: Path, bad: str):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps(GOOD), bad, r'{"text": "\ud83d\ude00", "label": 2}']))
    bad_rows = BadRows()
    examples, _ = read_texts(path, bad_rows)
    assert [(example.id, example.text_a) for example in examples] == [("1", "the ship ."), ("3", "\U0001f600")]
    assert bad_rows.counts == {str(path): 1}
    with pytest.raises(InputError, match=re.escape(f"{path}:2: ")):
        read_texts(path, BadRows(strict=True))


def test_a_score_of_hundreds_of_digits_is_a_bad_row(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "a", "label": {"9" * 400}}}\n{{"text": "b", "label": 2}}\n')
    bad_rows = BadRows()
    examples, _ = read_texts(path, bad_rows, regression=True)
    assert [example.label for example in examples] == [2.0]
    assert bad_rows.counts == {str(path): 1}


@pytest.mark.parametrize("bad", [r'"\ud800"', DEEP], ids=["surrogate", "deep"])
def test_choices_that_nothing_can_hold_are_bad_rows(tmp_path: Path, bad: str):
    path = tmp_path / "a.jsonl"
    good = json.dumps({"context": "a", "endings": ["b", "c"], "label": 0})
    path.write_text(f'{good}\n{{"context": {bad}, "endings": ["b", "c"], "label": 0}}\n')
    bad_rows = BadRows()
    assert len(read_choices(path, bad_rows)) == 1
    assert bad_rows.counts == {str(path): 1}


def test_questions_that_nothing_can_hold_are_bad_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    context = "the old fox sees a ship"
    entries = [
        squad_examples.entry("\ud800", "fox", 8), {**squad_examples.entry("b", "fox", 8), "question": "\udc00 ?"},
        squad_examples.entry("c", "\ud83d", 0), squad_examples.entry("d", "fox", 10**400),
    ]  # fmt: skip
    path = squad_examples.write(tmp_path / "a.json", context, *entries, squad_examples.entry("e", "fox", 8))
    bad_rows = BadRows()
    questions = read_questions(path, bad_rows, training=True)
    assert [question.id for question in questions] == ["d", "e"]
    assert questions[0].answers[0].start == 8  # the one place there is
    assert bad_rows.counts == {str(path): 3}
    assert "\\ud800" in caplog.text.encode("utf-8").decode()  # which raises for half of a surrogate pair
    path = squad_examples.write(tmp_path / "b.json", "\ud800", entries[-1])
    with pytest.raises(InputError, match=re.escape(f"{path}")):
        read_questions(path, BadRows(), training=True)


def test_squad_nested_too_deeply_or_not_utf_8_is_named(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text(DEEP)
    with pytest.raises(InputError, match=re.escape(str(path))):
        read_questions(path, BadRows(), training=True)
    path.write_bytes('{"data": [\n"caf\u00e9"]}'.encode("latin-1"))
    with pytest.raises(InputError, match=rf"{path}:2: .*iconv .*{path}"):
        read_questions(path, BadRows(), training=True)


@pytest.mark.parametrize("header", ["ending0,\rending1,label", "x" * 200_000], ids=["carriage_return", "long"])
def test_a_header_of_swag_that_is_none_is_named(tmp_path: Path, header: str):
    path = tmp_path / "train.csv"
    path.write_bytes(f"{header}\na,b,c\n".encode())
    with pytest.raises(InputError, match=re.escape(f"{path}:1: ")):
        read_choices(path, BadRows())


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl"])
def test_another_encoding_is_refused_with_what_converts_it(tmp_path: Path, name: str):
    path = tmp_path / name
    path.write_bytes('text\tlabel\n{"text": "a", "label": 1}\n'.encode("utf-16"))
    with pytest.raises(InputError, match=rf"{path}:1: .*iconv -f UTF-16 -t UTF-8 {path}"):
        read_texts(path, BadRows())
    path.write_bytes("text,caf\u00e9\na,b\n".encode("latin-1"))
    with pytest.raises(InputError, match=rf"{path}:1: .*iconv .*{path}"):
        read_texts(path, BadRows(strict=True))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_a_header_in_another_encoding_is_not_taken_from_the_next_line(tmp_path: Path, name: str):
    path = tmp_path / name
    comma = "," if name == "a.csv" else "\t"
    path.write_bytes("text,label,caf\u00e9\ntext,label,b\na,1,x\n".replace(",", comma).encode("latin-1"))
    with pytest.raises(InputError, match=rf"{path}:1: .*iconv .*{path}"):
        read_texts(path, BadRows())


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_json_array_is_refused_with_what_makes_lines_of_it(tmp_path: Path, name: str, indent: int | None):
    path = tmp_path / name
    path.write_text("\n" + json.dumps([GOOD, GOOD], indent=indent))
    for read in (lambda: read_texts(path, BadRows()), lambda: read_choices(path, BadRows())):
        with pytest.raises(InputError, match=rf"{path}:2: .*jq -c '\.\[\]' {path}"):
            read()


@pytest.mark.parametrize("bad", [b"caf\xe9,1", b"a,b,c"], ids=["encoding", "columns"])
def test_a_bad_row_before_the_first_usable_one_is_named_once(
    tmp_path: Path, bad: bytes, vocabulary: list[str], caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "train.csv"
    path.write_bytes(b"text,label\n" + bad + b"\nthe ship .,1\nthe owl .,2\n")
    keys = [("task.train", str(path))]
    config = load_config("finetune/text", keys, kind=FinetuneConfig)
    own_task(config, Encoding(wordpiece_tokenizer(vocabulary, lowercase=True), 16))
    assert caplog.text.count(f"{path}:2: ") == 1


def test_a_header_of_glue_in_another_encoding_is_named(tmp_path: Path):
    path = tmp_path / "train.tsv"
    path.write_bytes("sentence\tlabel\tcaf\u00e9\nsentence\tlabel\tb\na\t1\tc\n".encode("latin-1"))
    with pytest.raises(InputError, match=rf"{path}:1: .*iconv .*{path}"):
        read_split(tmp_path, get_task("sst2"), "train", BadRows())
