"""`--text_field`: the field with the text."""

import json

import pytest
from support.preparing import files, run
from support.reading import documents

from bert_jax.errors import InputError


@pytest.fixture
def write(tmp_path):
    def write_file(content, name="a.jsonl"):
        (tmp_path / name).write_text(content)
        return tmp_path / name

    return write_file


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"body": "words"}, "body"),
        ({"page": {"body": "words", "text": "no"}, "text": "no"}, "page.body"),
        ({"a": {"b": {"c": "words"}}}, "a.b.c"),
        ({"a.b": "words", "a": {"b": "no"}}, "a.b"),
    ],
)
def test_a_field_of_json(write, record, field):
    assert documents(write(json.dumps(record)), text_field=field) == ["words"]


@pytest.mark.parametrize(
    ("record", "field", "found"),
    [
        ({"id": 1, "body": "words"}, "text", "id, body"),
        ({"page": {"body": "words"}}, "body", "page"),
        ({"page": "words"}, "page.body", "page"),
        ({}, "text", "none"),
    ],
)
def test_a_missing_field_is_named_with_those_found(write, record, field, found):
    with pytest.raises(InputError, match=rf'a\.jsonl:2: .*"{field}".*found {found};.*--text_field'):
        documents(write("\n" + json.dumps(record)), text_field=field)


def test_text_beside_records_is_read(write, tmp_path):
    write("one\n", "a.txt")
    write('{"body": "two"}\n', "b.jsonl")
    assert documents(tmp_path, text_field="body") == ["one", "two"]


def test_the_field_does_not_change_the_dataset(write, tokenizer, tmp_path):
    lines = {
        field: "".join(json.dumps({field: f"the {n} ship ."}) + "\n" for n in range(20)) for field in ("text", "b")
    }
    run(write(lines["text"], "a.jsonl"), tokenizer, tmp_path / "text", allow_unk=1)
    run(write(lines["b"], "b.jsonl"), tokenizer, tmp_path / "b", text_field="b", allow_unk=1)
    assert files(tmp_path / "text") == files(tmp_path / "b")
