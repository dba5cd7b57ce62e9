"""SQuAD 1.1 and 2.0: their files, and exact match and F1 as in evaluate-v1.1.py and evaluate-v2.0.py.

The format is that of rajpurkar.github.io/SQuAD-explorer: {"data": [{"title", "paragraphs": [{"context", "qas": [{"id",
"question", "answers": [{"text", "answer_start"}], "is_impossible"}]}]}]}. `is_impossible` is only in 2.0;
`answer_start` is in characters.

For training, a question whose answer is not at its place in the paragraph is skipped, as in `read_squad_examples` of
google-research/bert. The reference fails at a question with several answers, as in the dev files; here the first one is
the training target.

Scores are percentages. Texts are normalized first: lowercased, without ASCII punctuation and the words a, an and the,
with single spaces. The best score over the reference answers counts. F1 compares the words of two texts as multisets.
"""

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.finetuning.task import BadRows

ROUNDING = 1e-4
"""By how much null odds differ between batch sizes, at most."""
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


@dataclass(frozen=True)
class Answer:
    """A reference answer. In training the first one is `context[start : start + len(text)]`."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question about a paragraph.

    Attributes:
      id: unique in its file.
      question: the question's text.
      context: the paragraph, as in the file. Questions about one paragraph share the string.
      answers: reference answers; empty if there is no answer, or the file has none.
      is_impossible: True if the file marks the question as unanswerable (2.0).
    """

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]
    is_impossible: bool = False


def read_questions(path: str, bad_rows: BadRows, *, training: bool, version_2: bool = True) -> list[Question]:
    """Reads the questions of a file, in its order.

    Args:
      path: JSON in the format of SQuAD 1.1 or 2.0.
      bad_rows: collects skipped questions: with a missing, invalid or duplicate key. In training also one without an
        answer that is not marked impossible, one with an answer that is, and one whose first answer is not at its
        place.
      training: False skips no question because of its answers, so that the score covers all questions.
      version_2: whether a question to train on may be impossible, as in SQuAD 2.0.

    Raises:
      InputError: file not found, not in SQuAD's format, or no usable question; with a strict `bad_rows` also for a
        skipped question.
    """
    try:
        paragraphs = [
            paragraph
            for article in json.loads(atomic.read_whole(remote.parse_path(path)))["data"]
            for paragraph in article["paragraphs"]
        ]
        entries = [(paragraph["context"], entry) for paragraph in paragraphs for entry in paragraph["qas"]]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); expected a SQuAD file") from error
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise InputError(f"{path}: {error!r:.200}; expected the JSON of SQuAD 1.1 or 2.0, in UTF-8") from error
    questions: dict[str, Question] = {}
    for number, (context, entry) in enumerate(entries, start=1):
        name = f" ({entry['id']})" if isinstance(entry, dict) and entry.get("id") else ""
        try:
            question = _question(context, entry, training, version_2)
            if question.id in questions:
                raise ValueError("duplicate id")
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            problem = error if isinstance(error, ValueError) else ValueError(f"missing or invalid key: {error}")
            bad_rows.add(path, f"question {number}{name}", problem)
        else:
            questions[question.id] = question
    bad_rows.check_usable(path, [*questions], "a question in the format of SQuAD 1.1 or 2.0")
    return list(questions.values())


def _question(context: str, entry: Mapping[str, Any], training: bool, version_2: bool) -> Question:
    """Returns the question of an entry. Raises ValueError, LookupError, TypeError or AttributeError if it is bad."""
    given = [(answer["text"], int(answer.get("answer_start", -1))) for answer in entry.get("answers") or ()]
    is_impossible = entry.get("is_impossible") is True
    if not entry["id"] or not entry["question"]:
        raise ValueError('"id" and "question" must not be empty')
    "".join((str(entry["id"]), entry["question"], context, *(text for text, _ in given))).encode()  # all are text
    if training and is_impossible and not version_2:
        raise ValueError("is_impossible=true is of SQuAD 2.0; use config=finetune/squad:2.0")
    if training and is_impossible == bool(given):
        raise ValueError(f"is_impossible={str(is_impossible).lower()}, but it has {len(given)} answers")
    for text, start in given[:1] if training else ():
        if start < 0 or not text.strip() or not context.startswith(text, start):
            raise ValueError(f"answer {text!r:.60} is not at answer_start={start} in the context")
    return Question(str(entry["id"]), entry["question"], context, tuple(Answer(*one) for one in given), is_impossible)


# --- Scores -----------------------------------------------------------------------------------------------------------


def normalize_answer(text: str) -> str:
    """Returns the normalized text."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """Returns 1.0 if the normalized texts are equal, else 0.0."""
    return float(normalize_answer(prediction) == normalize_answer(answer))


def f1(prediction: str, answer: str, *, empty_is_equal: bool = True) -> float:
    """Returns the F1, 0.0 to 1.0, of the prediction's words against the answer's.

    Args:
      prediction, answer: any texts.
      empty_is_equal: two texts without a word score 1.0, as in the script of 2.0; in that of 1.1 they score 0.0.
    """
    predicted, given = normalize_answer(prediction).split(), normalize_answer(answer).split()
    if empty_is_equal and not (predicted and given):
        return float(predicted == given)
    same = (Counter(predicted) & Counter(given)).total()
    if not same:
        return 0.0
    precision, recall = same / len(predicted), same / len(given)
    return 2 * precision * recall / (precision + recall)


def score_v1(questions: Sequence[Question], predictions: Sequence[str]) -> dict[str, float]:
    """Returns `exact_match` and `f1` of SQuAD 1.1, in percent, averaged over all questions.

    Each question has a reference answer and, in the same order, a prediction.
    """
    exact = total_f1 = 0.0
    for question, prediction in zip(questions, predictions, strict=True):
        exact += max(exact_match(prediction, answer.text) for answer in question.answers)
        total_f1 += max(f1(prediction, answer.text, empty_is_equal=False) for answer in question.answers)
    return {"exact_match": 100.0 * exact / len(questions), "f1": 100.0 * total_f1 / len(questions)}


def score_v2(
    questions: Sequence[Question], predictions: Sequence[str], null_odds: Sequence[float], null_threshold: float
) -> dict[str, float]:
    """Returns the official metrics of SQuAD 2.0 by their official names: percentages, and numbers of questions.

    Keys: `exact`, `f1` and `total`; the same with the prefixes `HasAns_` and `NoAns_` for questions with and without an
    answer, if any; `best_exact`, `best_exact_thresh`, `best_f1` and `best_f1_thresh`. A question has an answer if its
    file gives one, regardless of `is_impossible`.

    Args:
      questions: the questions to score.
      predictions: for each; "" is "no answer".
      null_odds: for each, higher if an answer is less likely; the script's `--na-prob-file`.
      null_threshold: null odds above which any prediction counts as ""; the script's `--na-prob-thresh`.
    """
    has_answer, exact, f1s = _scores(questions, predictions)
    abstains = np.asarray(null_odds) > null_threshold
    exact, f1s = (np.where(abstains, ~has_answer, scores) for scores in (exact, f1s))
    result: dict[str, float] = {}
    for prefix, part in {"": has_answer | True, "HasAns_": has_answer, "NoAns_": ~has_answer}.items():
        if part.any():
            result[f"{prefix}exact"] = 100.0 * float(exact[part].mean())
            result[f"{prefix}f1"] = 100.0 * float(f1s[part].mean())
            result[f"{prefix}total"] = int(part.sum())
    for name, best in best_thresholds(questions, predictions, null_odds).items():
        result[f"best_{name}"], result[f"best_{name}_thresh"] = best
    return result


def best_thresholds(
    questions: Sequence[Question], predictions: Sequence[str], null_odds: Sequence[float]
) -> dict[str, tuple[float, float]]:
    """Returns the best `exact` and `f1`, in percent, each with its threshold on the null odds: the script's search.

    Args:
      questions: the questions to tune on.
      predictions: for each, the best non-empty answer. Predictions that a threshold has already set to "" hide the
        effect of a higher threshold.
      null_odds: for each; null odds greater than the threshold mean "no answer". Where that is best for every question,
        the threshold is 0.0, as the script's, if all null odds are above it, and otherwise below all of them.
    """
    has_answer, exact, f1s = _scores(questions, predictions)
    order = np.argsort(null_odds, kind="stable")
    sorted_odds = np.asarray(null_odds)[order].tolist()
    thresholds = [min(0.0, sorted_odds[0] - 2 * ROUNDING), *sorted_odds]
    result = {}
    for name, scores in (("exact", exact), ("f1", f1s)):
        # Start below all null odds, where every prediction is "no answer", and raise the threshold.
        gains = np.where(has_answer, scores, [-float(text != "") for text in predictions])[order]
        totals = np.cumsum([float((~has_answer).sum()), *gains])
        best = int(totals.argmax())
        result[name] = 100.0 * float(totals[best]) / len(questions), thresholds[best]
    return result


def _scores(questions: Sequence[Question], predictions: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns for each question whether it has an answer, and exact match and F1, 0.0 to 1.0."""
    exact, f1s = [], []
    for question, prediction in zip(questions, predictions, strict=True):
        # An answer such as "the" is empty after normalization; then "no answer" is correct.
        answers = [answer.text for answer in question.answers if normalize_answer(answer.text)] or [""]
        exact.append(max(exact_match(prediction, answer) for answer in answers))
        f1s.append(max(f1(prediction, answer) for answer in answers))
    return np.array([bool(question.answers) for question in questions]), np.array(exact), np.array(f1s)
