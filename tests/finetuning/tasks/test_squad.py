"""SQuAD: windows and answers, against the reference's way said plainly, and what perfect logits score on real files."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support import squad_examples

from bert_jax.errors import InputError
from bert_jax.finetuning.task import BadRows, Split
from bert_jax.finetuning.tasks.squad import (
    Answers,
    SquadTask,
    Window,
    answer_questions,
    build_windows,
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
    shapes = [(len(window.sequence.input_ids) + padding, 2) for window in windows]
    if steps:
        return [rng.integers(steps, size=shape).astype(np.float32) for shape in shapes]
    return [rng.normal(scale=3, size=shape).astype(np.float32) for shape in shapes]


def perfect_logits(windows: Sequence[Window]) -> Logits:
    """10 at the label, 0 everywhere else."""
    logits = [np.zeros((len(window.sequence.input_ids), 2), np.float32) for window in windows]
    for window, of_window in zip(windows, logits, strict=True):
        of_window[window.start, 0] = of_window[window.end, 1] = 10.0
    return logits


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
    """Best text, null odds and probabilities of one question; `own` are its windows with their logits."""
    ranked: list[tuple[float, str]] = []
    for score, number, start, end in slow_spans(own, n_best, max_answer_length):
        window, head = own[number][0], own[number][0].sequence.first_length
        text = question.context[window.offsets[start - head, 0] : window.offsets[end - head, 1]]
        ranked.append((score, text))
    ranked = sorted(ranked, key=lambda one: one[0], reverse=True) or [(0.0, "")]
    best, text = ranked[0]
    null = min(float(starts[0]) + float(ends[0]) for _, starts, ends in own) if version_2 else -math.inf
    total = sum(math.exp(score) for score in (*(score for score, _ in ranked), null))
    return text, null - best, (math.exp(best) / total, math.exp(null) / total)


@pytest.mark.parametrize("version_2", [False, True])
@pytest.mark.parametrize("steps", [None, 4])
@pytest.mark.parametrize(("n_best", "max_answer_length"), [(20, 30), (3, 4), (1, 1)])
def test_against_plain_loops(
    tokenizer: Tokenizer, version_2: bool, steps: int | None, n_best: int, max_answer_length: int
):
    questions = squad_examples.make_questions(20, seed=n_best)
    windows = build_windows(questions, tokenizer, **SMALL)
    logits = random_logits(windows, 1, steps)
    answers = answer_questions(
        questions, windows, logits, n_best=n_best, max_answer_length=max_answer_length, version_2=version_2
    )
    for index, question in enumerate(questions):
        own = [
            (window, *of_window[: len(window.sequence.input_ids)].T)
            for window, of_window in zip(windows, logits, strict=True)
            if window.question == index
        ]
        text, odds, probabilities = slow_answer(question, own, n_best, max_answer_length, version_2)
        assert (answers.texts[index], answers.null_odds[index]) == (text, odds)
        assert answers.probabilities[index] == pytest.approx(probabilities, rel=1e-12)
        # What the reference would choose from is among it.
        theirs = [score for score, *_ in slow_spans(own, n_best, max_answer_length, all_positions=True)]
        ours = [score for score, *_ in slow_spans(own, n_best, max_answer_length)]
        assert not theirs or max(ours) >= max(theirs)


def one_window(tokenizer: Tokenizer, context: str) -> tuple[list[Question], list[Window], np.ndarray]:
    questions = [squad_examples.question(context, None, ask="fox")]
    windows = build_windows(questions, tokenizer)
    assert len(windows) == 1
    return questions, windows, np.zeros((len(windows[0].sequence.input_ids), 2), np.float32)


def test_an_answer_is_the_paragraphs_own_text(tokenizer: Tokenizer):
    questions, windows, logits = one_window(tokenizer, "x Fóx\n  \u200band (e\u0301te\u0301), 日本")
    logits[3 + 1, 0] = logits[-6, 1] = 9  # After [CLS] fox [SEP] x; before `)`, `,`, 日, 本 is the last letter of été.
    assert answer_questions(questions, windows, [logits]).texts == ["Fóx\n  \u200band (e\u0301te\u0301"]


def test_no_answer_by_threshold(tokenizer: Tokenizer):
    questions, windows, logits = one_window(tokenizer, "old fox tree")
    logits[0], logits[4] = (2.0, 1.5), (1.0, 0.5)
    answers = answer_questions(questions, windows, [logits], version_2=True)
    assert (answers.texts, answers.null_odds) == (["fox"], [2.0])
    for threshold, text in ((0.0, ""), (1.99, ""), (2.0, "fox"), (3.0, "fox")):  # only what is greater
        task = SquadTask(name="squad/2.0", null_threshold=threshold)
        split = Split("dev", questions, task.encode(questions, tokenizer, labelled=False))
        (row,) = task.predictions(split, [logits])
        assert (row["prediction"], row["null_odds"]) == (text, 2.0)
        assert row["probability"] == answers.probabilities[0][text == ""]


def test_a_paragraph_without_a_token_has_no_answer(tokenizer: Tokenizer):
    questions, windows, logits = one_window(tokenizer, " ")
    logits[0] = -3
    for version_2 in (False, True):
        assert answer_questions(questions, windows, [logits], version_2=version_2).texts == [""]


def real(data_dir: Path, name: str, vocab: str, every: int = 1) -> tuple[list[Question], list[Window], Answers]:
    path = str(data_dir / "squad" / f"{name}.json")
    questions = read_questions(path, BadRows(strict=True), training="train" in name)[::every]
    tokenizer = convert_vocabulary(str(data_dir / f"vocab/bert-base-{vocab}-vocab.txt"))
    windows = build_windows(questions, tokenizer)
    return questions, windows, answer_questions(questions, windows, perfect_logits(windows), version_2="v2" in name)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("vocab", "every"), [("uncased", 5), pytest.param("uncased", 1, marks=LONG), pytest.param("cased", 1, marks=LONG)]
)
def test_perfect_logits_of_real_answers(data_dir: Path, vocab: str, every: int):
    """Scores gold spans; short of 100% are answers that end inside a token or are longer than 30 tokens."""
    questions, windows, answers = real(data_dir, "train-v1.1.partial-12articles", vocab, every)
    scores = score_v1(questions, answers.texts)
    assert scores["exact_match"] > 99.2
    assert scores["f1"] > 99.3
    labels = {window.question: window for window in windows if window.start}
    for index, question in enumerate(questions):
        answer, window = question.answers[0], labels[index]
        if not exact_match(answers.texts[index], answer.text):
            begin, end = (window.offsets[at - window.sequence.first_length] for at in (window.start, window.end))
            inside_a_token = question.context[begin[0] : end[1]] != answer.text
            assert inside_a_token or window.end - window.start >= 30


@LONG
def test_perfect_logits_of_real_answers_and_none(data_dir: Path):
    questions, _, answers = real(data_dir, "train-v2.0.partial-10articles", "uncased")
    scores = score_v2(questions, answers.texts, answers.null_odds, 1.0)
    assert scores["NoAns_exact"] == 100.0
    assert scores["HasAns_exact"] > 99.2
    assert scores["total"] == 4_719
