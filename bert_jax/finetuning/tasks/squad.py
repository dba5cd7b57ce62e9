"""SQuAD 1.1 and 2.0: predicts the start and the end of the answer, in windows of its paragraph.

A window is [CLS] question [SEP] a part of the paragraph [SEP].

A paragraph that is too long for one sequence is split into windows with a stride of `doc_stride` tokens, as in
`convert_examples_to_features` of google-research/bert's `run_squad.py`. There are two differences:

  labels  The reference takes the whitespace-separated words that overlap the answer, and searches their tokens for
          those of the answer tokenized alone; if not found, it labels the complete words. Here every token has its
          character offsets, and the label is the tokens that overlap the answer: the same tokens wherever the reference
          finds them at the answer's own position, and never more.
  empty   A paragraph without a token has one window here, and none in the reference.

Like `write_predictions` of google-research/bert's `run_squad.py`, this combines the best starts with the best ends of a
window and takes the best span of all windows of a question. Intended differences:

  text       An answer is a substring of the paragraph, from the first character of its first token to the last of its
             last. The reference maps tokens back to words by comparing letters. If lengths differ, because lowercasing
             or removed characters changed them, it returns complete words with their punctuation.
  selection  The n_best starts and ends are the best of the paragraph's tokens. The reference takes the best of all
             positions and then drops those in the question, special tokens and padding, so that the amount of padding
             could change an answer. Every candidate of the reference is a candidate here.
  no answer  If no start matches any end, the answer is "". The reference returns "empty" (1.1) or crashes (2.0).
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from etils import epath

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.files import atomic
from bert_jax.finetuning.batches import EncodedExamples
from bert_jax.finetuning.task import BadRows, Labels, Outputs, Split, Task, softmax
from bert_jax.finetuning.tasks.squad_files import (
    ROUNDING,
    Question,
    best_thresholds,
    read_questions,
    score_v1,
    score_v2,
)
from bert_jax.text.sequences import EncodedSequence
from bert_jax.text.tokenizer import Tokenizer

_TEXTS_AT_ONCE = 1024  # bounds memory: the tokenizer's encoding of a text is many times larger than what is kept


# --- Windows ----------------------------------------------------------------------------------------------------------


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
    questions: Sequence[Question], tokenizer: Tokenizer, *, max_seq_len: int = 384, doc_stride: int = 128,
    max_query_length: int = 64,
) -> list[Window]:  # fmt: skip
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
            f"task.max_seq_len={max_seq_len}: too short for task.max_query_length={max_query_length} tokens, three "
            f"special tokens and one paragraph token; expected at least {max_query_length + 4}"
        )
    distinct = list(dict.fromkeys(question.context for question in questions))
    contexts: dict[str, tuple[list[int], np.ndarray]] = {}
    for first in range(0, len(distinct), _TEXTS_AT_ONCE):
        batch = distinct[first : first + _TEXTS_AT_ONCE]
        contexts.update(zip(batch, tokenizer.encode_batch_with_offsets(batch), strict=True))
    queries = tokenizer.encode_batch([question.question for question in questions])
    windows: list[Window] = []
    for index, (question, query) in enumerate(zip(questions, queries, strict=True)):
        ids, offsets = contexts[question.context]
        head = (tokenizer.cls_id, *query[:max_query_length], tokenizer.sep_id)
        spans = window_spans(len(ids), max_seq_len - len(head) - 1, doc_stride)
        answer = None
        if question.answers and not question.is_impossible:
            begin = question.answers[0].start
            answer = answer_tokens(offsets, begin, begin + len(question.answers[0].text))
        for (begin, end), max_context in zip(spans, max_context_masks(spans), strict=True):
            start = last = 0
            if answer is not None and begin <= answer[0] and answer[1] < end:
                start, last = (token - begin + len(head) for token in answer)
            sequence = EncodedSequence((*head, *ids[begin:end], tokenizer.sep_id), len(head))
            windows.append(Window(index, sequence, offsets[begin:end], max_context, start, last))
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


# --- Answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """A model's answers to questions, in their order.

    Attributes:
      texts: the best answer; "" only if no start matches any end.
      null_odds: the score of "no answer" minus that of the text, in logits; -inf for SQuAD 1.1.
      probabilities: of the text and of "no answer", by the softmax over the scores of all candidates.
    """

    texts: list[str]
    null_odds: list[float]
    probabilities: list[tuple[float, float]]


def answer_questions(
    questions: Sequence[Question], windows: Sequence[Window], outputs: Sequence[np.ndarray], *, n_best: int = 20,
    max_answer_length: int = 30, version_2: bool = False,
) -> Answers:  # fmt: skip
    """Returns the answers to all questions.

    The score of an answer is the sum of the logits of its first and last token. Ties go to the first window, the best
    start, and the best end.

    Args:
      questions: the questions that `windows` were built from.
      windows: in any order; at least one per question.
      outputs: for each window the logits of starts and ends [T, 2], T at least its length; the rest is padding.
      n_best: number of starts and ends combined per window.
      max_answer_length: in tokens.
      version_2: allow "no answer". Its score is the minimum of start[0] + end[0] over the question's windows.
    """
    candidates: dict[int, list[np.ndarray]] = defaultdict(list)
    null_scores = np.full(len(questions), np.inf if version_2 else -np.inf)
    for window, logits in zip(windows, outputs, strict=True):
        starts, ends = logits[: len(window.sequence.input_ids)].T.astype(np.float64)  # like the sums of the reference
        candidates[window.question].append(_candidates(window, starts, ends, n_best, max_answer_length))
        null_scores[window.question] = min(null_scores[window.question], starts[0] + ends[0])
    answers = Answers([], [], [])
    for index, question in enumerate(questions):
        spans = np.concatenate(candidates[index])
        spans = spans if len(spans) else np.zeros((1, 3))
        best = spans[:, 2].argmax()
        first, last, score = spans[best].tolist()
        null_score = float(null_scores[index])
        shares = softmax(np.append(spans[:, 2], null_score))
        answers.texts.append(question.context[int(first) : int(last)])
        answers.null_odds.append(null_score - score)
        answers.probabilities.append((float(shares[best]), float(shares[-1])))
    return answers


def _candidates(window: Window, starts: np.ndarray, ends: np.ndarray, count: int, max_length: int) -> np.ndarray:
    """Returns the valid spans of the `count` best starts and ends: fp64 [K, 3], characters [first, last) and score."""
    head = window.sequence.first_length
    starts, ends = (logits[head : head + len(window.offsets)] for logits in (starts, ends))
    first = np.argsort(-starts, kind="stable")[:count]
    first = first[window.max_context[first]]
    last = np.argsort(-ends, kind="stable")[:count]
    extra = last - first[:, None]  # tokens after the first one
    has_text = window.offsets[last, 1] > window.offsets[first, 0][:, None]  # "▁" of SentencePiece has none
    row, column = np.nonzero((extra >= 0) & (extra < max_length) & has_text)
    first, last = first[row], last[column]
    return np.stack([window.offsets[first, 0], window.offsets[last, 1], starts[first] + ends[last]], axis=1)


# --- Task -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SquadTask(Task):
    """Questions whose answers are spans of a paragraph; in version 2.0 some have no answer.

    Attributes:
      doc_stride, max_query_length: see `build_windows`.
      n_best, max_answer_length: see `answer_questions`.
      null_threshold: null odds above which the prediction is "no answer", tuned for F1 on the first scored split. None
        if it is unknown: predictions then use 0, and scores the best threshold for the scored data, as in the paper.
    """

    name: str = "squad/1.1"
    kind: str = "span"
    size: ClassVar[int] = 2  # start and end
    max_seq_len: int = 384
    doc_stride: int = 128
    max_query_length: int = 64
    n_best: int = 20
    max_answer_length: int = 30
    null_threshold: float | None = None

    @classmethod
    def from_config(cls, config: FinetuneConfig) -> Self:
        task = config.task
        if task.test:
            raise InputError(
                f"task.test={task.test}: SQuAD has no split to predict alone; run `bert-jax predict` on it afterwards"
            )
        return cls(
            name=f"squad/{'2.0' if task.version_2 else '1.1'}", max_seq_len=task.max_seq_len,
            doc_stride=task.doc_stride, max_query_length=task.max_query_length, n_best=task.n_best,
            max_answer_length=task.max_answer_length,
        )  # fmt: skip

    @property
    def version_2(self) -> bool:
        """True if a question may have no answer (SQuAD 2.0)."""
        return self.name.endswith("/2.0")

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("best_f1", "best_exact", "f1", "exact") if self.version_2 else ("f1", "exact_match")

    # --- Files --------------------------------------------------------------------------------------------------------

    @property
    def usual_files(self) -> Mapping[str, Sequence[str]]:
        return {split: (f"{split}-v{self.name.partition('/')[2]}.json",) for split in ("train", "dev")}

    def read(
        self, path: str, bad_rows: BadRows, *, split: str = "", labels: Labels = "required",
        columns: Sequence[str] = (),
    ) -> list[Question]:  # fmt: skip
        """Reads questions; a score is of all of a file, and so refuses a file with one that has no known answer."""
        if columns:
            raise InputError(f"text={' '.join(columns)}: SQuAD has fixed keys; omit it")
        questions = read_questions(path, bad_rows, training=split == "train", version_2=self.version_2)
        unanswered = [question.id for question in questions if not self.is_labelled(question)]
        if labels == "required" and unanswered:
            raise InputError(
                f"{path}: {len(unanswered)} questions without an answer, such as {unanswered[0]}; expected answers, or "
                "is_impossible in SQuAD 2.0 (config=finetune/squad:2.0)"
            )
        return questions

    def from_texts(self, texts: Sequence[str], pairs: Sequence[Any]) -> list[Question]:
        if not all(isinstance(pair, str) for pair in pairs):
            raise InputError("pair: expected a paragraph as the pair of each question")
        both = zip(texts, pairs, strict=True)
        return [Question(str(number), text, pair, ()) for number, (text, pair) in enumerate(both)]

    def is_labelled(self, example: Question) -> bool:
        return bool(example.answers) or (self.version_2 and example.is_impossible)

    # --- Model --------------------------------------------------------------------------------------------------------

    def encode(self, examples: Sequence[Question], tokenizer: Tokenizer, *, labelled: bool) -> EncodedExamples:
        windows = build_windows(
            examples, tokenizer, max_seq_len=self.max_seq_len, doc_stride=self.doc_stride,
            max_query_length=self.max_query_length,
        )  # fmt: skip
        spans = [(window.start, window.end) for window in windows]
        labels = np.array(spans, np.int32).reshape(-1, 2) if labelled else None
        return EncodedExamples([window.sequence for window in windows], labels, windows=windows)

    def _answers(self, split: Split, outputs: Outputs) -> Answers:
        return answer_questions(
            split.examples, split.encoded.windows, outputs, n_best=self.n_best,
            max_answer_length=self.max_answer_length, version_2=self.version_2,
        )  # fmt: skip

    def _threshold(self, split: Split, answers: Answers) -> float:
        """Returns the null odds above which there is no answer: the record's, or the best for F1 of labelled data."""
        if not self.version_2 or self.null_threshold is not None or not split.is_labelled:
            return self.null_threshold or 0.0
        return best_thresholds(split.examples, answers.texts, answers.null_odds)["f1"][1]

    def score(self, split: Split, outputs: Outputs) -> dict[str, float]:
        answers = self._answers(split, outputs)
        if self.version_2:
            return score_v2(split.examples, answers.texts, answers.null_odds, self._threshold(split, answers))
        return score_v1(split.examples, answers.texts)

    def tuned(self, scores: Mapping[str, float]) -> Self:
        """Returns the task with the threshold that is best for F1.

        It is the null odds of a question, which another batch size rounds otherwise: the record's is just above.
        """
        best = scores.get("best_f1_thresh")
        return self if best is None else replace(self, null_threshold=best + ROUNDING)

    def predictions(self, split: Split, outputs: Outputs) -> list[dict[str, Any]]:
        """Returns predictions with their `probability` and, for 2.0, `null_odds`; "" is no answer."""
        answers = self._answers(split, outputs)
        threshold, rows = self._threshold(split, answers), []
        found = zip(split.examples, answers.texts, answers.null_odds, answers.probabilities, strict=True)
        for question, text, null_odds, probabilities in found:
            is_null = null_odds > threshold
            row = {"id": question.id, "prediction": "" if is_null else text, "probability": probabilities[is_null]}
            rows.append({**row, "null_odds": null_odds} if self.version_2 else row)
        return rows

    def write(self, split: Split, outputs: Outputs, folder: epath.Path) -> None:
        """Writes `predictions.json`, which the official scripts score; for SQuAD 2.0 also `null_odds.json`."""
        rows = self.predictions(split, outputs)
        files = {"predictions": "prediction", **({"null_odds": "null_odds"} if self.version_2 else {})}
        for name, key in files.items():
            content = {row["id"]: row[key] for row in rows}
            atomic.write_whole(folder / f"{name}.json", (json.dumps(content, indent=4) + "\n").encode())
