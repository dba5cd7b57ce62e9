"""Sliding windows of SQuAD: [CLS] question [SEP] a window of the paragraph [SEP].

A paragraph that is too long for one sequence is split into windows with a stride of `doc_stride` tokens, as in
`convert_examples_to_features` of google-research/bert's `run_squad.py`. There are two differences:

  labels  The reference takes the whitespace-separated words that overlap the answer, and searches their tokens for
          those of the answer tokenized alone; if not found, it labels the complete words. Here every token has its
          character offsets, and the label is the tokens that overlap the answer: the same tokens wherever the reference
          finds them at the answer's own position, and never more.
  empty   A paragraph without a token has one window here, and none in the reference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from bert_jax.errors import InputError
from bert_jax.finetuning.inputs.squad_files import Question
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
      InputError: a length is not positive, or leaves no space for the paragraph.
    """
    if doc_stride < 1 or max_query_length < 1:
        raise InputError(f"doc_stride={doc_stride}, max_query_length={max_query_length}: expected at least 1")
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
