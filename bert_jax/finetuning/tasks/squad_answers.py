"""Converts the logits of all windows to answers, n-best lists and the odds of "no answer".

Like `write_predictions` of google-research/bert's `run_squad.py`, this combines the best starts with the best ends of a
window and lists the best spans of all windows of a question. Intended differences:

  text       An answer is a substring of the paragraph, from the first character of its first token to the last of its
             last. The reference maps tokens back to words by comparing letters. If lengths differ, because lowercasing
             or removed characters changed them, it returns complete words with their punctuation.
  selection  The n_best starts and ends are the best of the paragraph's tokens. The reference takes the best of all
             positions and then drops those in the question, special tokens and padding, so that the amount of padding
             could change an answer. Every candidate of the reference is a candidate here.
  no answer  If no start matches any end, all tokens of the paragraph are tried, so that any paragraph with a token has
             an answer. The reference returns "empty" (1.1) or crashes (2.0). A paragraph without a token has the answer
             "" and null odds of 0, for any threshold.
"""

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import NamedTuple

import numpy as np
from etils import epath

from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import atomic
from bert_jax.finetuning.inputs.squad_files import Question
from bert_jax.finetuning.tasks.squad_windows import Window


@dataclass(frozen=True)
class Candidate:
    """An answer of an n-best list. The text "" stands for "no answer".

    Attributes:
      text: a substring of the paragraph.
      probability: the softmax, over the list, of start_logit + end_logit.
      start_logit, end_logit: logits of its first and last token; of [CLS] for "no answer".
    """

    text: str
    probability: float
    start_logit: float
    end_logit: float


@dataclass(frozen=True)
class Answers:
    """A model's answers.

    Attributes:
      best: by question id, the best non-empty answer; "" only if the paragraph has no token.
      null_odds: by question id, the score of "no answer" minus that of the best answer, in logits; empty for SQuAD 1.1.
      nbest: by question id, the best answers in descending order; for 2.0 "" is always among them.
    """

    best: dict[str, str]
    null_odds: dict[str, float]
    nbest: dict[str, list[Candidate]]

    def predictions(self, null_threshold: float = 0.0) -> dict[str, str]:
        """Returns the predicted text by question id: "" if the null odds are greater than `null_threshold`.

        Tune a threshold on `best` and `null_odds` (`squad_metrics.best_thresholds`), not on these predictions.
        """
        return {
            key: "" if self.null_odds.get(key, -np.inf) > null_threshold else text for key, text in self.best.items()
        }


class _Spans(NamedTuple):
    """K candidates of one or several windows; every array is [K]."""

    begin: np.ndarray  # first character
    end: np.ndarray  # one past the last character
    start_logit: np.ndarray
    end_logit: np.ndarray


def answer_questions(
    questions: Sequence[Question],
    windows: Sequence[Window],
    start_logits: Sequence[np.ndarray],
    end_logits: Sequence[np.ndarray],
    *,
    n_best: int = 20,
    max_answer_length: int = 30,
    version_2: bool = False,
) -> Answers:
    """Returns the answers to all questions.

    Args:
      questions: the questions that `windows` were built from.
      windows: in any order; at least one per question.
      start_logits, end_logits: for each window [T], T at least its length; logits past that (padding) are ignored.
      n_best: number of starts and ends combined per window, and of answers in a list.
      max_answer_length: in tokens.
      version_2: allow "no answer". Its score is the minimum of start[0] + end[0] over the question's windows.

    Raises:
      ValueError: the numbers of logits and windows differ, logits are shorter than a window, or a question has no
        window.
      InputError: `n_best` or `max_answer_length` is not positive.
      BertJaxError: logits that are not finite.
    """
    if n_best < 1 or max_answer_length < 1:
        raise InputError(f"n_best={n_best}, max_answer_length={max_answer_length}: expected at least 1")
    windows_of: dict[int, list[int]] = defaultdict(list)
    for number, window in enumerate(windows):
        windows_of[window.question].append(number)
    starts = [_checked(*pair, questions) for pair in zip(windows, start_logits, strict=True)]
    ends = [_checked(*pair, questions) for pair in zip(windows, end_logits, strict=True)]
    result = Answers({}, {}, {})
    for index, question in enumerate(questions):
        if index not in windows_of:
            raise ValueError(f"question {question.id} has no window")
        own = [(windows[number], starts[number], ends[number]) for number in windows_of[index]]
        spans = _ranked(own, n_best, max_answer_length)
        null = min((_null(s, e) for _, s, e in own), key=sum) if version_2 else None
        listed = _listed(question.context, spans, null, n_best)
        result.nbest[question.id] = listed
        has_span = len(spans.begin) > 0
        result.best[question.id] = question.context[spans.begin[0] : spans.end[0]] if has_span else ""
        if null is not None:
            best = float(spans.start_logit[0] + spans.end_logit[0]) if has_span else sum(null)
            result.null_odds[question.id] = float(sum(null) - best)
    return result


def write_answers(folder: str | PathLike[str], answers: Answers, null_threshold: float = 0.0) -> None:
    """Writes `predictions.json` ({id: text}, what the official scripts score) and `nbest_predictions.json`.

    For SQuAD 2.0 also `null_odds.json` ({id: odds}). Names and formats are the reference's.

    Args:
      folder: created if missing.
      answers: the answers to write.
      null_threshold: null odds above which the prediction is "".
    """
    path = epath.Path(os.fspath(folder))
    path.mkdir(parents=True, exist_ok=True)
    nbest = {key: [asdict(candidate) for candidate in listed] for key, listed in answers.nbest.items()}
    files = {"predictions.json": answers.predictions(null_threshold), "nbest_predictions.json": nbest}
    if answers.null_odds:
        files["null_odds.json"] = answers.null_odds
    for name, content in files.items():
        atomic.write_whole(path / name, (json.dumps(content, indent=4) + "\n").encode())


def _checked(window: Window, logits: np.ndarray, questions: Sequence[Question]) -> np.ndarray:
    """Returns a window's logits without padding, in float64 like the sums of the reference."""
    length = len(window.sequence.input_ids)
    own = np.asarray(logits, np.float64)[:length]
    if own.shape != (length,):
        raise ValueError(
            f"logits: got shape {np.shape(logits)}, expected at least ({length},) for a window of {length} tokens"
        )
    if not np.isfinite(own).all():
        raise BertJaxError(f"question {questions[window.question].id}: logits are not finite")
    return own


def _null(start_logits: np.ndarray, end_logits: np.ndarray) -> tuple[float, float]:
    return float(start_logits[0]), float(end_logits[0])


def _ranked(own: Sequence[tuple[Window, np.ndarray, np.ndarray]], n_best: int, max_answer_length: int) -> _Spans:
    """Returns the candidates of a question's windows in descending order; ties go to the first window.

    Empty only if the paragraph has no token: any token is an answer in the window with its maximum context.
    """
    for count in (n_best, max(len(window.offsets) for window, _, _ in own)):
        candidates = [_candidates(*window, count, max_answer_length) for window in own]
        spans = _Spans(*map(np.concatenate, zip(*candidates, strict=True)))
        if len(spans.begin):
            break
    order = np.argsort(-(spans.start_logit + spans.end_logit), kind="stable")
    return _Spans(*(column[order] for column in spans))


def _candidates(
    window: Window, start_logits: np.ndarray, end_logits: np.ndarray, count: int, max_answer_length: int
) -> _Spans:
    """Returns the valid spans of the `count` best starts and ends, ordered by rank of start, then of end."""
    context = slice(window.sequence.first_length, window.sequence.first_length + len(window.offsets))
    start_logits, end_logits = start_logits[context], end_logits[context]
    starts = np.argsort(-start_logits, kind="stable")[:count]
    starts = starts[window.max_context[starts]]
    ends = np.argsort(-end_logits, kind="stable")[:count]
    extra = ends - starts[:, None]  # tokens after the first one
    row, column = np.nonzero((extra >= 0) & (extra < max_answer_length))
    first, last = starts[row], ends[column]
    return _Spans(window.offsets[first, 0], window.offsets[last, 1], start_logits[first], end_logits[last])


def _listed(context: str, spans: _Spans, null: tuple[float, float] | None, n_best: int) -> list[Candidate]:
    """Returns the `n_best` best distinct texts; with `null` also "", by its score among them or at the end."""
    texts: dict[str, tuple[float, float]] = {}
    for begin, end, *logits in zip(*map(np.ndarray.tolist, spans), strict=True):
        if null is not None and "" not in texts and sum(null) > sum(logits):
            texts[""] = null
        if len(texts) >= n_best:
            break
        texts.setdefault(context[begin:end], (logits[0], logits[1]))
    if null is not None:
        texts.setdefault("", null)
    if not texts:
        texts[""] = (0.0, 0.0)
    scores = np.array([sum(logits) for logits in texts.values()])
    exponentials = np.exp(scores - scores.max())
    probabilities = (exponentials / exponentials.sum()).tolist()
    return [
        Candidate(text, p, *map(float, logits)) for (text, logits), p in zip(texts.items(), probabilities, strict=True)
    ]
