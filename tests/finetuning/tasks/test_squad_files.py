"""SQuAD: what of its files is used, what is skipped, and the official scores, against their rules said once more."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.squad_examples import entry, write

from bert_jax.errors import InputError
from bert_jax.finetuning.task import BadRows
from bert_jax.finetuning.tasks.squad import SquadTask
from bert_jax.finetuning.tasks.squad_files import (
    ROUNDING,
    Answer,
    Question,
    best_thresholds,
    exact_match,
    f1,
    normalize_answer,
    read_questions,
    score_v1,
    score_v2,
)

CONTEXT = "The old fox sees  the\nlittle fox (1895-1943)."


def read(path: Path, bad_rows: BadRows | None = None, *, training: bool = True) -> list[Question]:
    return read_questions(str(path), bad_rows or BadRows(strict=True), training=training)


def test_both_versions(tmp_path: Path):
    one = write(tmp_path / "one.json", CONTEXT, entry("a", "fox", 8), entry("b", "1895", 34))
    one.write_text("\ufeff" + one.read_text())
    assert read(one) == [
        Question("a", "what is a ?", CONTEXT, (Answer("fox", 8),), False),
        Question("b", "what is b ?", CONTEXT, (Answer("1895", 34),), False),
    ]
    impossible = entry("c", None, is_impossible=True, plausible_answers=[{"text": "fox", "answer_start": 8}])
    two = read(write(tmp_path / "two.json", CONTEXT, entry("a", "fox", 8, is_impossible=False), impossible))
    assert [(question.is_impossible, question.answers) for question in two] == [
        (False, (Answer("fox", 8),)), (True, ())
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (entry("nowhere", "old tree", 4), "'old tree'"),
        (entry("beside", "fox", 9), "'fox'"),
        (entry("before", "fox", 29 - len(CONTEXT)), "answer_start=-16"),
        (entry("empty", " ", 3), "' '"),
        (entry("good", "fox", 8), "duplicate id"),
        (entry("none", None), "is_impossible=false"),
        (entry("both", "fox", 8, is_impossible=True), "is_impossible=true"),
        ({**entry("silent", "fox", 8), "question": ""}, '"question"'),
        ({"id": "silent", "answers": []}, "'question'"),
        ({**entry("textless", None), "answers": [{"answer_start": 3}]}, "'text'"),
        ({**entry("placeless", None), "answers": [{"text": "fox"}]}, "answer_start=-1"),
        ({**entry("half", None), "question": "\ud800", "is_impossible": True}, "surrogates"),
        ("text", "attribute"),
        (None, "attribute"),
    ],
)
def test_questions_that_cannot_be_learned_are_skipped_and_named(bad: object, problem: str, tmp_path: Path):
    path, bad_rows = write(tmp_path / "bad.json", CONTEXT, entry("good", "fox", 8), bad), BadRows()
    assert [question.id for question in read(path, bad_rows)] == ["good"]
    assert bad_rows.counts == {str(path): 1}
    with pytest.raises(InputError, match=rf"^{path}: question 2\b.*{re.escape(problem)}"):
        read(path, BadRows(strict=True))


def test_no_question_is_left_out_of_a_score_because_of_its_answers(tmp_path: Path):
    hidden = {"id": "hidden", "question": "what ?"}
    both = entry("both", "fox", 8, is_impossible=True)
    null = {**hidden, "id": 7, "answers": None}
    placeless = {**hidden, "id": "placeless", "answers": [{"text": "fox"}]}
    entries = [entry("nowhere", "old tree", 4), entry("none", None), both, hidden, null, placeless]
    questions = read(write(tmp_path / "dev.json", CONTEXT, *entries), training=False)
    assert [question.id for question in questions] == ["nowhere", "none", "both", "hidden", "7", "placeless"]
    answers = [[answer.text for answer in question.answers] for question in questions]
    assert answers == [["old tree"], [], ["fox"], [], [], ["fox"]]


def test_an_impossible_question_of_a_training_file_is_skipped_and_counted_in_version_1(tmp_path: Path):
    impossible, bad_rows = entry("a", None, is_impossible=True), BadRows()
    path = write(tmp_path / "train.json", CONTEXT, impossible, entry("b", "fox", 8))
    assert [question.id for question in SquadTask().read(str(path), bad_rows, split="train")] == ["b"]
    assert bad_rows.counts == {str(path): 1}
    with pytest.raises(InputError, match=r"none\.json.*is_impossible=true.*finetune/squad:2\.0"):
        SquadTask().read(str(write(tmp_path / "none.json", CONTEXT, impossible)), BadRows(), split="train")


def test_the_first_of_several_answers_is_learned(tmp_path: Path):
    answers = [{"text": "fox", "answer_start": 8}, {"text": "no such", "answer_start": 4}]
    (question,) = read(write(tmp_path / "several.json", CONTEXT, {**entry("a", None), "answers": answers}))
    assert question.answers == (Answer("fox", 8), Answer("no such", 4))


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000, "{", b'{"data": "\xff"}', "[]", '{"data": {}}', '{"data": []}', '{"data": [null]}',
        '{"data": [{"title": "One"}]}', '{"data": [{"paragraphs": [{"qas": []}]}]}',
        '{"data": [{"paragraphs": [{"context": "fox"}]}]}',
    ],
    ids=range(10),
)  # fmt: skip
def test_files_that_are_not_squad(tmp_path: Path, content: str | bytes):
    path = tmp_path / "other.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=r"other\.json: .*SQuAD 1\.1 or 2\.0"):
        read(path, BadRows())
    with pytest.raises(InputError, match=r"none\.json: "):
        read(tmp_path / "none.json", BadRows())


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
    questions = read(data_dir / "squad" / f"{name}.json", training="train" in name)
    assert len(questions) == count
    assert sum(question.is_impossible for question in questions) == impossible
    for question in questions:
        for answer in question.answers:
            assert question.context.startswith(answer.text, answer.start)
    assert not caplog.messages


# --- Scores -----------------------------------------------------------------------------------------------------------

WORDS = [
    "a", "an", "the", "The", "A", "fox", "fox's", "FOX", "old", "Ünder", "the-fox", "a.b", "an_the", "日本", "—",
    "“fox”", "...", "$5", "\u00a0", "İ", "ß",
]  # fmt: skip
texts = st.one_of(
    st.text(max_size=12),
    st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join),
    st.lists(st.sampled_from([*WORDS, " ", "\n", "\t", "-", "the"]), max_size=8).map("".join),
)


def slow_words(text: str) -> list[str]:
    """Letter by letter: lower case, no ASCII punctuation, and no article that stands by itself."""
    kept = "".join(c for c in text.lower() if c not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
    parts = re.split(r"(\w+)", kept)  # A word of a regular expression is what an article's two ends are those of.
    return "".join(" " if part in ("a", "an", "the") else part for part in parts).split()


def slow_f1(prediction: str, answer: str, version: int) -> float:
    predicted, given = slow_words(prediction), slow_words(answer)
    if version == 2 and (not predicted or not given):
        return 1.0 if predicted == given else 0.0
    same, left = 0, list(given)
    for word in predicted:
        if word in left:
            left.remove(word)
            same += 1
    if same == 0:
        return 0.0
    precision, recall = same / len(predicted), same / len(given)
    return 2 * precision * recall / (precision + recall)


def slow_v2(questions: list[Question], predictions: list[str]) -> tuple[list[float], list[float]]:
    exact, overlap = [], []
    for question, predicted in zip(questions, predictions, strict=True):
        golds = [answer.text for answer in question.answers if slow_words(answer.text)]
        golds = golds or [""]
        exact.append(max(1.0 if slow_words(gold) == slow_words(predicted) else 0.0 for gold in golds))
        overlap.append(max(slow_f1(predicted, gold, 2) for gold in golds))
    return exact, overlap


def every_threshold(questions: list[Question], best: list[str], scores: list[float], odds: list[float]) -> float:
    """The best mean score, in percent, of all thresholds; each tried by itself."""
    results = []
    for threshold in [-1e9, *odds]:
        total = 0.0
        for question, text, score, own in zip(questions, best, scores, odds, strict=True):
            no_answer = own > threshold or not text
            total += float(not question.answers) if no_answer else score * bool(question.answers)
        results.append(100 * total / len(questions))
    return max(results)


def question(name: str, *answers: str) -> Question:
    return Question(name, "?", " ".join(answers), tuple(Answer(answer, 0) for answer in answers), not answers)


@settings(max_examples=80, deadline=None)
@given(texts, texts)
def test_two_texts(prediction: str, answer: str):
    assert normalize_answer(prediction) == " ".join(slow_words(prediction))
    assert exact_match(prediction, answer) == float(slow_words(prediction) == slow_words(answer))
    assert f1(prediction, answer) == slow_f1(prediction, answer, 2)
    assert f1(prediction, answer, empty_is_equal=False) == slow_f1(prediction, answer, 1)


def test_version_1():
    questions = [question("a", "fox", "old fox"), question("b", "the owl"), question("c", "tree")]
    scores = score_v1(questions, ["the old fox", "owl tree", "leaf"])
    assert scores == {"exact_match": pytest.approx(100 / 3), "f1": pytest.approx(100 * (1 + 2 / 3) / 3)}
    assert score_v1([question("a", "the")], ["an"]) == {"exact_match": 100.0, "f1": 0.0}


@pytest.mark.parametrize("seed", range(10))
def test_random_files_of_version_2(seed: int):
    rng = random.Random(seed)

    real_words = seed % 2 == 1

    def text() -> str:
        return " ".join([*rng.choices(WORDS, k=rng.randint(1, 3)), *["owl"] * real_words])

    questions = [question(str(n), *(text() for _ in range(rng.choice([0, 0, 1, 3])))) for n in range(40)]
    predictions = [rng.choice([*(answer.text for answer in one.answers), text(), ""]) for one in questions]
    odds = [rng.gauss(0.0, 3.0) for _ in questions]
    exact, overlap = slow_v2(questions, predictions)
    scores = score_v2(questions, predictions, odds, 99.0)
    has_answer = [bool(one.answers) for one in questions]
    for prefix, part in (("", [True] * 40), ("HasAns_", has_answer), ("NoAns_", [not has for has in has_answer])):
        assert scores[f"{prefix}exact"] == pytest.approx(100 * np.mean(np.array(exact)[part]))
        assert scores[f"{prefix}f1"] == pytest.approx(100 * np.mean(np.array(overlap)[part]))
        assert scores[f"{prefix}total"] == sum(part)
    best = [value or "fox" for value in predictions]
    exact, overlap = slow_v2(questions, best)
    for name, each in (("exact", exact), ("f1", overlap)):
        found = best_thresholds(questions, best, odds)[name]
        assert found[0] == pytest.approx(every_threshold(questions, best, each, odds))
        reached = score_v2(questions, best, odds, found[1])[name]
        # The search does not see that the script takes "the" for no answer.
        assert reached == pytest.approx(found[0]) if real_words else reached > found[0] - 1e-9
        assert score_v2(questions, best, odds, found[1] + ROUNDING)[name] == pytest.approx(reached)
