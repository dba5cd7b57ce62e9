"""Exact match and F1 of SQuAD 1.1 and 2.0, as in the official scripts evaluate-v1.1.py and evaluate-v2.0.py.

Both are percentages. Texts are normalized first: lowercased, without ASCII punctuation and the words a, an and the,
with single spaces. The best score over the reference answers counts. F1 compares the words of two texts as multisets.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bert_jax.finetuning.tasks.squad_files import Question

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


class Threshold(NamedTuple):
    """The best score over thresholds on the null odds, in percent, and its threshold."""

    score: float
    threshold: float


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


def score_v1(questions: Sequence[Question], predictions: Mapping[str, str]) -> dict[str, float]:
    """Returns `exact_match` and `f1` of SQuAD 1.1, in percent, averaged over all questions.

    Each question has a reference answer and, by its id, a prediction.
    """
    exact = total_f1 = 0.0
    for question in questions:
        prediction, answers = predictions[question.id], [answer.text for answer in question.answers]
        exact += max(exact_match(prediction, answer) for answer in answers)
        total_f1 += max(f1(prediction, answer, empty_is_equal=False) for answer in answers)
    return {"exact_match": 100.0 * exact / len(questions), "f1": 100.0 * total_f1 / len(questions)}


def score_v2(
    questions: Sequence[Question], predictions: Mapping[str, str], null_odds: Mapping[str, float], null_threshold: float
) -> dict[str, float]:
    """Returns the official metrics of SQuAD 2.0 by their official names: percentages, and numbers of questions.

    Keys: `exact`, `f1` and `total`; the same with the prefixes `HasAns_` and `NoAns_` for questions with and without an
    answer, if any; `best_exact`, `best_exact_thresh`, `best_f1` and `best_f1_thresh`. A question has an answer if its
    file gives one, regardless of `is_impossible`.

    Args:
      questions: the questions to score.
      predictions: by question id; "" is "no answer".
      null_odds: by question id, higher if an answer is less likely; the script's `--na-prob-file`.
      null_threshold: null odds above which any prediction counts as ""; the script's `--na-prob-thresh`.
    """
    exact, f1s = _scores(questions, predictions)
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
    for name, best in best_thresholds(questions, predictions, null_odds).items():
        result[f"best_{name}"], result[f"best_{name}_thresh"] = best
    return result


def best_thresholds(
    questions: Sequence[Question], predictions: Mapping[str, str], null_odds: Mapping[str, float]
) -> dict[str, Threshold]:
    """Returns the thresholds on the null odds with the best `exact` and the best `f1`: the script's search.

    Args:
      questions: the questions to tune on.
      predictions: by question id, the best non-empty answer (`Answers.best`). Predictions that a threshold has already
        set to "" hide the effect of a higher threshold.
      null_odds: by question id; null odds greater than the threshold mean "no answer".
    """
    exact, f1s = _scores(questions, predictions)
    has_answer = {question.id: bool(question.answers) for question in questions}
    result = {}
    for name, scores in (("exact", exact), ("f1", f1s)):
        # Start below all null odds, where every prediction is "no answer", and raise the threshold.
        score = best = float(len(has_answer) - sum(has_answer.values()))
        threshold = 0.0
        for key in sorted(has_answer, key=null_odds.__getitem__):
            score += scores[key] if has_answer[key] else -float(predictions[key] != "")
            if score > best:
                best, threshold = score, null_odds[key]
        result[name] = Threshold(100.0 * best / len(scores), threshold)
    return result


def _scores(questions: Sequence[Question], predictions: Mapping[str, str]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns exact match and F1 of each question, by id, 0.0 to 1.0."""
    exact, f1s = {}, {}
    for question in questions:
        # An answer such as "the" is empty after normalization; then "no answer" is correct.
        answers = [answer.text for answer in question.answers if normalize_answer(answer.text)] or [""]
        prediction = predictions[question.id]
        exact[question.id] = max(exact_match(prediction, answer) for answer in answers)
        f1s[question.id] = max(f1(prediction, answer) for answer in answers)
    return exact, f1s
