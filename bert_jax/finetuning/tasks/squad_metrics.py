"""Exact match and F1 of SQuAD 1.1 and 2.0, as the official scripts have them: evaluate-v1.1.py and evaluate-v2.0.py.

Both are percentages. Texts are compared lower-cased, without ASCII punctuation and the words a, an and the, words apart
by one space; the best of the answers that people gave counts. F1 is that of the words of the two texts as multisets.
"""

import logging
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bert_jax.errors import InputError
from bert_jax.finetuning.inputs.squad_files import Question

log = logging.getLogger(__name__)

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


class Threshold(NamedTuple):
    """The best score that a threshold on the null odds gives, in percent, and that threshold."""

    score: float
    threshold: float


def normalize_answer(text: str) -> str:
    """The text as it is compared."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """1.0 where the two are the same, as they are compared, else 0.0."""
    return float(normalize_answer(prediction) == normalize_answer(answer))


def f1(prediction: str, answer: str, *, empty_is_equal: bool = True) -> float:
    """The F1, 0.0 to 1.0, of the prediction's words against the answer's.

    Args:
      prediction, answer: any texts.
      empty_is_equal: two texts without a word have 1.0, as in the script of 2.0; in that of 1.1 they have 0.0.
    """
    predicted, given = normalize_answer(prediction).split(), normalize_answer(answer).split()
    if empty_is_equal and not (predicted and given):
        return float(predicted == given)
    same = (Counter(predicted) & Counter(given)).total()
    if not same:
        return 0.0
    precision, recall = same / len(predicted), same / len(given)
    return 2 * precision * recall / (precision + recall)


def score_v1(questions: Sequence[Question], predictions: Mapping[str, str]) -> dict[str, float]:
    """`exact_match` and `f1` of SQuAD 1.1, in percent of all questions.

    Args:
      questions: all that are scored; each has an answer.
      predictions: by question id. A question without one counts as wrong.

    Raises:
      InputError: no questions, or a question that has no answer to compare with.
    """
    if not questions:
        raise InputError("no questions to score")
    exact = total_f1 = 0.0
    missing = []
    for question in questions:
        if not question.answers:
            raise InputError(f"question {question.id} has no answer to compare with, as SQuAD 1.1 wants it")
        if question.id not in predictions:
            missing.append(question.id)
            continue
        prediction = predictions[question.id]
        exact += max(exact_match(prediction, answer.text) for answer in question.answers)
        total_f1 += max(f1(prediction, answer.text, empty_is_equal=False) for answer in question.answers)
    if missing:
        log.warning("%d questions have no prediction and count as wrong; the first is %s", len(missing), missing[0])
    return {"exact_match": 100.0 * exact / len(questions), "f1": 100.0 * total_f1 / len(questions)}


def score_v2(
    questions: Sequence[Question],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float] | None = None,
    null_threshold: float = 1.0,
) -> dict[str, float]:
    """The official figures of SQuAD 2.0 by their official names: percentages, and numbers of questions.

    `exact`, `f1` and `total`; the same with `HasAns_` and `NoAns_` before them, of the questions with an answer and
    those without, where there are any; with `null_odds` also `best_exact`, `best_exact_thresh`, `best_f1` and
    `best_f1_thresh`. A question has an answer where its file gives one, whatever it says in `is_impossible`.

    Args:
      questions: all that are scored.
      predictions: by question id; "" says that there is no answer.
      null_odds: by question id, the higher the less likely is an answer; the script's `--na-prob-file`.
      null_threshold: where the null odds are greater, the prediction counts as "", whatever it is; the script's
        `--na-prob-thresh`, and its default.

    Raises:
      InputError: no questions, or one without a prediction or, where there are null odds, without those.
    """
    exact, f1s = _scores(questions, predictions)
    if null_odds is not None:
        _need(questions, null_odds, "null odds")
        for question in questions:
            if null_odds[question.id] > null_threshold:
                exact[question.id] = f1s[question.id] = float(not question.answers)
    parts = {
        "": [question.id for question in questions],
        "HasAns_": [question.id for question in questions if question.answers],
        "NoAns_": [question.id for question in questions if not question.answers],
    }
    result: dict[str, float] = {}
    for prefix, ids in parts.items():
        if ids:
            result[f"{prefix}exact"] = 100.0 * sum(exact[key] for key in ids) / len(ids)
            result[f"{prefix}f1"] = 100.0 * sum(f1s[key] for key in ids) / len(ids)
            result[f"{prefix}total"] = len(ids)
    if null_odds is not None:
        for name, best in best_thresholds(questions, predictions, null_odds).items():
            result[f"best_{name}"], result[f"best_{name}_thresh"] = best
    return result


def best_thresholds(
    questions: Sequence[Question], predictions: Mapping[str, str], null_odds: Mapping[str, float]
) -> dict[str, Threshold]:
    """The thresholds on the null odds that give the best `exact` and the best `f1`: the script's search.

    Args:
      questions: those to tune on.
      predictions: by question id, the best answer that is one (`Answers.best`). Given "" already, as predictions with
        a threshold have it, the search cannot see what a higher threshold would have said.
      null_odds: by question id; a question is taken for one without answer where they are greater than the threshold.

    Raises:
      InputError: no questions, or one without a prediction or null odds.
    """
    exact, f1s = _scores(questions, predictions)
    _need(questions, null_odds, "null odds")
    has_answer = {question.id: bool(question.answers) for question in questions}
    order = sorted((key for key in null_odds if key in has_answer), key=null_odds.__getitem__)
    result = {}
    for name, scores in (("exact", exact), ("f1", f1s)):
        # From a threshold below all odds, where every question is taken for one without an answer, upwards.
        score = best = float(len(has_answer) - sum(has_answer.values()))
        threshold = 0.0
        for key in order:
            score += scores[key] if has_answer[key] else -float(predictions[key] != "")
            if score > best:
                best, threshold = score, null_odds[key]
        result[name] = Threshold(100.0 * best / len(scores), threshold)
    return result


def _scores(questions: Sequence[Question], predictions: Mapping[str, str]) -> tuple[dict[str, float], dict[str, float]]:
    """Exact match and F1 of each question, by id, 0.0 to 1.0."""
    if not questions:
        raise InputError("no questions to score")
    _need(questions, predictions, "prediction")
    exact, f1s = {}, {}
    for question in questions:
        # An answer such as "the" is nothing once it is normalized, and then no answer is right.
        answers = [answer.text for answer in question.answers if normalize_answer(answer.text)] or [""]
        prediction = predictions[question.id]
        exact[question.id] = max(exact_match(prediction, answer) for answer in answers)
        f1s[question.id] = max(f1(prediction, answer) for answer in answers)
    return exact, f1s


def _need(questions: Sequence[Question], given: Mapping[str, object], what: str) -> None:
    missing = [question.id for question in questions if question.id not in given]
    if missing:
        raise InputError(
            f"{len(missing)} questions have no {what}; the first is {missing[0]}. Score what was predicted"
        )
