"""SQuAD 1.1 and 2.0 files: questions about paragraphs, with reference answers.

The format is that of rajpurkar.github.io/SQuAD-explorer: {"data": [{"title", "paragraphs": [{"context", "qas": [{"id",
"question", "answers": [{"text", "answer_start"}], "is_impossible"}]}]}]}. `is_impossible` is only in 2.0;
`answer_start` is in characters.

For training, a question whose answer does not occur in its paragraph is skipped, as in `read_squad_examples` of
google-research/bert. There are two differences. The reference also skips a question whose answer occurs in the
paragraph but not at its `answer_start`; here the nearest occurrence is used. The reference fails at a question with
several answers, as in the dev files; here the first one is the training target.
"""

import codecs
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.files.text_files import Utf8
from bert_jax.finetuning.rows import BadRows

log = logging.getLogger(__name__)

_EXCERPT = 60  # maximum characters of a text in a message


@dataclass(frozen=True)
class Answer:
    """A reference answer.

    Attributes:
      text: `context[start : start + len(text)]`, or the file's text if it does not occur in the context.
      start: in characters of the context; None if the text does not occur in it. Never None for the first answer in
        training.
    """

    text: str
    start: int | None


@dataclass(frozen=True)
class Question:
    """A question about a paragraph.

    Attributes:
      id: unique in its file.
      title: the article's title; empty if the file has none.
      question: the question's text.
      context: the paragraph, as in the file. Questions about one paragraph share the string.
      answers: reference answers; empty if there is no answer, or the file has none.
      is_impossible: True if the file marks the question as unanswerable (2.0).
    """

    id: str
    title: str
    question: str
    context: str
    answers: tuple[Answer, ...]
    is_impossible: bool = False


class _Problem(Exception):
    """A problem of a question."""


def read_questions(path: str | PathLike[str], bad_rows: BadRows, *, training: bool) -> list[Question]:
    """Reads the questions of a file, in its order.

    Args:
      path: JSON in the format of SQuAD 1.1 or 2.0.
      bad_rows: collects skipped entries: without id, question or context, or with a duplicate id. In training also a
        question without an answer that is not marked impossible, one with an answer that is, and one whose first
        answer does not occur in the context. Kind and amount of whitespace are ignored.
      training: False skips no question because of its answers, so that the score covers all questions.

    Raises:
      InputError: file not found, not JSON, not in SQuAD's format, or no usable question; with a strict `bad_rows` also
        for a skipped entry.
    """
    data = _load(path)
    questions: dict[str, Question] = {}
    moved = 0
    for where, article, paragraph, entry in _entries(path, data, bad_rows):
        try:
            question, is_moved = _question(article, paragraph, entry, training)
            if question.id in questions:
                raise _Problem("duplicate id")
        except _Problem as problem:
            bad_rows.add(path, where, str(problem))
            continue
        questions[question.id] = question
        moved += is_moved
    if moved:
        log.warning(
            "%s: %d questions have an answer not at its answer_start; using the nearest occurrence", path, moved
        )
    bad_rows.check_usable(path, [*questions], "a question in the format of SQuAD 1.1 or 2.0")
    return list(questions.values())


def locate(text: str, start: int, context: str) -> Answer | None:
    """Finds an answer in its context: at `start`, or else its nearest occurrence; None if it does not occur.

    Any whitespace matches any other; the returned answer has the whitespace of the context.
    """
    start += len(text) - len(text.lstrip())
    text = text.strip()
    if not text:
        return None
    if start >= 0 and context.startswith(text, start):
        return Answer(text, start)
    # A lookahead finds overlapping occurrences: the nearest may begin inside another.
    places = re.finditer(r"(?=(" + r"\s+".join(map(re.escape, text.split())) + r"))", context)
    nearest = min(places, key=lambda place: abs(place.start() - start), default=None)
    return Answer(nearest[1], nearest.start()) if nearest else None


def _load(path: str | PathLike[str]) -> list[Any]:
    try:
        content = atomic.read_whole(remote.parse_path(path)).removeprefix(codecs.BOM_UTF8)
        file = json.loads(Utf8().decode(content))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); expected a SQuAD file") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON in UTF-8 ({error}); expected a SQuAD file") from error
    data = file.get("data") if isinstance(file, dict) else None
    if not isinstance(data, list):
        raise InputError(f'{path}: "data" must be a list of articles; expected a file of SQuAD 1.1 or 2.0')
    return data


def _entries(
    path: str | PathLike[str], data: list[Any], bad_rows: BadRows
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], Any]]:
    """Yields position, article, paragraph and entry of all questions; positions are numbered from 1."""
    for article_number, article in enumerate(data, start=1):
        where = f"article {article_number}"
        if not isinstance(article, dict) or not isinstance(article.get("paragraphs"), list):
            bad_rows.add(path, where, '"paragraphs" must be a list')
            continue
        if article.get("title"):
            where += f" ({article['title']!s:.{_EXCERPT}})"
        for paragraph_number, paragraph in enumerate(article["paragraphs"], start=1):
            in_article = f"{where}, paragraph {paragraph_number}"
            if not isinstance(paragraph, dict) or not isinstance(paragraph.get("qas"), list):
                bad_rows.add(path, in_article, '"qas" must be a list of questions')
                continue
            if not isinstance(paragraph.get("context"), str):
                lost = len(paragraph["qas"])
                bad_rows.add(path, in_article, f'"context" must be a string; skipping its {lost} questions')
                continue
            for number, entry in enumerate(paragraph["qas"], start=1):
                name = f" ({entry['id']})" if isinstance(entry, dict) and entry.get("id") else ""
                yield f"{in_article}, question {number}{name}", article, paragraph, entry


def _question(article: dict[str, Any], paragraph: dict[str, Any], entry: Any, training: bool) -> tuple[Question, bool]:
    """Returns the question, and True if one of its answers is not at its `answer_start`."""
    if not isinstance(entry, dict):
        raise _Problem("expected a JSON object")
    for key in ("id", "question"):
        if not isinstance(entry.get(key), str) or not entry[key]:
            raise _Problem(f'"{key}" must be a non-empty string')
    is_impossible = entry.get("is_impossible", False)
    if not isinstance(is_impossible, bool):
        raise _Problem('"is_impossible" must be true or false')
    context = paragraph["context"]
    for key, text in (("id", entry["id"]), ("question", entry["question"]), ("context", context)):
        _check_characters(key, text)
    given = _given_answers(entry)
    if training:
        if is_impossible and given:
            raise _Problem("is_impossible=true, but it has an answer")
        if not is_impossible and not given:
            raise _Problem("is_impossible=false, but it has no answer")
    answers = []
    moved = False
    for index, (text, start) in enumerate(given):
        answer = locate(text, start, context)
        if answer is None and training and index == 0:
            raise _Problem(f"answer {text!r:.{_EXCERPT}} not found in the context")
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
    """Raises _Problem for a lone surrogate, which JSON can escape but UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise _Problem(f'"{key}" has a lone surrogate (\\u{half:04x}), which is not a character; remove it') from error


def _given_answers(entry: dict[str, Any]) -> list[tuple[str, int]]:
    answers = entry.get("answers", [])
    if not isinstance(answers, list):
        raise _Problem('"answers" must be a list')
    for answer in answers:
        if not isinstance(answer, dict) or not isinstance(answer.get("text"), str):
            raise _Problem('"text" of an answer must be a string')
        _check_characters("text", answer["text"])
        start = answer.get("answer_start")
        if not isinstance(start, int) or isinstance(start, bool):
            raise _Problem('"answer_start" of an answer must be an integer')
    return [(answer["text"], answer["answer_start"]) for answer in answers]
