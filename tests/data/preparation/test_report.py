"""Warnings about a corpus that seems to be split incorrectly into documents."""

import gzip
import json
import logging
import re

import pytest
from support import helpers
from support.preparing import run

from bert_jax.text.wordpiece import WordPieceTokenizer

SENTENCES = ["the ship sees the old sailor .", "a wave hears the ghost .", "the owl finds a moon ."]


def hints(caplog) -> list[str]:
    """Returns the options in each warning, as one string a warning; without that of text which pairs cut."""
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    named = [" ".join(sorted(set(re.findall(r"--\w+", line)))) for line in found]
    return [options for options in named if "--dupe_factor" not in options]


def book(paragraphs: int, sentences: int) -> str:
    """Returns distinct paragraphs of the given number of sentences."""
    lines = [SENTENCES[number % 3] for number in range(sentences)]
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = [f"{a} {b}" for a in letters for b in letters[:6]][:paragraphs]
    return "\n\n".join("\n".join([f"{name} {lines[0]}", *lines[1:]]) for name in names)


def numbered(text: str, count: int) -> list[str]:
    return [f"{'a' * (number // 20 + 1)} {'b' * (number % 20 + 1)} {text}" for number in range(count)]


DOCUMENTS = "--documents"
RANDOM = "--documents --pairs --random_next"


@pytest.mark.parametrize(
    ("paragraphs", "sentences", "options", "expected"),
    [
        (150, 3, {}, [DOCUMENTS]),
        (150, 3, {"documents": "file", "eval_fraction": 0.0}, []),
        (150, 3, {"pairs": "none"}, []),
        (20, 3, {}, []),
        (150, 1, {}, [DOCUMENTS, RANDOM]),
        (150, 1, {"random_next": "reference"}, [DOCUMENTS, RANDOM]),
        (150, 1, {"pairs": "none"}, []),
    ],
)
def test_paragraphs_that_are_taken_for_documents(paragraphs, sentences, options, expected, tokenizer, tmp_path, caplog):
    paths = [tmp_path / f"{name}.txt.gz" for name in "ab"]
    for path in paths:
        path.write_bytes(gzip.compress(f"{path.stem} {book(paragraphs, sentences)}".encode()))
    with caplog.at_level(logging.WARNING):
        run(paths, tokenizer, tmp_path / "data", **options)
    assert hints(caplog) == expected


def test_json_lines_say_their_documents(tokenizer, tmp_path, caplog):
    for name, text, expected in (("short", "\n".join(SENTENCES), []), ("lone", SENTENCES[0], [RANDOM])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": line}) + "\n" for line in numbered(text, 300)))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            run(path, tokenizer, tmp_path / f"data-{name}")
        assert hints(caplog) == expected


@pytest.mark.parametrize("rule", ["paper", "reference"])
def test_nothing_is_said_of_a_corpus_of_documents(rule, tokenizer, tmp_path, caplog):
    (tmp_path / "a.txt").write_text(helpers.make_corpus(documents=300))
    with caplog.at_level(logging.WARNING):
        run(tmp_path / "a.txt", tokenizer, tmp_path / "data", random_next=rule)
    assert not hints(caplog)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("books/khalil-gibran-the-madman.txt.gz", [DOCUMENTS, RANDOM]),
        ("sample_text.txt", ["--eval_fraction"]),
        ("wikiextractor", []),
    ],
)
def test_real_corpora(name, expected, data_dir, tmp_path, caplog):
    vocabulary = str(data_dir / "vocab/bert-base-uncased-vocab.txt")
    with caplog.at_level(logging.WARNING):
        run(data_dir / "corpus" / name, WordPieceTokenizer.from_file(vocabulary), tmp_path / "data", sentences="split")
    assert hints(caplog) == expected
