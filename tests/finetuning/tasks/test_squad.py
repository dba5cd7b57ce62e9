"""SQuAD: windows and answers, against the reference's way said plainly, and what perfect logits score on real files."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support import squad_examples

from bert_jax.errors import BertJaxError, InputError
from bert_jax.finetuning.task import BadRows
from bert_jax.finetuning.tasks.squad import (
    Answers,
    Window,
    answer_questions,
    build_windows,
    max_context_masks,
    window_spans,
)
from bert_jax.finetuning.tasks.squad_files import (
    Answer,
    Question,
    exact_match,
    read_questions,
    score_v1,
    score_v2,
)
from bert_jax.text.conversion import convert_vocabulary
from bert_jax.text.tokenizer import Tokenizer

Logits = list[np.ndarray]
SMALL = {"max_seq_len": 24, "doc_stride": 6, "max_query_length": 8}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return squad_examples.tokenizer()


def slow_windows_of(length: int, capacity: int, stride: int) -> list[tuple[int, int]]:
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

    @functools.cache
    def tokenize(text: str) -> list[str]:
        return [vocabulary.vocab[token] for token in vocabulary.encode_batch([text])[0]]

    for index, question in enumerate(questions):
        asked = tokenize(question.question)[:query]
        tokens, label = slow_label(question, tokenize)
        spans = slow_windows_of(len(tokens), length - len(asked) - 3, stride)
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
    questions = squad_examples.make_questions(150)
    windows = build_windows(questions, tokenizer, **SMALL)
    assert len(windows) > 2 * len(questions)
    assert list(map(plain, windows)) == list(slow_windows(questions, tokenizer, 24, 6, 8))


@pytest.mark.parametrize("stride", [1, 3, 7, 150])
def test_spans_and_max_context(stride: int):
    # Of 320 in windows of 300, the last one is so much shorter that its length weighs more than a token.
    for length, capacity in [(320, 300), *itertools.product(range(1, 60, 3), (1, 2, 7, 20))]:
        slow = slow_windows_of(length, capacity, stride)
        spans = window_spans(length, capacity, stride)
        assert spans == [(start, start + size) for start, size in slow]
        masks = max_context_masks(spans)
        expected = [[slow_is_max_context(slow, n, s + i) for i in range(size)] for n, (s, size) in enumerate(slow)]
        assert [mask.tolist() for mask in masks] == expected
        assert sum(mask.sum() for mask in masks) == length  # Each token in one of them.


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
    question = Question("q", "fox ?", "fox (1895-1895)", (Answer("1895", 10),))
    (window,) = build_windows([question], tokenizer)
    begin, end = window.offsets[window.start - window.sequence.first_length]
    assert (begin, end) == (10, 11)


@pytest.mark.parametrize("context", ["", " \n", "\u200b"])
def test_a_paragraph_without_a_token_has_a_window(tokenizer: Tokenizer, context: str):
    (window,) = build_windows([Question("q", "fox ?", context, ())], tokenizer)
    assert window.sequence.input_ids[-2:] == (tokenizer.sep_id, tokenizer.sep_id)
    assert window.offsets.shape == (0, 2)
    assert window.max_context.shape == (0,)
    assert (window.start, window.end) == (0, 0)


def test_lengths_without_space_for_a_paragraph_are_refused(tokenizer: Tokenizer):
    with pytest.raises(InputError, match=r"max_seq_len=67.*max_query_length=64.*68"):
        build_windows([], tokenizer, max_seq_len=67)
    build_windows([], tokenizer, max_seq_len=68)


TRAIN = ("train-v1.1.partial-12articles", "train-v2.0.partial-10articles")
REAL = list(itertools.product(TRAIN, ("uncased", "cased")))


@pytest.mark.parametrize(
    ("name", "vocab", "every"), [(*REAL[3], 5), *(pytest.param(*one, 1, marks=pytest.mark.long) for one in REAL[::3])]
)
def test_real_windows_are_the_references(data_dir: Path, name: str, vocab: str, every: int):
    """All but the labels, of which 0.3% are not, and none of those is longer."""
    questions = read_questions(str(data_dir / "squad" / f"{name}.json"), BadRows(strict=True), training=True)[::every]
    tokenizer = convert_vocabulary(str(data_dir / f"vocab/bert-base-{vocab}-vocab.txt"))
    windows = list(map(plain, build_windows(questions, tokenizer)))
    slow = list(slow_windows(questions, tokenizer, 384, 128, 64))
    assert [window[:4] for window in windows] == [window[:4] for window in slow]
    other = [(ours[4:], theirs[4:]) for ours, theirs in zip(windows, slow, strict=True) if ours != theirs]
    assert len(other) < 0.004 * len(windows)
    for ours, theirs in other:
        assert theirs == (0, 0) or ours[1] - ours[0] <= theirs[1] - theirs[0]


# --- Answers ----------------------------------------------------------------------------------------------------------


def random_logits(windows: Sequence[Window], seed: int, steps: int | None = None, padding: int = 3) -> Logits:
    """Normal, or with many ties: one of `steps` whole numbers. What is behind a window's tokens is padding."""
    rng = np.random.default_rng(seed)
    lengths = [len(window.sequence.input_ids) + padding for window in windows]
    if steps:
        return [rng.integers(steps, size=length).astype(np.float32) for length in lengths]
    return [rng.normal(scale=3, size=length).astype(np.float32) for length in lengths]


def perfect_logits(windows: Sequence[Window]) -> tuple[Logits, Logits]:
    """10 at the label, 0 everywhere else."""
    starts, ends = ([np.zeros(len(window.sequence.input_ids), np.float32) for window in windows] for _ in range(2))
    for window, start, end in zip(windows, starts, ends, strict=True):
        start[window.start] = end[window.end] = 10.0
    return starts, ends


def best_positions(logits: Sequence[float], positions: Sequence[int], count: int) -> list[int]:
    return sorted(positions, key=lambda position: logits[position], reverse=True)[:count]


def slow_spans(own, count: int, max_answer_length: int, all_positions: bool = False):
    """(score, window, start, end) of every candidate; of all positions, or of the paragraph's, the best `count`."""
    for number, (window, starts, ends) in enumerate(own):
        head = window.sequence.first_length
        context = range(head, head + len(window.offsets))
        chosen = range(len(starts)) if all_positions else context
        for start in best_positions(starts, chosen, count):
            for end in best_positions(ends, chosen, count):
                if start not in context or end not in context or not window.max_context[start - head]:
                    continue
                if start <= end < start + max_answer_length:
                    yield float(starts[start]) + float(ends[end]), number, start, end


def slow_answer(question: Question, own, n_best: int, max_answer_length: int, version_2: bool):
    """Best text, null odds and n-best list of one question; `own` are its windows with their logits."""
    spans = list(slow_spans(own, n_best, max_answer_length)) or list(slow_spans(own, 10**9, max_answer_length))
    ranked: list[tuple[float, str, float, float]] = []
    for score, number, start, end in spans:
        window, starts, ends = own[number]
        head = window.sequence.first_length
        text = question.context[window.offsets[start - head, 0] : window.offsets[end - head, 1]]
        ranked.append((score, text, float(starts[start]), float(ends[end])))
    null: tuple[float, str, float, float] | None = None
    if version_2:
        for _, starts, ends in own:
            score = float(starts[0]) + float(ends[0])
            if null is None or score < null[0]:
                null = (score, "", float(starts[0]), float(ends[0]))
        assert null is not None
        ranked.append(null)
    ranked.sort(key=lambda one: one[0], reverse=True)
    listed: list[tuple[float, str, float, float]] = []
    for one in ranked:
        if len(listed) < n_best and one[1] not in [text for _, text, _, _ in listed]:
            listed.append(one)
    if null and null not in listed:
        listed.append(null)
    if not listed:
        listed.append((0.0, "", 0.0, 0.0))
    total = sum(math.exp(one[0] - listed[0][0]) for one in listed)
    nbest = [(text, math.exp(score - listed[0][0]) / total, start, end) for score, text, start, end in listed]
    texts = [one for one in ranked if one[1]]
    best = texts[0] if texts else (null or (0.0,))[:1] + ("",)
    return best[1], null[0] - best[0] if null else None, nbest


@pytest.mark.parametrize("version_2", [False, True])
@pytest.mark.parametrize("steps", [None, 4])
@pytest.mark.parametrize(("n_best", "max_answer_length"), [(20, 30), (3, 4), (1, 1)])
def test_against_plain_loops(
    tokenizer: Tokenizer, version_2: bool, steps: int | None, n_best: int, max_answer_length: int
):
    questions = squad_examples.make_questions(20, seed=n_best)
    windows = build_windows(questions, tokenizer, **SMALL)
    starts, ends = random_logits(windows, 1, steps), random_logits(windows, 2, steps)
    answers = answer_questions(
        questions, windows, starts, ends, n_best=n_best, max_answer_length=max_answer_length, version_2=version_2
    )
    assert list(answers.best) == list(answers.nbest) == [question.id for question in questions]
    for index, question in enumerate(questions):
        own = [
            (window, start[: len(window.sequence.input_ids)], end[: len(window.sequence.input_ids)])
            for window, start, end in zip(windows, starts, ends, strict=True)
            if window.question == index
        ]
        best, odds, nbest = slow_answer(question, own, n_best, max_answer_length, version_2)
        assert answers.best[question.id] == best
        assert answers.null_odds.get(question.id) == odds
        listed = answers.nbest[question.id]
        assert [(one["text"], one["start_logit"], one["end_logit"]) for one in listed] == [
            (t, s, e) for t, _, s, e in nbest
        ]
        np.testing.assert_allclose([one["probability"] for one in listed], [p for _, p, _, _ in nbest], rtol=1e-12)
        # What the reference would choose from is among it.
        theirs = [score for score, *_ in slow_spans(own, n_best, max_answer_length, all_positions=True)]
        ours = [score for score, *_ in slow_spans(own, n_best, max_answer_length)]
        assert not theirs or max(ours) >= max(theirs)


def one_window(tokenizer: Tokenizer, context: str) -> tuple[list[Question], list[Window], Logits, Logits]:
    questions = [squad_examples.question(context, None, ask="fox")]
    windows = build_windows(questions, tokenizer)
    assert len(windows) == 1
    length = len(windows[0].sequence.input_ids)
    return questions, windows, [np.zeros(length, np.float32)], [np.zeros(length, np.float32)]


def test_an_answer_is_the_paragraphs_own_text(tokenizer: Tokenizer):
    questions, windows, (start,), (end,) = one_window(tokenizer, "x Fóx\n  \u200band (e\u0301te\u0301), 日本")
    start[3 + 1], end[-5] = 9, 9  # After [CLS] fox [SEP] x; before `)`, `,`, 日, 本 is the last letter of été.
    end[-5] = 0
    end[-6] = 9
    answers = answer_questions(questions, windows, [start], [end])
    assert answers.best == {"q": "Fóx\n  \u200band (e\u0301te\u0301"}


def test_no_answer_by_threshold(tokenizer: Tokenizer):
    questions, windows, (start,), (end,) = one_window(tokenizer, "old fox tree")
    start[0], end[0], start[4], end[4] = 2.0, 1.5, 1.0, 0.5
    answers = answer_questions(questions, windows, [start], [end], version_2=True)
    assert answers.null_odds == {"q": 2.0}
    assert answers.best == {"q": "fox"}
    assert answers.nbest["q"][0]["text"] == ""
    assert answers.predictions() == answers.predictions(1.99) == {"q": ""}
    assert answers.predictions(2.0) == answers.predictions(3.0) == {"q": "fox"}  # Only what is greater.
    assert answer_questions(questions, windows, [start], [end]).predictions(-100.0) == {"q": "fox"}  # 1.1


def test_a_paragraph_without_a_token_has_no_answer(tokenizer: Tokenizer):
    questions, windows, starts, ends = one_window(tokenizer, " ")
    starts[0][0] = -3
    (candidate,) = answer_questions(questions, windows, starts, ends).nbest["q"]
    assert (candidate["text"], candidate["probability"]) == ("", 1.0)
    for threshold in (-5.0, 0.0, 5.0):
        answers = answer_questions(questions, windows, starts, ends, version_2=True)
        assert answers.predictions(threshold) == {"q": ""}
        assert answers.null_odds == {"q": 0.0}


@pytest.mark.parametrize("value", [math.nan])
def test_logits_that_are_not_finite_are_refused(value: float, tokenizer: Tokenizer):
    questions, windows, starts, ends = one_window(tokenizer, "old fox")
    starts[0][2] = value
    with pytest.raises(BertJaxError, match=r"\bq\b"):
        answer_questions(questions, windows, starts, ends)


def real(data_dir: Path, name: str, vocab: str, every: int = 1) -> tuple[list[Question], list[Window], Answers]:
    path = str(data_dir / "squad" / f"{name}.json")
    questions = read_questions(path, BadRows(strict=True), training="train" in name)[::every]
    tokenizer = convert_vocabulary(str(data_dir / f"vocab/bert-base-{vocab}-vocab.txt"))
    windows = build_windows(questions, tokenizer)
    return questions, windows, answer_questions(questions, windows, *perfect_logits(windows), version_2="v2" in name)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("vocab", "every"), [("uncased", 5), pytest.param("uncased", 1, marks=LONG), pytest.param("cased", 1, marks=LONG)]
)
def test_perfect_logits_of_real_answers(data_dir: Path, vocab: str, every: int):
    """Scores gold spans; short of 100% are answers that end inside a token or are longer than 30 tokens."""
    questions, windows, answers = real(data_dir, "train-v1.1.partial-12articles", vocab, every)
    scores = score_v1(questions, answers.predictions())
    assert scores["exact_match"] > 99.2
    assert scores["f1"] > 99.3
    labels = {window.question: window for window in windows if window.start}
    for index, question in enumerate(questions):
        answer, window = question.answers[0], labels[index]
        if not exact_match(answers.best[question.id], answer.text):
            begin, end = (window.offsets[at - window.sequence.first_length] for at in (window.start, window.end))
            inside_a_token = question.context[begin[0] : end[1]] != answer.text
            assert inside_a_token or window.end - window.start >= 30


@LONG
def test_perfect_logits_of_real_answers_and_none(data_dir: Path):
    questions, _, answers = real(data_dir, "train-v2.0.partial-10articles", "uncased")
    scores = score_v2(questions, answers.predictions(), answers.null_odds, 1.0)
    assert scores["NoAns_exact"] == 100.0
    assert scores["HasAns_exact"] > 99.2
    assert scores["total"] == 4_719
