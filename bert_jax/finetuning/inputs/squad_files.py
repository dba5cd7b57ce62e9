"""SQuAD 1.1 and 2.0 as their files have them: questions on paragraphs, with the answers that people gave.

The format is that of rajpurkar.github.io/SQuAD-explorer: {"data": [{"title", "paragraphs": [{"context", "qas": [{"id",
"question", "answers": [{"text", "answer_start"}], "is_impossible"}]}]}]}, where `is_impossible` is of 2.0 alone and
`answer_start` is counted in characters.

For training, a question whose answer its paragraph does not contain is left out, as by `read_squad_examples` of
google-research/bert. Two things are different. The reference also leaves out a question whose answer stands in the
paragraph but not at its `answer_start`; here the nearest place where it does stand is taken. And the reference stops at
a question with several answers, as those of the dev files are; here the first of them is the one to learn.
"""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.finetuning.inputs.bad_rows import BadRows
from bert_jax.finetuning.inputs.tables import conversion

log = logging.getLogger(__name__)

_EXCERPT = 60  # characters of a text that a message shows


@dataclass(frozen=True)
class Answer:
    """An answer that someone gave.

    Attributes:
      text: `context[start : start + len(text)]`, or what the file says where the context has no such text.
      start: in characters of the context; None where the context has no such text (never in training).
    """

    text: str
    start: int | None


@dataclass(frozen=True)
class Question:
    """A question on a paragraph.

    Attributes:
      id: unique in its file.
      title: of the article; empty if the file has none.
      question: the question's text.
      context: the paragraph, as in the file. Questions on one paragraph share the string.
      answers: the right ones; none where there is no answer, or where the file does not tell.
      is_impossible: the file says that the paragraph does not answer the question (2.0).
    """

    id: str
    title: str
    question: str
    context: str
    answers: tuple[Answer, ...]
    is_impossible: bool = False


class _Problem(Exception):
    """What is wrong with a question."""


def read_questions(path: str | PathLike[str], bad_rows: BadRows, *, training: bool) -> list[Question]:
    """The questions of a file, in its order.

    Args:
      path: JSON in the format of SQuAD 1.1 or 2.0.
      bad_rows: is told what is left out: what has no id, question or context, or an id that was there before; and,
        in training, a question without an answer that is not said to be impossible, one that is said to be and has
        one, or one whose first answer is not in the context. Whether white space is a space or a line's end, one or
        several, does not matter.
      training: for evaluation nothing is left out because of its answers: the score would be that of other questions.

    Raises:
      InputError: no such file, not JSON, not SQuAD's, or no question that can be used; or, where `bad_rows` is
        strict, something has to be left out.
    """
    data = _load(path)
    questions: dict[str, Question] = {}
    moved = 0
    for where, article, paragraph, entry in _entries(path, data, bad_rows):
        try:
            question, is_moved = _question(article, paragraph, entry, training)
            if question.id in questions:
                raise _Problem("the id was there before")
        except _Problem as problem:
            bad_rows.add(path, None, f"{where}: {problem}")
            continue
        questions[question.id] = question
        moved += is_moved
    if moved:
        log.warning("%s: of %d questions an answer is not at its answer_start; the nearest place is taken", path, moved)
    if not questions:
        raise InputError(f"{path}: not one question that can be used; give a file in the format of SQuAD 1.1 or 2.0")
    return list(questions.values())


def locate(text: str, start: int, context: str) -> Answer | None:
    """Where an answer stands in its context: at `start`, or at the place nearest to it, or None if nowhere.

    White space is white space: the answer that is returned has the context's own.
    """
    start += len(text) - len(text.lstrip())
    text = text.strip()
    if not text:
        return None
    if start >= 0 and context.startswith(text, start):
        return Answer(text, start)
    # Inside a lookahead: occurrences may overlap, and the nearest may be one that begins inside another.
    places = re.finditer(r"(?=(" + r"\s+".join(map(re.escape, text.split())) + r"))", context)
    nearest = min(places, key=lambda place: abs(place.start() - start), default=None)
    return Answer(nearest[1], nearest.start()) if nearest else None


def _load(path: str | PathLike[str]) -> list[Any]:
    try:
        file = _parse(path, atomic.read_whole(remote.named(path)))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); name a file of SQuAD") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON that can be read ({error}); name a file of SQuAD") from error
    data = file.get("data") if isinstance(file, dict) else None
    if not isinstance(data, list):
        raise InputError(f'{path}: has no list of articles under "data"; name a file of SQuAD 1.1 or 2.0')
    return data


def _parse(path: str | PathLike[str], content: bytes) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: not valid UTF-8 ({error.reason}); {conversion(path)}") from error


def _entries(
    path: str | PathLike[str], data: list[Any], bad_rows: BadRows
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], Any]]:
    """Where it is, article, paragraph and entry of all questions; articles and paragraphs are counted from 1."""
    for article_number, article in enumerate(data, start=1):
        where = f"article {article_number}"
        if not isinstance(article, dict) or not isinstance(article.get("paragraphs"), list):
            bad_rows.add(path, None, f'{where}: has no list of "paragraphs"')
            continue
        if article.get("title"):
            where += f" ({article['title']!s:.{_EXCERPT}})"
        for paragraph_number, paragraph in enumerate(article["paragraphs"], start=1):
            in_article = f"{where}, paragraph {paragraph_number}"
            if not isinstance(paragraph, dict) or not isinstance(paragraph.get("qas"), list):
                bad_rows.add(path, None, f'{in_article}: has no list of questions, "qas"')
                continue
            if not isinstance(paragraph.get("context"), str):
                lost = len(paragraph["qas"])
                bad_rows.add(path, None, f'{in_article}: has no text as "context"; it has {lost} questions')
                continue
            for number, entry in enumerate(paragraph["qas"], start=1):
                name = f" ({entry['id']})" if isinstance(entry, dict) and entry.get("id") else ""
                yield f"{in_article}, question {number}{name}", article, paragraph, entry


def _question(article: dict[str, Any], paragraph: dict[str, Any], entry: Any, training: bool) -> tuple[Question, bool]:
    """The question, and whether one of its answers was not where the file says."""
    if not isinstance(entry, dict):
        raise _Problem("is no JSON object")
    for key in ("id", "question"):
        if not isinstance(entry.get(key), str) or not entry[key]:
            raise _Problem(f'has no text as "{key}"')
    is_impossible = entry.get("is_impossible", False)
    if not isinstance(is_impossible, bool):
        raise _Problem('"is_impossible" is neither true nor false')
    context = paragraph["context"]
    for key, text in (("id", entry["id"]), ("question", entry["question"]), ("context", context)):
        _check_characters(key, text)
    given = _given_answers(entry)
    if training:
        if is_impossible and given:
            raise _Problem("is said to be impossible, and has an answer")
        if not is_impossible and not given:
            raise _Problem("has no answer, and is not said to be impossible")
    answers = []
    moved = False
    for index, (text, start) in enumerate(given):
        answer = locate(text, start, context)
        if answer is None and training and index == 0:
            raise _Problem(f"the answer {text!r:.{_EXCERPT}} is not in the context")
        if answer is not None:
            moved |= answer.start != start + len(text) - len(text.lstrip())
        answers.append(answer or Answer(text, None))
    title = article.get("title")
    return (
        Question(
            id=entry["id"],
            title=title if isinstance(title, str) else "",
            question=entry["question"],
            context=context,
            answers=tuple(answers),
            is_impossible=is_impossible,
        ),
        moved,
    )


def _check_characters(key: str, text: str) -> None:
    """_Problem for half of a surrogate pair, which JSON can escape and no UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise _Problem(
            f'"{key}" has half of a surrogate pair (\\u{half:04x}), which is no character: remove it'
        ) from error


def _given_answers(entry: dict[str, Any]) -> list[tuple[str, int]]:
    answers = entry.get("answers", [])
    if not isinstance(answers, list):
        raise _Problem('"answers" is no list')
    for answer in answers:
        if not isinstance(answer, dict) or not isinstance(answer.get("text"), str):
            raise _Problem('an answer has no "text"')
        _check_characters("text", answer["text"])
        start = answer.get("answer_start")
        if not isinstance(start, int) or isinstance(start, bool):
            raise _Problem('an answer has no whole number as "answer_start"')
    return [(answer["text"], answer["answer_start"]) for answer in answers]
