"""Windows over paragraphs, against the reference's way said plainly: word by word and window by window."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import reference_tokenizer as reference
from support import squad_examples

from bert_jax.errors import InputError
from bert_jax.finetuning.rows import BadRows
from bert_jax.finetuning.tasks.squad_files import Answer, Question, read_questions
from bert_jax.finetuning.tasks.squad_spans import (
    Window,
    answer_tokens,
    build_windows,
    max_context_masks,
    window_spans,
)
from bert_jax.text.conversion import convert_vocabulary
from bert_jax.text.tokenizer import Tokenizer

SMALL = {"max_seq_len": 24, "doc_stride": 6, "max_query_length": 8}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return squad_examples.tokenizer()


def slow_spans(length: int, capacity: int, stride: int) -> list[tuple[int, int]]:
    """(start, length) of every window."""
    result = []
    start = 0
    while start < length:
        size = min(length - start, capacity)
        result.append((start, size))
        if start + size == length:
            break
        start += min(size, stride)
    return result


def slow_is_max_context(spans: list[tuple[int, int]], number: int, token: int) -> bool:
    best_score, best = None, None
    for index, (start, length) in enumerate(spans):
        last = start + length - 1
        if start <= token <= last:
            score = min(token - start, last - token) + 0.01 * length
            if best_score is None or score > best_score:
                best_score, best = score, index
    return best == number


def slow_label(question: Question, tokenize: Callable[[str], list[str]]) -> tuple[list[str], tuple[int, int] | None]:
    """The paragraph's pieces, and the reference's first and last of the answer: words first, then a search in them."""
    words, word_at = [], []
    before = " "
    for character in question.context:
        if character in " \t\r\n\u202f":
            before = " "
        else:
            if before == " ":
                words.append("")
            words[-1] += character
            before = character
        word_at.append(len(words) - 1)
    tokens: list[str] = []
    first_of_word = []
    for word in words:
        first_of_word.append(len(tokens))
        tokens += tokenize(word)
    if question.is_impossible:
        return tokens, None
    answer = question.answers[0]
    assert answer.start is not None
    last_word = word_at[answer.start + len(answer.text) - 1]
    first = first_of_word[word_at[answer.start]]
    last = first_of_word[last_word + 1] - 1 if last_word + 1 < len(words) else len(tokens) - 1
    wanted = tokenize(answer.text)
    for start in range(first, last + 1):
        for end in range(last, start - 1, -1):
            if tokens[start : end + 1] == wanted:
                return tokens, (start, end)
    return tokens, (first, last)


def slow_windows(questions: list[Question], vocabulary: Tokenizer, length: int, stride: int, query: int):
    """(question, ids, first_length, max_context, start, end) of every window."""
    pieces = set(vocabulary.vocab)

    @functools.cache
    def tokenize(text: str) -> list[str]:
        return reference.tokenize(text, pieces, vocabulary.lowercase)

    for index, question in enumerate(questions):
        asked = tokenize(question.question)[:query]
        tokens, label = slow_label(question, tokenize)
        spans = slow_spans(len(tokens), length - len(asked) - 3, stride)
        for number, (start, size) in enumerate(spans):
            text = ["[CLS]", *asked, "[SEP]", *tokens[start : start + size], "[SEP]"]
            first, last = 0, 0
            if label and label[0] >= start and label[1] <= start + size - 1:
                first, last = (token - start + len(asked) + 2 for token in label)
            max_context = [slow_is_max_context(spans, number, token) for token in range(start, start + size)]
            yield index, tuple(map(vocabulary.token_to_id, text)), len(asked) + 2, max_context, first, last


def plain(window: Window):
    ids, head = window.sequence.input_ids, window.sequence.first_length
    return window.question, ids, head, window.max_context.tolist(), window.start, window.end


def test_windows_are_the_references(tokenizer: Tokenizer):
    questions = squad_examples.make_questions(300)
    windows = build_windows(questions, tokenizer, **SMALL)
    assert len(windows) > 2 * len(questions)
    assert list(map(plain, windows)) == list(slow_windows(questions, tokenizer, 24, 6, 8))


@pytest.mark.parametrize("stride", [1, 3, 7, 150])
def test_spans_and_max_context(stride: int):
    # Of 320 in windows of 300, the last one is so much shorter that its length weighs more than a token.
    for length, capacity in [(320, 300), *itertools.product(range(1, 60, 3), (1, 2, 7, 20))]:
        slow = slow_spans(length, capacity, stride)
        spans = window_spans(length, capacity, stride)
        assert spans == [(start, start + size) for start, size in slow]
        masks = max_context_masks(spans)
        expected = [[slow_is_max_context(slow, n, s + i) for i in range(size)] for n, (s, size) in enumerate(slow)]
        assert [mask.tolist() for mask in masks] == expected
        assert sum(mask.sum() for mask in masks) == length  # Each token in one of them.


def test_a_token_with_as_much_context_in_two_windows_is_the_firsts():
    masks = max_context_masks([(0, 4), (2, 6)])  # Token 2 has one to its side in the first, token 3 in the second.
    assert [mask.tolist() for mask in masks] == [[True, True, True, False], [False, True, True, True]]
    masks = max_context_masks([(0, 5), (2, 7)])  # Token 3 has one to its side in both windows.
    assert [mask.tolist() for mask in masks] == [[True, True, True, True, False], [False, False, True, True, True]]


@pytest.mark.parametrize(
    ("context", "answer", "tokens"),
    [
        ("the leader (1895-1943).", "1895", ["1", "##8", "##9", "##5"]),
        ("the fox", "fox", ["fox"]),
        ("fox", "fox", ["fox"]),
        ("the treeleaf", "leaf", ["##l", "##e", "##a", "##f"]),
        ("the old foxes", "old fox", ["old", "fox"]),
        ("old storm .", "stor", ["storm"]),  # Inside a token: all of it.
        ("a 日本 b", "本", ["本"]),
        ("a cafe\u0301 b", "cafe\u0301", ["c", "##a", "##f", "##e"]),
        ("a cafe\u0301 b", "cafe", ["c", "##a", "##f", "##e"]),
        ("Fóx and TREE", "TREE", ["tree"]),
        ("x\u200by z", "y", ["##y"]),
    ],
)
def test_labels(tokenizer: Tokenizer, context: str, answer: str, tokens: list[str]):
    (window,) = build_windows([squad_examples.question(context, answer)], tokenizer)
    ids = window.sequence.input_ids[window.start : window.end + 1]
    assert [tokenizer.id_to_token(index) for index in ids] == tokens


def test_the_label_is_at_the_answers_own_place(tokenizer: Tokenizer):
    """The reference would take the first 1895 of the word."""
    question = Question("q", "", "fox ?", "fox (1895-1895)", (Answer("1895", 10),))
    (window,) = build_windows([question], tokenizer)
    begin, end = window.offsets[window.start - window.sequence.first_length]
    assert (begin, end) == (10, 11)


def test_answer_tokens():
    offsets = np.array([[0, 3], [4, 5], [4, 5], [5, 9]])
    assert answer_tokens(offsets, 0, 3) == (0, 0)
    assert answer_tokens(offsets, 2, 4) == (0, 0)
    assert answer_tokens(offsets, 3, 4) is None
    assert answer_tokens(offsets, 4, 5) == (1, 2)
    assert answer_tokens(offsets, 4, 6) == (1, 3)
    assert answer_tokens(offsets, 0, 99) == (0, 3)
    assert answer_tokens(offsets, 9, 99) is None
    assert answer_tokens(offsets[:0], 0, 9) is None


def test_no_answer_is_at_cls(tokenizer: Tokenizer):
    impossible = squad_examples.question("the fox sees", None)
    contradictory = dataclasses.replace(squad_examples.question("the fox sees", "fox"), is_impossible=True)
    not_found = Question("q", "", "fox ?", "the fox sees", (Answer("tree", None),))
    dropped = Question("q", "", "fox ?", "the \u200b fox", (Answer("\u200b", 4),))
    windows = build_windows([impossible, contradictory, not_found, dropped], tokenizer)
    assert [(window.start, window.end) for window in windows] == [(0, 0)] * 4


def test_an_answer_that_a_window_cuts_is_not_in_it(tokenizer: Tokenizer):
    context = "old fox tree leaf moss path cabin river ship wave storm"
    question = squad_examples.question(context, "moss path cabin", ask="owl")
    windows = build_windows([question], tokenizer, max_seq_len=10, doc_stride=3, max_query_length=2)
    # Windows of 6: from old (cut at path), leaf (all of it) and cabin (its end).
    assert [(window.start, window.end) for window in windows] == [(0, 0), (4, 6), (0, 0)]


def test_the_answer_at_the_very_end(tokenizer: Tokenizer):
    context = "the old fox " * 60 + "tower"
    windows = build_windows([squad_examples.question(context, "tower")], tokenizer, **SMALL)
    labelled = [window for window in windows if window.start]
    assert labelled == windows[-1:]
    last = windows[-1]
    assert last.start == last.end == len(last.sequence.input_ids) - 2
    assert last.max_context[-1]


def test_a_long_question_loses_its_end(tokenizer: Tokenizer):
    ask = "the fox " * 50
    (window,) = build_windows([squad_examples.question("old tree", "tree", ask=ask)], tokenizer)
    assert window.sequence.first_length == 66
    expected = [tokenizer.cls_id, *tokenizer.encode_batch([ask])[0][:64], tokenizer.sep_id]
    assert list(window.sequence.input_ids[:66]) == expected
    assert len(window.sequence.input_ids) == 69
    full = build_windows([squad_examples.question("fox " * 1000, "fox", ask=ask)], tokenizer)
    assert max(len(window.sequence.input_ids) for window in full) == 384


@pytest.mark.parametrize("context", ["", " \n", "\u200b"])
def test_a_paragraph_without_a_token_has_a_window(tokenizer: Tokenizer, context: str):
    (window,) = build_windows([Question("q", "", "fox ?", context, ())], tokenizer)
    assert window.sequence.input_ids[-2:] == (tokenizer.sep_id, tokenizer.sep_id)
    assert window.offsets.shape == (0, 2)
    assert window.max_context.shape == (0,)
    assert (window.start, window.end) == (0, 0)


def test_a_short_paragraph_is_in_one_window(tokenizer: Tokenizer):
    (window,) = build_windows([squad_examples.question("Old  fox.", "fox", ask="tree")], tokenizer)
    assert window.offsets.tolist() == [[0, 3], [5, 8], [8, 9]]
    assert window.max_context.all()
    assert (window.start, window.end) == (4, 4)


def test_no_questions(tokenizer: Tokenizer):
    assert build_windows([], tokenizer) == []


def test_each_paragraph_is_cut_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    texts: list[str] = []
    cut = Tokenizer.encode_batch_with_offsets

    def counting(self: Tokenizer, batch: list[str]):
        texts.extend(batch)
        return cut(self, batch)

    monkeypatch.setattr(Tokenizer, "encode_batch_with_offsets", counting)
    contexts = [f"fox {number}" for number in range(1_500)]
    questions = [squad_examples.question(context, "fox") for context in contexts for _ in range(2)]
    assert [window.question for window in build_windows(questions, tokenizer)] == list(range(3_000))
    assert texts == contexts


def test_lengths_without_space_for_a_paragraph_are_refused(tokenizer: Tokenizer):
    with pytest.raises(InputError, match=r"max_seq_len=67.*max_query_length=64.*68"):
        build_windows([], tokenizer, max_seq_len=67)
    build_windows([], tokenizer, max_seq_len=68)


TRAIN = ("train-v1.1.partial-12articles", "train-v2.0.partial-10articles")
REAL = list(itertools.product(TRAIN, ("uncased", "cased")))


@pytest.mark.parametrize(
    ("name", "vocab"), [*REAL[::3], *(pytest.param(*one, marks=pytest.mark.long) for one in REAL[1:3])]
)
def test_labels_of_real_answers_are_their_text(data_dir: Path, name: str, vocab: str):
    """Cut out of the paragraph, the labelled tokens are the answer, but for answers that end inside a token."""
    questions = read_questions(data_dir / "squad" / f"{name}.json", BadRows(strict=True), training=True)
    tokenizer = convert_vocabulary(str(data_dir / f"vocab/bert-base-{vocab}-vocab.txt"))
    labelled, wider = set(), 0
    for window in build_windows(questions, tokenizer):
        if window.start:
            question = questions[window.question]
            answer, head = question.answers[0], window.sequence.first_length
            begin, end = window.offsets[window.start - head, 0], window.offsets[window.end - head, 1]
            assert answer.start is not None
            assert begin <= answer.start
            assert end >= answer.start + len(answer.text)
            if window.question not in labelled:
                wider += question.context[begin:end] != answer.text
            labelled.add(window.question)
    answered = sum(bool(question.answers) for question in questions)
    assert len(labelled) == answered
    assert wider <= 0.01 * answered  # 0.6%: "evolution" of "evolutionary", "7" of "1817".


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(("name", "vocab"), REAL[::3])
def test_real_windows_are_the_references(data_dir: Path, name: str, vocab: str, every: int):
    """All but the labels, of which 0.3% are not, and none of those is longer."""
    questions = read_questions(data_dir / "squad" / f"{name}.json", BadRows(strict=True), training=True)[::every]
    tokenizer = convert_vocabulary(str(data_dir / f"vocab/bert-base-{vocab}-vocab.txt"))
    windows = list(map(plain, build_windows(questions, tokenizer)))
    slow = list(slow_windows(questions, tokenizer, 384, 128, 64))
    assert [window[:4] for window in windows] == [window[:4] for window in slow]
    other = [(ours[4:], theirs[4:]) for ours, theirs in zip(windows, slow, strict=True) if ours != theirs]
    assert len(other) < 0.004 * len(windows)
    for ours, theirs in other:
        assert theirs == (0, 0) or ours[1] - ours[0] <= theirs[1] - theirs[0]
