"""From the logits of all windows to answers, n-best lists and the odds that there is no answer.

As `write_predictions` of google-research/bert's `run_squad.py`: the best starts are combined with the best ends of a
window, and the best of all windows of a question are listed. What is different, for the better:

  text       An answer is the paragraph's own characters, from those of its first token to those of its last. The
             reference goes back from tokens to words by comparing letters, and gives whole words, with whatever
             punctuation is on them, where the lengths differ: wherever lower-casing or dropping changed their number.
  selection  The n_best starts and ends are the best of the paragraph's tokens. Those of the reference are the best of
             all positions, and the question's, special tokens' and padding's are then thrown away: how far a batch
             was padded could change an answer. Each of its candidates is one here.
  no answer  Where no start goes with any end, all tokens of the paragraph are tried, so that there is an answer
             wherever the paragraph has a token. The reference says "empty" (1.1) or crashes (2.0). A paragraph without
             a token has the answer "", with null odds of 0: the threshold makes no difference to it.
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
    """An answer of an n-best list. The text "" says that there is no answer.

    Attributes:
      text: characters of the paragraph, as they are.
      probability: the softmax, over the list, of start_logit + end_logit.
      start_logit, end_logit: of its first and its last token; of [CLS] where there is no answer.
    """

    text: str
    probability: float
    start_logit: float
    end_logit: float


@dataclass(frozen=True)
class Answers:
    """What a model answers.

    Attributes:
      best: by question id, the best answer that is one; "" only where the paragraph has no token.
      null_odds: by question id, the score of "no answer" minus that of the best answer, in logits; empty for SQuAD 1.1.
      nbest: by question id, the best answers, the best one first; for 2.0 "" is always among them.
    """

    best: dict[str, str]
    null_odds: dict[str, float]
    nbest: dict[str, list[Candidate]]

    def predictions(self, null_threshold: float = 0.0) -> dict[str, str]:
        """By question id, the text that is scored: "" where the null odds are greater than `null_threshold`.

        A threshold is tuned on `best` and `null_odds` (`squad_metrics.best_thresholds`), not on these.
        """
        return {
            key: "" if self.null_odds.get(key, -np.inf) > null_threshold else text for key, text in self.best.items()
        }


class _Spans(NamedTuple):
    """Candidates of one window or several: K of each."""

    begin: np.ndarray  # the first character
    end: np.ndarray  # the one behind the last
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
    """The answers to all questions.

    Args:
      questions: what `windows` were built from.
      windows: in any order; each question has one at the least.
      start_logits, end_logits: of each window [T], T at least its length; what is behind that (padding) is not read.
      n_best: starts and ends of a window that are combined, and answers of a list.
      max_answer_length: in tokens.
      version_2: "no answer" is an answer. Its score is the least start[0] + end[0] of the question's windows.

    Raises:
      ValueError: not as many logits as windows, too few for a window's tokens, or a question without a window.
      InputError: `n_best` or `max_answer_length` is not positive.
      BertJaxError: logits that are not finite.
    """
    if n_best < 1 or max_answer_length < 1:
        raise InputError(f"n_best={n_best} and max_answer_length={max_answer_length} have to be 1 or more")
    of_question: dict[int, list[int]] = defaultdict(list)
    for number, window in enumerate(windows):
        of_question[window.question].append(number)
    starts = [_checked(*pair, questions) for pair in zip(windows, start_logits, strict=True)]
    ends = [_checked(*pair, questions) for pair in zip(windows, end_logits, strict=True)]
    result = Answers({}, {}, {})
    for index, question in enumerate(questions):
        if index not in of_question:
            raise ValueError(f"question {question.id} has no window")
        own = [(windows[number], starts[number], ends[number]) for number in of_question[index]]
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
      folder: made if missing.
      answers: what to write.
      null_threshold: null odds beyond which the prediction is "".
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
    """A window's own logits, without padding, as the doubles that the reference adds."""
    length = len(window.sequence.input_ids)
    own = np.asarray(logits, np.float64)[:length]
    if own.shape != (length,):
        raise ValueError(f"logits of shape {np.shape(logits)} for a window of {length} tokens")
    if not np.isfinite(own).all():
        raise BertJaxError(f"the logits of question {questions[window.question].id} are not all finite numbers")
    return own


def _null(start_logits: np.ndarray, end_logits: np.ndarray) -> tuple[float, float]:
    return float(start_logits[0]), float(end_logits[0])


def _ranked(own: Sequence[tuple[Window, np.ndarray, np.ndarray]], n_best: int, max_answer_length: int) -> _Spans:
    """The candidates of a question's windows, the best first; of equal ones that of the first window.

    There are none only where the paragraph has no token: any token is an answer in the window that has most around it.
    """
    for count in (n_best, max(len(window.offsets) for window, _, _ in own)):
        of_windows = [_candidates(*one, count, max_answer_length) for one in own]
        spans = _Spans(*map(np.concatenate, zip(*of_windows, strict=True)))
        if len(spans.begin):
            break
    order = np.argsort(-(spans.start_logit + spans.end_logit), kind="stable")
    return _Spans(*(column[order] for column in spans))


def _candidates(
    window: Window, start_logits: np.ndarray, end_logits: np.ndarray, count: int, max_answer_length: int
) -> _Spans:
    """Those of the `count` best starts with the `count` best ends that are spans; by rank of start, then of end."""
    context = slice(window.sequence.first_length, window.sequence.first_length + len(window.offsets))
    start_logits, end_logits = start_logits[context], end_logits[context]
    starts = np.argsort(-start_logits, kind="stable")[:count]
    starts = starts[window.max_context[starts]]
    ends = np.argsort(-end_logits, kind="stable")[:count]
    more = ends - starts[:, None]  # tokens behind the first one
    row, column = np.nonzero((more >= 0) & (more < max_answer_length))
    first, last = starts[row], ends[column]
    return _Spans(window.offsets[first, 0], window.offsets[last, 1], start_logits[first], end_logits[last])


def _listed(context: str, spans: _Spans, null: tuple[float, float] | None, n_best: int) -> list[Candidate]:
    """The `n_best` best texts, each once; and "", by its score among them or behind them."""
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
