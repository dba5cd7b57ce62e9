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
    questions: dict[str, Question] = {}
    moved = 0
    for where, article, paragraph, entry in _entries(path, bad_rows):
        try:
            question, is_moved = _question(article, paragraph, entry, training)
            if question.id in questions:
                raise ValueError("duplicate id")
        except ValueError as problem:
            bad_rows.add(path, where, problem)
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


def _field(value: Any, key: str, kind: type, default: Any = None) -> Any:
    """Returns a value of a JSON object. Raises ValueError for another type than `kind`, and for text that is none."""
    found: Any = value.get(key, default) if isinstance(value, dict) else None
    if type(found) is not kind:
        raise ValueError(f'"{key}" must be a {kind.__name__}, got {found!r:.{_EXCERPT}}')
    if isinstance(found, str):
        found.encode()  # UnicodeEncodeError, a ValueError, for half a surrogate pair
    return found


def _entries(path: str | PathLike[str], bad_rows: BadRows) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yields position, article, paragraph and entry of all questions; positions are numbered from 1."""
    try:
        content = atomic.read_whole(remote.parse_path(path)).removeprefix(codecs.BOM_UTF8)
        data = _field(json.loads(Utf8().decode(content)), "data", list)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); expected a SQuAD file") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {error}; expected the JSON of SQuAD 1.1 or 2.0, in UTF-8") from error
    for article_number, article in enumerate(data, start=1):
        where = f"article {article_number}"
        try:
            title = article.get("title") if isinstance(article, dict) else None
            where += f" ({title!s:.{_EXCERPT}})" if title else ""
            for number, paragraph in enumerate(_field(article, "paragraphs", list), start=1):
                in_article = f"{where}, paragraph {number}"
                try:
                    yield from _in_paragraph(in_article, article, paragraph)
                except ValueError as problem:
                    bad_rows.add(path, in_article, problem)
        except ValueError as problem:
            bad_rows.add(path, where, problem)


def _in_paragraph(where: str, article: Any, paragraph: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    entries = _field(paragraph, "qas", list)
    try:
        _field(paragraph, "context", str)
    except ValueError as problem:
        raise ValueError(f"{problem}; skipping its {len(entries)} questions") from problem
    for number, entry in enumerate(entries, start=1):
        name = f" ({entry['id']})" if isinstance(entry, dict) and entry.get("id") else ""
        yield f"{where}, question {number}{name}", article, paragraph, entry


def _question(article: Any, paragraph: Any, entry: Any, training: bool) -> tuple[Question, bool]:
    """Returns the question, and True if one of its answers is not at its `answer_start`. ValueError if it is bad."""
    identity, asked = _field(entry, "id", str), _field(entry, "question", str)
    if not (identity and asked):
        raise ValueError('"id" and "question" must not be empty')
    is_impossible = _field(entry, "is_impossible", bool, False)
    context = paragraph["context"]
    listed: list[Any] = _field(entry, "answers", list, [])
    given = [(_field(answer, "text", str), _field(answer, "answer_start", int)) for answer in listed]
    if training and is_impossible == bool(given):
        raise ValueError(f"is_impossible={str(is_impossible).lower()}, but it has {len(given)} answers")
    answers, moved = [], False
    for index, (text, start) in enumerate(given):
        answer = locate(text, start, context)
        if answer is None and training and index == 0:
            raise ValueError(f"answer {text!r:.{_EXCERPT}} not found in the context")
        moved |= answer is not None and answer.start != start + len(text) - len(text.lstrip())
        answers.append(answer or Answer(text, None))
    title = article.get("title")
    return (
        Question(identity, title if isinstance(title, str) else "", asked, context, tuple(answers), is_impossible),
        moved,
    )
