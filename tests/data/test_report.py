"""Report of `prepare` and `inspect`: what was read, dropped and used, warnings, and what a phase will read."""

import json
import logging
import re

import numpy as np
import pytest
from support import helpers
from support.preparing import run

from bert_jax import cli
from bert_jax.data import report
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.loading.loader import TrainRows
from bert_jax.data.loading.masking import Masking
from bert_jax.data.preparation import shards
from bert_jax.errors import InputError
from bert_jax.text.wordpiece import wordpiece_tokenizer


def hints(caplog) -> list[str]:
    """Returns the options in each warning, as one string a warning; without that of text which pairs cut."""
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    named = [" ".join(sorted(set(re.findall(r"--\w+", line)))) for line in found]
    return [options for options in named if "--dupe_factor" not in options]


# --- Each of these is said once ---------------------------------------------------------------------------------


def sentences(count: int, of: int = 12) -> list[str]:
    return [f"{'abcdefghij'[n % 10]} {'abcdefghij'[n // 10]} " + "the ship " * (of // 2 - 1) for n in range(count)]


@pytest.mark.parametrize(
    ("documents", "options", "expected"),
    [
        (["\n".join(sentences(90))], {}, ["--eval_fraction", "--bucket_tokens --pairs"]),
        (["\n".join(sentences(90))], {"pairs": "none"}, []),
        (["\n".join(sentences(90))], {"pairs": "sop"}, ["--eval_fraction"]),
        (["\n".join(sentences(n)) for n in (30, 40, 50)], {}, ["--eval_fraction"]),
        (["\n".join(sentences(n)) for n in (30, 40, 50)], {"eval_fraction": 0.0}, []),
        (["\n".join(sentences(n)) for n in (30, 40, 50)] * 9, {"drop_duplicates": True}, ["--eval_fraction"]),
        (["\n".join(sentences(n)) for n in range(85, 95)], {"bucket_tokens": 1024}, ["--bucket_tokens --pairs"]),
        (sentences(30), {}, ["--documents --pairs"]),
        (sentences(30), {"pairs": "none"}, []),
        (sentences(40) + ["\n".join(sentences(n)[-2:]) for n in range(58, 68)], {"pairs": "sop"}, ["--eval_fraction"]),
    ],
    ids=[
        "one", "no pairs of one", "ordered", "three", "none held out", "filtered", "a shard each", "lone",
        "no pairs", "no pair held out",
    ],
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
    info = run(tmp_path / "a.txt", tokenizer, tmp_path / "ordered", pairs="sop").info
    assert (info.splits["train"].same_document, info.splits["train"].random_next) == (0, 0)
    labels = TrainRows(PreparedDataset(str(tmp_path / "ordered")), seed=0, masking=Masking()).rows(np.arange(12))
    assert 0 < labels["next_sentence_labels"].sum() < 12
    (tmp_path / "c.txt").write_text("\n\n".join(sentences(30)))
    with pytest.raises(InputError, match="no document has two sentences"):
        run(tmp_path / "c.txt", tokenizer, tmp_path / "lone", pairs="sop")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "pairs longer than --seq_len"),
        ({"dupe_factor": 10}, ""),
        ({"pairs": "none"}, ""),
        ({"max_line_repeats": 2, "dupe_factor": 10}, "repeated lines"),
    ],
)
def test_lost_text_is_said_with_its_cause(options, named, tokenizer, tmp_path, caplog):
    repeats = 300 if "max_line_repeats" in options else 0
    (tmp_path / "a.txt").write_text(helpers.make_corpus(documents=100) + "\n\nthe owl .\na wave .\n" * repeats)
    with caplog.at_level(logging.WARNING):
        data = run(tmp_path / "a.txt", tokenizer, tmp_path / "data", seq_len=32, eval_fraction=0.1, **options)
    lost = [line for line in caplog.messages if "--dupe_factor" in line]
    assert len(lost) == bool(named)
    if named:
        assert f"{1 - report.describe(data.info)['used_share']:.1%}" in lost[0]
        assert f"because {named}" in lost[0].replace("of the filter of ", "")


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
    (tmp_path / "a.txt").write_text("the ship .\n\n" * 2 + helpers.make_corpus(documents=100))
    vocabulary = ["--vocab", tmp_path / "tokenizer.json"]
    words = ["prepare", "--input", tmp_path / "a.txt", *vocabulary, "--drop_duplicates"]
    assert cli.main([*map(str, [*words, "--output", tmp_path / "data", "--workers", 1])]) == 0
    shown = capsys.readouterr().out
    assert cli.main(["inspect", str(tmp_path / "data")]) == 0
    inspected = capsys.readouterr().out
    rows = [line.split() for line in shown.split("\n") if "%" in line and ":" not in line.split("  ")[0]]
    assert all(row in [line.split() for line in inspected.split("\n")] for row in rows)
    assert rows[0][0] == "read"
    assert rows[0][-1] == "100.0%"
    assert rows[0][1] == "102"


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


# --- Inspect ----------------------------------------------------------------------------------------------------


def test_the_share_of_unknown_tokens(tokenizer, tmp_path):
    (tmp_path / "text.txt").write_text("the ship Ω sees a wave near .\n\n" * 40)
    run(tmp_path / "text.txt", tokenizer, tmp_path / "data", eval_fraction=0.0, pairs="none")
    found = report.inspect_dataset(str(tmp_path / "data"))
    assert found["unk_rate"] == pytest.approx(1 / 8)
    text = "\n".join(report.render(found))
    assert "[UNK] 12.500% of tokens" in text
    assert "random" not in text
    assert text.count("padding") == 1  # the eval split is empty
    assert np.isnan(found["eval"]["padding_share"])


def test_command(dataset_dir, capsys):
    assert cli.main(["inspect", str(dataset_dir), "--samples", "1"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"train: [0-9,]+ documents, [0-9,]+ instances, [0-9.]+% .*\n  shards: [0-9]+", text)
    assert ">[MASK]}" in text
    assert max(map(len, text.split("\n")[1:-2])) < 100  # but for the path and the instance
    assert cli.main(["inspect", str(dataset_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seq_len"] == 64
    assert cli.main(["inspect", str(dataset_dir), "--samples", "-1"]) == 2
    assert cli.main(["inspect", str(dataset_dir.parent)]) == 2
    assert "dataset.json" in capsys.readouterr().err


def test_samples_are_rows_of_a_run(dataset_dir):
    found, dataset = report.inspect_dataset(str(dataset_dir), samples=20), PreparedDataset(str(dataset_dir))
    lengths = dataset.lengths("train")
    assert found["train"]["padding_share"] == pytest.approx(1 - lengths.mean() / 64)
    batch = TrainRows(dataset, seed=0, masking=Masking()).rows(np.arange(20))
    for row, sample in enumerate(found["samples"]):
        assert sample["random_next"] == batch["next_sentence_labels"][row, 0]
        pieces = sample["text"].split(" ")
        read = [piece.strip("{}").split(">")[-1] if piece[0] == "{" else piece for piece in pieces]
        ids = batch["input_ids"][row][batch["sequence_ids"][row] > 0]
        assert read == [dataset.tokenizer.id_to_token(int(token)) for token in ids]
        predicted = batch["masked_positions"][row][batch["masked_weights"][row] > 0]
        assert np.flatnonzero([piece[0] == "{" for piece in pieces]).tolist() == predicted.tolist()
    assert {sample["random_next"] for sample in found["samples"]} == {True, False}


# --- Text that does not fit the vocabulary -----------------------------------------------------------------------


KNOWN = "the ship sees the old sailor near a wave ."  # 10 tokens


def corpus(path, unknown: int, lines: int = 200) -> str:
    """Text in which `unknown` of 1,000 words are in no vocabulary."""
    words = (KNOWN.split() * lines)[: 10 * lines]
    for number in range(len(words)):
        if number * 7 % 1000 < unknown:
            words[number] = "漢"
    rows = [" ".join(words[start : start + 10]) for start in range(0, len(words), 10)]
    path.write_text("\n\n".join("\n".join(rows[start : start + 4]) for start in range(0, len(rows), 4)))
    return str(path)


@pytest.mark.parametrize(("unknown", "warned"), [(10, False), (50, True), (150, True)])
def test_some_unknown_words_are_a_warning(unknown, warned, tokenizer, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        data = run(corpus(tmp_path / "a.txt", unknown), tokenizer, tmp_path / "data", eval_fraction=0.0)
    share = data.token_counts()[tokenizer.unk_id] / data.token_counts().sum()
    assert share == pytest.approx(unknown / 1000)
    found = [record.getMessage() for record in caplog.records if "[UNK]" in record.getMessage()]
    assert len(found) == warned
    if warned:
        assert str(tmp_path / "data") in found[0]
        assert f"{unknown / 10:.1f}%" in found[0]


def test_many_unknown_words_are_refused_before_the_second_pass(
    vocabulary_file, tokenizer, tmp_path, monkeypatch, capsys
):
    path = corpus(tmp_path / "a.txt", 400)

    def command(*more: object) -> int:
        arguments = [
            "prepare", "--input", path, "--vocab", vocabulary_file,
            "--output", tmp_path / "data", "--sentences", "lines", "--workers", 1, *more,
        ]  # fmt: skip
        return cli.main([str(word) for word in arguments])

    with monkeypatch.context() as patch:
        patch.setattr(shards, "build", None)
        assert command() == 2
    error = capsys.readouterr().err
    assert "40.0%" in error
    assert "--allow_unk=0.2" in error
    assert "--allow_unk=0.45" in error
    assert not (tmp_path / "data").exists()
    assert command("--allow_unk", 0.45) == 0
    allowed = PreparedDataset(str(tmp_path / "data")).info
    assert "allow_unk" not in allowed.options
