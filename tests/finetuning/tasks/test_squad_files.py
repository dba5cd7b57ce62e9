"""Reading SQuAD's files: what is used, what is left out, and how a person finds it."""

import json
import logging
import re
from pathlib import Path

import pytest
from support.squad_examples import entry, write

from bert_jax.errors import InputError
from bert_jax.finetuning.rows import BadRows
from bert_jax.finetuning.tasks.squad_files import Answer, Question, locate, read_questions

CONTEXT = "The old fox sees  the\nlittle fox (1895-1943)."


def test_both_versions(tmp_path: Path):
    one = write(tmp_path / "one.json", CONTEXT, entry("a", "fox", 8), entry("b", "1895", 34))
    assert read_questions(one, BadRows(strict=True), training=True) == [
        Question("a", "Foxes", "what is a ?", CONTEXT, (Answer("fox", 8),), False),
        Question("b", "Foxes", "what is b ?", CONTEXT, (Answer("1895", 34),), False),
    ]
    impossible = entry("c", None, is_impossible=True, plausible_answers=[{"text": "fox", "answer_start": 8}])
    two = write(tmp_path / "two.json", CONTEXT, entry("a", "fox", 8, is_impossible=False), impossible)
    read = read_questions(two, BadRows(strict=True), training=True)
    assert [(question.is_impossible, question.answers) for question in read] == [
        (False, (Answer("fox", 8),)),
        (True, ()),
    ]


def test_a_file_in_a_store_is_read(tmp_path: Path, store):
    store.put("squad/dev.json", write(tmp_path / "dev.json", CONTEXT, entry("a", "fox", 8)).read_bytes())
    questions = read_questions("gs://bucket/squad/dev.json", BadRows(strict=True), training=True)
    assert [question.id for question in questions] == ["a"]
    with pytest.raises(InputError, match=r"gs://bucket/squad/none\.json: "):
        read_questions("gs://bucket/squad/none.json", BadRows(), training=True)


def test_nested_too_deep(tmp_path: Path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"deep\.json: .*JSON"):
        read_questions(tmp_path / "deep.json", BadRows(), training=True)


@pytest.mark.parametrize(
    ("text", "start", "expected"),
    [
        ("fox", 8, Answer("fox", 8)),
        ("fox", 29, Answer("fox", 29)),
        ("fox", 22, Answer("fox", 29)),  # not there, but near there
        ("fox", 0, Answer("fox", 8)),
        ("fox", -30, Answer("fox", 8)),
        ("fox", 999, Answer("fox", 29)),
        ("sees the little", 12, Answer("sees  the\nlittle", 12)),  # white space as the context has it
        (" fox ", 7, Answer("fox", 8)),
        ("\tfox", 28, Answer("fox", 29)),
        ("fox", 29 - len(CONTEXT), Answer("fox", 8)),
        ("(1895-1943).", 30, Answer("(1895-1943).", 33)),  # what would mean something in a regular expression
        ("Fox", 8, None),
        ("old tree", 4, None),
        ("", 4, None),
        (" \n", 16, None),
    ],
)
def test_where_an_answer_is(text: str, start: int, expected: Answer | None):
    assert locate(text, start, CONTEXT) == expected


def test_the_nearest_of_places_that_overlap():
    assert locate("a a", 3, "a a a a") == Answer("a a", 2)
    assert locate("  a", 3, "a a  a") == Answer("a", 5)
    assert locate("x x x", 5, "x  x  x  x") == Answer("x  x  x", 3)


def test_what_cannot_be_used_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write(
        tmp_path / "bad.json",
        CONTEXT,
        entry("good", "fox", 8),
        entry("nowhere", "old tree", 4),
        entry("good", "old", 4),
        {"id": "silent", "answers": []},
        {"question": "who ?", "answers": []},
        entry("none", None),
        entry("both", "fox", 8, is_impossible=True),
        {**entry("textless", None), "answers": [{"answer_start": 3}]},
        {**entry("placeless", None), "answers": [{"text": "fox"}]},
        {**entry("listless", None), "answers": {"text": "fox"}},
        entry("maybe", "fox", 8, is_impossible="no"),
        "text",
        {**entry("", None), "is_impossible": True},
        {**entry("number", None), "id": 7, "is_impossible": True},
    )
    expected = {  # the question's place in the file: the key or the value that is wrong
        "question 2 (nowhere)": "'old tree'",
        "question 3 (good)": "id",
        "question 4 (silent)": '"question"',
        "question 5": '"id"',
        "question 6 (none)": "is_impossible",
        "question 7 (both)": "is_impossible",
        "question 8 (textless)": '"text"',
        "question 9 (placeless)": '"answer_start"',
        "question 10 (listless)": '"answers"',
        "question 11 (maybe)": '"is_impossible"',
        "question 12": '"id"',
        "question 13": '"id"',
        "question 14 (7)": '"id"',
    }
    told: list[tuple[int | str, str]] = []

    class Told(BadRows):
        def add(self, path: object, place: int | str, problem: object) -> None:
            told.append((place, str(problem)))
            super().add(str(path), place, str(problem))

    bad = Told()
    assert [question.id for question in read_questions(path, bad, training=True)] == ["good"]
    for (place, reason), (question, key) in zip(told, expected.items(), strict=True):
        assert place == f"article 1 (Foxes), paragraph 1, {question}"
        assert key in reason
    assert bad.counts == {str(path): len(expected)}
    first = f"{path}: article 1 (Foxes), paragraph 1, question 2 (nowhere): "
    assert any(first in message for message in caplog.messages)
    with pytest.raises(InputError, match=r"bad\.json: article 1 \(Foxes\), paragraph 1, question 2 \(nowhere\)"):
        read_questions(path, BadRows(strict=True), training=True)


def test_nothing_is_left_out_of_a_score_because_of_its_answers(tmp_path: Path):
    hidden = {"id": "hidden", "question": "what ?"}
    both = entry("both", "fox", 8, is_impossible=True)
    path = write(tmp_path / "dev.json", CONTEXT, entry("nowhere", "old tree", 4), entry("none", None), both, hidden)
    read = read_questions(path, BadRows(strict=True), training=False)
    assert [question.answers for question in read] == [(Answer("old tree", None),), (), (Answer("fox", 8),), ()]


def test_a_moved_answer_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write(tmp_path / "moved.json", CONTEXT, entry("a", "fox", 8), entry("b", "fox", 9), entry("c", " fox", 7))
    read = read_questions(path, BadRows(strict=True), training=True)
    assert [question.answers[0].start for question in read] == [8, 8, 8]
    assert [message for message in caplog.messages if re.search(rf"{path}: .*\b1\b", message)]


def test_the_first_of_several_answers_is_learned(tmp_path: Path):
    answers = [{"text": "fox", "answer_start": 8}, {"text": "no such", "answer_start": 4}]
    path = write(tmp_path / "several.json", CONTEXT, {**entry("a", None), "answers": answers})
    (question,) = read_questions(path, BadRows(strict=True), training=True)
    assert question.answers == (Answer("fox", 8), Answer("no such", None))


def test_parts_that_are_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    good = {"context": CONTEXT, "qas": [entry("a", "fox", 8)]}
    paragraphs = [{"context": CONTEXT}, {"qas": [entry("x", "fox"), entry("y", "fox")]}, 7, good]
    file = {"data": [{"title": "One"}, {"paragraphs": paragraphs}, None]}
    path = tmp_path / "parts.json"
    path.write_text("\ufeff" + json.dumps(file))
    bad = BadRows()
    (question,) = read_questions(path, bad, training=True)
    assert (question.id, question.title) == ("a", "")
    expected = (
        r'article 1 \(One\): .*"paragraphs"',
        r'article 2, paragraph 1: .*"qas"',
        r'article 2, paragraph 2: .*"context".* 2 ',
        r'article 2, paragraph 3: .*"qas"',
        r'article 3: .*"paragraphs"',
    )
    for message, pattern in zip(caplog.messages, expected, strict=True):
        assert re.search(f"{path}: {pattern}", message)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "JSON"),
        (b'{"data": "\xff"}', "iconv"),
        (b"[]", '"data"'),
        (b'{"data": {}}', '"data"'),
        (b'{"data": []}', r"1\.1.*2\.0"),
    ],
)
def test_files_that_are_not_squad(tmp_path: Path, content: bytes, problem: str):
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"other\.json:.*{problem}"):
        read_questions(path, BadRows(), training=False)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(InputError, match=r"none\.json: "):
        read_questions(tmp_path / "none.json", BadRows(), training=True)


@pytest.mark.parametrize(
    ("name", "count", "impossible"),
    [
        ("train-v1.1.partial-12articles", 4_370, 0),
        ("train-v2.0.partial-10articles", 4_719, 348),
        ("dev-v1.1", 10_570, 0),
        ("dev-v2.0", 11_873, 5_945),
    ],
)
def test_real_files(data_dir: Path, caplog: pytest.LogCaptureFixture, name: str, count: int, impossible: int):
    caplog.set_level(logging.WARNING)
    questions = read_questions(data_dir / "squad" / f"{name}.json", BadRows(strict=True), training="train" in name)
    assert len(questions) == count
    assert sum(question.is_impossible for question in questions) == impossible
    for question in questions:
        for answer in question.answers:
            assert answer.start is not None
            assert question.context.startswith(answer.text, answer.start)
    assert not caplog.messages
