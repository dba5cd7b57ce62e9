"""The report of `prepare`: what was read, dropped and used, and warnings about the corpus."""

import gzip
import logging
import re

import numpy as np
import pytest
from support import helpers
from support.preparing import run

from bert_jax import cli
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.preparation import report
from bert_jax.text.wordpiece import wordpiece_tokenizer

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


FILTERED = ["--eval_fraction", "--min_document_tokens"]

# --- Each of these is said once ---------------------------------------------------------------------------------


def sentences(count: int, of: int = 12) -> list[str]:
    return [f"{'abcdefghij'[n % 10]} {'abcdefghij'[n // 10]} " + "the ship " * (of // 2 - 1) for n in range(count)]


@pytest.mark.parametrize(
    ("documents", "options", "expected"),
    [
        (["\n".join(sentences(90))], {}, ["--pairs"]),
        (["\n".join(sentences(90))], {"pairs": "none"}, []),
        (["\n".join(sentences(n)) for n in (30, 40, 50)], {}, ["--eval_fraction"]),
        (["\n".join(sentences(n)) for n in (30, 40, 50)], {"eval_fraction": 0.0}, []),
        (["\n".join(sentences(n)) for n in range(10, 50)], {"min_document_tokens": 560}, FILTERED),
        (["\n".join(sentences(n)) for n in range(85, 95)], {"bucket_tokens": 1024}, ["--bucket_tokens"]),
        (sentences(30), {}, [RANDOM]),
    ],
    ids=["one", "one without pairs", "three", "none asked for", "filtered", "a shard each", "random"],
)  # fmt: skip
def test_unusual_corpora(documents, options, expected, tokenizer, tmp_path, caplog):
    (tmp_path / "a.txt").write_text("\n\n".join(documents))
    with caplog.at_level(logging.WARNING):
        run(tmp_path / "a.txt", tokenizer, tmp_path / "data", **options)
    assert hints(caplog) == expected


def test_random_segments_of_the_same_document_are_counted(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(sentences(90)))
    (split, _) = run(tmp_path / "a.txt", tokenizer, tmp_path / "one").info.splits.values()
    assert split.same_document == split.random_next > 5
    (tmp_path / "b.txt").write_text("\n\n".join("\n".join(sentences(30)[n:]) for n in range(20)))
    info = run(tmp_path / "b.txt", tokenizer, tmp_path / "many", eval_fraction=0.0).info
    assert not info.splits["train"].same_document


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, {"--seq_len", "--dupe_factor", "--pairs"}),
        ({"dupe_factor": 10}, set()),
        ({"pairs": "none"}, set()),
        ({"max_document_tokens": 120}, {"--max_document_tokens"}),
    ],
)
def test_lost_text_is_said_with_its_cause(options, named, tokenizer, tmp_path, caplog):
    (tmp_path / "a.txt").write_text(helpers.make_corpus(documents=100))
    with caplog.at_level(logging.WARNING):
        data = run(tmp_path / "a.txt", tokenizer, tmp_path / "data", seq_len=32, eval_fraction=0.1, **options)
    lost = [line for line in caplog.messages if re.search("--dupe_factor|--max_document", line)]
    assert len(lost) == bool(named)
    if named:
        assert set(re.findall(r"--\w+", lost[0])) >= named
        share = report.text_counts(data.info)["used_share"]
        assert f"{1 - share:.1%}" in lost[0]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"pairs": "none"}, {"dupe_factor": 3}, {"seq_len": 16}, {"drop_duplicates": True}]
)
def test_used_tokens_are_those_of_the_instances(options, workers, tokenizer, tmp_path):
    """Every word of the corpus is another, except in duplicate documents that are dropped."""
    letters = str.maketrans("0123456789", "abcdefghij")
    lines = [
        [f"{n:02d}{line:02d}{word:d}".translate(letters) for word in range(9)] for n in range(30) for line in range(n)
    ]
    texts = [" ".join(words) for words in lines]
    documents = ["\n".join(texts[n * (n - 1) // 2 : n * (n + 1) // 2]) for n in range(1, 30)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({word for words in lines for word in words})]
    words = wordpiece_tokenizer(pieces, lowercase=True)
    copies = 2 if options.get("drop_duplicates") else 1
    (tmp_path / "a.txt").write_text("\n\n".join(documents * copies))
    options = {"eval_fraction": 0.2, "bucket_tokens": 1024, "short_seq_prob": 0.5, **options}
    data = run(tmp_path / "a.txt", words, tmp_path / "data", workers=workers, **options)
    for name, split in data.info.splits.items():
        rows = data.instances(name, np.arange(data.size(name)))
        used = np.unique(rows["input_ids"][rows["maskable"]])
        assert split.used_tokens == len(used)
        assert 0 < split.used_tokens <= split.tokens
    assert data.info.corpus.tokens == copies * sum(map(len, lines))


def test_the_table(tokenizer, tmp_path, capsys):
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.file_bytes())
    (tmp_path / "a.txt").write_text("the ship .\n\n" + helpers.make_corpus(documents=100))
    vocabulary = ["--vocab", tmp_path / "tokenizer.json"]
    words = ["prepare", "--input", tmp_path / "a.txt", *vocabulary, "--min_document_tokens", 5]
    assert cli.main([*map(str, [*words, "--output", tmp_path / "data", "--workers", 1])]) == 0
    shown = capsys.readouterr().out
    assert cli.main(["inspect", str(tmp_path / "data")]) == 0
    inspected = capsys.readouterr().out
    rows = [line.split() for line in shown.split("\n") if "%" in line and ":" not in line.split("  ")[0]]
    assert all(row in [line.split() for line in inspected.split("\n")] for row in rows)
    assert rows[0][0] == "read"
    assert rows[0][-1] == "100.0%"
    assert rows[0][1] == "101"


# --- Lines are held out if there are too few documents ----------------------------------------------------------


@pytest.mark.parametrize("files", [1, 3])
def test_lines_of_a_file_of_lines_are_held_out(files, tokenizer, tmp_path, caplog):
    """A tweet is a line, and a file without blank lines is one document."""
    letters = str.maketrans("0123456789", "abcdefghij")
    tweets = [" ".join(f"{n:04d}".translate(letters)) + " the ship . the owl ." for n in range(1200)]
    paths = [tmp_path / f"{number}.txt" for number in range(files)]
    for number, path in enumerate(paths):
        path.write_text("\n".join([*tweets[number::files], *tweets[:40]]))
    results = []
    for workers in (1, 2):
        options = {"pairs": "none", "eval_fraction": 0.1, "bucket_tokens": 2048, "sentences": "split"}
        data = run(paths, tokenizer, tmp_path / f"data{workers}", workers=workers, short_seq_prob=0.0, **options)
        results.append(data.info.hash)
    assert len(set(results)) == 1
    held_out, train = (set(lines_of(data, name)) for name in ("eval", "train"))
    assert not held_out & train
    assert held_out | train == set(tweets)
    assert 60 < len(held_out) < 180
    assert data.info.corpus.documents == files
    assert sum(split.tokens for split in data.info.splits.values()) == data.info.corpus.tokens
    assert not hints(caplog)


def lines_of(data: PreparedDataset, split: str) -> list[str]:
    rows = data.instances(split, np.arange(data.size(split)))
    texts = [data.tokenizer.decode(ids[real]) for ids, real in zip(rows["input_ids"], rows["maskable"], strict=True)]
    return re.findall(r"(?:\w ){4}the ship \. the owl \.", " ".join(texts))
