"""SQuAD questions and files that tests make for themselves."""

import json
import random
from pathlib import Path
from typing import Any

from support import helpers

from bert_jax.finetuning.inputs.squad_files import Answer, Question
from bert_jax.text.tokenization import WordPieceTokenizer

PUNCTUATION = "()-,'$"
DIGITS = "0123456789"


def tokenizer(lowercase: bool = True) -> WordPieceTokenizer:
    """Knows every ASCII letter and digit by itself, the made-up language's words, some punctuation, some Chinese."""
    more = [*PUNCTUATION, *DIGITS, *(f"##{digit}" for digit in DIGITS), "日", "本", "ᄒ", "##ᅡ", "##ᆫ"]
    return WordPieceTokenizer([*helpers.make_vocabulary(), *more], lowercase)


def question(context: str, answer: str | None = None, ask: str = "the old fox ?", name: str = "q") -> Question:
    """One whose answer is the first place of that text in the context; impossible where `answer` is None."""
    answers = () if answer is None else (Answer(answer, context.index(answer)),)
    return Question(name, "title", ask, context, answers, answer is None)


def make_questions(count: int, seed: int = 0, words: tuple[int, int] = (1, 90)) -> list[Question]:
    """Random texts of words, brackets, accents and white space of several kinds; answers of whole words of them."""
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
        result.append(Question(f"q{index}", "title", ask, context, answers, impossible))
    return result


def entry(name: str, answer: str | None, start: int = 0, **more: Any) -> dict[str, Any]:
    """A question as files have it."""
    answers = [] if answer is None else [{"text": answer, "answer_start": start}]
    return {"id": name, "question": f"what is {name} ?", "answers": answers, **more}


def write(path: Path, context: str, *entries: Any) -> Path:
    """A file of one article with one paragraph."""
    article = {"title": "Foxes", "paragraphs": [{"context": context, "qas": list(entries)}]}
    path.write_text(json.dumps({"version": "1.1", "data": [article]}))
    return path
