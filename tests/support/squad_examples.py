"""Synthetic SQuAD questions and files for tests."""

import json
import random
from pathlib import Path
from typing import Any

from support import helpers

from bert_jax.finetuning.tasks.squad_files import Answer, Question
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.wordpiece import wordpiece_tokenizer

PUNCTUATION = "()-,'$"
DIGITS = "0123456789"


def tokenizer(lowercase: bool = True) -> Tokenizer:
    """Returns a tokenizer of ASCII letters and digits, the synthetic language's words, punctuation and Chinese."""
    more = [*PUNCTUATION, *DIGITS, *(f"##{digit}" for digit in DIGITS), "日", "本", "ᄒ", "##ᅡ", "##ᆫ"]
    return wordpiece_tokenizer([*helpers.make_vocabulary(), *more], lowercase)


def question(context: str, answer: str | None = None, ask: str = "the old fox ?", name: str = "q") -> Question:
    """Returns a question whose answer is its first occurrence in the context; unanswerable if `answer` is None."""
    answers = () if answer is None else (Answer(answer, context.index(answer)),)
    return Question(name, ask, context, answers, answer is None)


def make_questions(count: int, seed: int = 0, words: tuple[int, int] = (1, 90)) -> list[Question]:
    """Returns questions on random texts of words, brackets, accents and white space; answers are whole words."""
    rng = random.Random(seed)
    some = [
        *helpers.SMALL_WORDS,
        *helpers.VERBS,
        "Naïve",
        "e\u0301te\u0301",
        "(1895-1943).",
        "$5",
        "ship's",
        "日本",
        "TREE",
    ]
    result = []
    for index in range(count):
        parts = [
            part for _ in range(rng.randint(*words)) for part in (rng.choice(some), rng.choice([" ", " ", "\n", "  "]))
        ]
        context = "".join(parts[:-1])
        first = rng.randrange(0, len(parts), 2)
        last = min(len(parts) - 2, first + 2 * rng.randrange(6))
        answer = "".join(parts[first : last + 1])
        start = len("".join(parts[:first]))
        ask = " ".join(rng.choices(some, k=rng.randint(1, 12)))
        impossible = rng.random() < 0.2
        answers = () if impossible else (Answer(answer, start),)
        result.append(Question(f"q{index}", ask, context, answers, impossible))
    return result


def entry(name: str, answer: str | None, start: int = 0, **more: Any) -> dict[str, Any]:
    """Returns a question in the format of SQuAD files."""
    answers = [] if answer is None else [{"text": answer, "answer_start": start}]
    return {"id": name, "question": f"what is {name} ?", "answers": answers, **more}


def write(path: Path, context: str, *entries: Any) -> Path:
    """Returns a SQuAD file of one article with one paragraph."""
    article = {"title": "Foxes", "paragraphs": [{"context": context, "qas": list(entries)}]}
    path.write_text(json.dumps({"version": "1.1", "data": [article]}))
    return path
