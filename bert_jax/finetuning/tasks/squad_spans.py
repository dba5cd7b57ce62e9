"""Spans of SQuAD: windows of a paragraph for the encoder, and the answers from the logits of its tokens.

A window is [CLS] question [SEP] a part of the paragraph [SEP].

A paragraph that is too long for one sequence is split into windows with a stride of `doc_stride` tokens, as in
`convert_examples_to_features` of google-research/bert's `run_squad.py`. There are two differences:

  labels  The reference takes the whitespace-separated words that overlap the answer, and searches their tokens for
          those of the answer tokenized alone; if not found, it labels the complete words. Here every token has its
          character offsets, and the label is the tokens that overlap the answer: the same tokens wherever the reference
          finds them at the answer's own position, and never more.
  empty   A paragraph without a token has one window here, and none in the reference.

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
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from etils import epath

from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import atomic
from bert_jax.finetuning.tasks.squad_files import Question
from bert_jax.text.sequences import EncodedSequence
from bert_jax.text.tokenizer import Tokenizer

_TEXTS_AT_ONCE = 1024  # bounds memory: the tokenizer's encoding of a text is many times larger than what is kept


@dataclass(frozen=True, eq=False)
class Window:
    """A question and C tokens of its paragraph: tokens `first_length` to `first_length` + C - 1 of the sequence.

    Attributes:
      question: the index of the question.
      sequence: the encoder's input.
      offsets: [C, 2] int32; token i is `context[offsets[i, 0] : offsets[i, 1]]`, in characters.
      max_context: [C] bool; True if this window has the maximum context for the token among the question's windows.
      start, end: positions in the sequence of the first and the last token of the question's first answer, from 0 at
        [CLS]; both 0 if there is no answer or it is not completely in the window.
    """

    question: int
    sequence: EncodedSequence
    offsets: np.ndarray
    max_context: np.ndarray
    start: int
    end: int


def build_windows(
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    *,
    max_seq_len: int = 384,
    doc_stride: int = 128,
    max_query_length: int = 64,
) -> list[Window]:
    """Builds the windows of all questions: in the order of the questions, from the paragraph's start to its end.

    Args:
      questions: each has at least one window.
      tokenizer: tokenizes questions and paragraphs; each distinct paragraph once.
      max_seq_len: maximum tokens of a sequence, special tokens included; sequences are not padded.
      doc_stride: tokens from the start of a window to the start of the next.
      max_query_length: maximum tokens of a question; longer ones are truncated at the end.

    Raises:
      InputError: `max_seq_len` leaves no space for the paragraph.
    """
    if max_seq_len < max_query_length + 4:
        raise InputError(
            f"max_seq_len={max_seq_len}: too short for a question of max_query_length={max_query_length} tokens, three "
            f"special tokens and one paragraph token; expected at least {max_query_length + 4}"
        )
    contexts = _encode_once(tokenizer, [question.context for question in questions])
    queries = _encode_questions(tokenizer, [question.question for question in questions], max_query_length)
    windows: list[Window] = []
    for index, (question, query) in enumerate(zip(questions, queries, strict=True)):
        ids, offsets = contexts[question.context]
        head = (tokenizer.cls_id, *query, tokenizer.sep_id)
        spans = window_spans(len(ids), max_seq_len - len(head) - 1, doc_stride)
        answer = _first_answer_tokens(question, offsets)
        for (begin, end), max_context in zip(spans, max_context_masks(spans), strict=True):
            start = last = 0
            if answer is not None and begin <= answer[0] and answer[1] < end:
                start, last = (token - begin + len(head) for token in answer)
            windows.append(
                Window(
                    question=index,
                    sequence=EncodedSequence((*head, *ids[begin:end], tokenizer.sep_id), len(head)),
                    offsets=offsets[begin:end],
                    max_context=max_context,
                    start=start,
                    end=last,
                )
            )
    return windows


def window_spans(length: int, capacity: int, stride: int) -> list[tuple[int, int]]:
    """Returns [begin, end) of the windows over `length` tokens, of at most `capacity` tokens each."""
    spans = [(0, min(length, capacity))]
    while spans[-1][1] < length:
        begin = spans[-1][0] + min(capacity, stride)
        spans.append((begin, min(length, begin + capacity)))
    return spans


def max_context_masks(spans: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """Returns for each window [C] bool: True for the tokens that have their maximum context in it.

    The score is min(tokens of the window to the left, to the right) + 0.01 * tokens of the window; the first window
    wins a tie. This is `_check_is_max_context` of the reference.
    """
    if len(spans) == 1:
        return [np.ones(spans[0][1], bool)]
    scores = np.full((len(spans), spans[-1][1]), -np.inf)
    for row, (begin, end) in zip(scores, spans, strict=True):
        from_left = np.arange(end - begin)
        row[begin:end] = np.minimum(from_left, from_left[::-1]) + 0.01 * (end - begin)
    best = scores.argmax(0)
    return [best[begin:end] == number for number, (begin, end) in enumerate(spans)]


def answer_tokens(offsets: np.ndarray, begin: int, end: int) -> tuple[int, int] | None:
    """Returns the first and last token that overlap the characters [begin, end); None if there are none.

    Args:
      offsets: [n, 2] of the complete paragraph; both columns are non-decreasing.
      begin, end: in characters of the paragraph.
    """
    first = int(np.searchsorted(offsets[:, 1], begin, side="right"))
    last = int(np.searchsorted(offsets[:, 0], end, side="left")) - 1
    return (first, last) if first <= last else None


def _first_answer_tokens(question: Question, offsets: np.ndarray) -> tuple[int, int] | None:
    if question.is_impossible or not question.answers or question.answers[0].start is None:
        return None
    answer = question.answers[0]
    assert answer.start is not None
    return answer_tokens(offsets, answer.start, answer.start + len(answer.text))


def _encode_once(tokenizer: Tokenizer, texts: Sequence[str]) -> dict[str, tuple[list[int], np.ndarray]]:
    distinct = iter(dict.fromkeys(texts))
    encoded: dict[str, tuple[list[int], np.ndarray]] = {}
    while batch := list(islice(distinct, _TEXTS_AT_ONCE)):
        encoded.update(zip(batch, tokenizer.encode_batch_with_offsets(batch), strict=True))
    return encoded


def _encode_questions(tokenizer: Tokenizer, texts: Sequence[str], limit: int) -> list[list[int]]:
    return [ids[:limit] for ids in tokenizer.encode_batch(texts)]


# --- Answers ----------------------------------------------------------------------------------------------------------


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

    Raises BertJaxError for logits that are not finite.
    """
    windows_of: dict[int, list[int]] = defaultdict(list)
    for number, window in enumerate(windows):
        windows_of[window.question].append(number)
    starts = [_checked(*pair, questions) for pair in zip(windows, start_logits, strict=True)]
    ends = [_checked(*pair, questions) for pair in zip(windows, end_logits, strict=True)]
    result = Answers({}, {}, {})
    for index, question in enumerate(questions):
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


def write_answers(folder: epath.Path, answers: Answers, null_threshold: float = 0.0) -> None:
    """Writes `predictions.json` ({id: text}, what the official scripts score) and `nbest_predictions.json`.

    For SQuAD 2.0 also `null_odds.json` ({id: odds}). Names and formats are the reference's.

    Args:
      folder: created if missing.
      answers: the answers to write.
      null_threshold: null odds above which the prediction is "".
    """
    folder.mkdir(parents=True, exist_ok=True)
    nbest = {key: [asdict(candidate) for candidate in listed] for key, listed in answers.nbest.items()}
    files = {"predictions.json": answers.predictions(null_threshold), "nbest_predictions.json": nbest}
    if answers.null_odds:
        files["null_odds.json"] = answers.null_odds
    for name, content in files.items():
        atomic.write_whole(folder / name, (json.dumps(content, indent=4) + "\n").encode())


def _checked(window: Window, logits: np.ndarray, questions: Sequence[Question]) -> np.ndarray:
    """Returns a window's logits without padding, in float64 like the sums of the reference."""
    own = np.asarray(logits, np.float64)[: len(window.sequence.input_ids)]
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
    has_text = window.offsets[ends, 1] > window.offsets[starts, 0][:, None]  # "▁" of SentencePiece has none
    row, column = np.nonzero((extra >= 0) & (extra < max_answer_length) & has_text)
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
