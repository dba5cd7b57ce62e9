"""Features: each hidden state against `encode`, all forms of the file, and how lines are read."""

import gzip
import json
import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from support import sources

import bert_jax
from bert_jax import cli

LINES = [
    "the ship sees the moon .",
    "the owl hears ||| a ghost near the harbour .",
    "",
    "  star [MASK]  ",
    "the ship sees the storm . " * 9,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, vocabulary: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("features")
    sources.write_checkpoint(folder / "checkpoint", vocabulary, heads=("mlm_head",), num_hidden_layers=3)
    (folder / "lines.txt").write_text("\n".join(LINES) + "\n")
    return folder


def extract(folder: Path, output: Path, *options: object) -> int:
    arguments = ["features", "--checkpoint", folder / "checkpoint", "--output", output, "--input", folder / "lines.txt"]
    return cli.main([str(argument) for argument in [*arguments, *options]])


def states_of(folder: Path, text: str, pair: str | None = None) -> tuple[list[str], np.ndarray]:
    """Pieces and all hidden states [layers + 1, tokens, D] of one text on its own."""
    bert = bert_jax.load(str(folder / "checkpoint"))
    batch = bert.batch(text, pair)
    hidden = jax.jit(lambda batch: bert.model.encode(batch, all_hidden_states=True)[1])(batch)
    return [bert.tokenizer.id_to_token(int(i)) for i in batch["input_ids"][0]], np.asarray(hidden[:, 0])


def test_json_lines_are_the_references(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    assert extract(folder, tmp_path / "out.jsonl", "--layers=-1,-2") == 0
    assert "cut" not in capsys.readouterr().out
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert lines[0].startswith(
        '{"linex_index": 0, "features": [{"token": "[CLS]", "layers": [{"index": -1, "values": ['
    )
    rows = [json.loads(line) for line in lines]
    assert [row["linex_index"] for row in rows] == list(range(len(LINES)))
    for number, texts in ((0, LINES[:1]), (1, ["the owl hears", "a ghost near the harbour ."])):
        pieces, hidden = states_of(folder, *texts)
        assert [token["token"] for token in rows[number]["features"]] == pieces
        for position, token in enumerate(rows[number]["features"]):
            assert [layer["index"] for layer in token["layers"]] == [-1, -2]
            for layer in token["layers"]:
                np.testing.assert_allclose(layer["values"], hidden[layer["index"], position], atol=2e-6)
                assert layer["values"] == [round(value, 6) for value in layer["values"]]
    assert [token["token"] for token in rows[2]["features"]] == ["[CLS]", "[SEP]"]
    assert [token["token"] for token in rows[3]["features"]].count("[MASK]") == 0  # it is text


def test_arrays_hold_the_same(folder: Path, tmp_path: Path):
    assert extract(folder, tmp_path / "out.npz", "--layers=embeddings,0,-1") == 0
    with np.load(tmp_path / "out.npz", allow_pickle=False) as arrays:
        values, tokens, ids, offsets, layers = (
            arrays[name] for name in ("values", "tokens", "input_ids", "offsets", "layers")
        )
    assert layers.tolist() == ["embeddings", "0", "-1"]
    assert values.dtype == np.float32
    assert values.shape == (offsets[-1], 3, 48)
    assert len(offsets) == len(LINES) + 1
    bert = bert_jax.load(str(folder / "checkpoint"))
    assert tokens.tolist() == [bert.tokenizer.id_to_token(int(i)) for i in ids]
    for number, texts in ((0, LINES[:1]), (1, ["the owl hears", "a ghost near the harbour ."]), (4, LINES[4:])):
        pieces, hidden = states_of(folder, *texts)
        row = slice(offsets[number], offsets[number + 1])
        assert tokens[row].tolist() == pieces
        np.testing.assert_allclose(values[row], np.moveaxis(hidden[[0, 1, -1]], 0, 1), atol=2e-6)


def test_long_lines_are_cut_and_counted(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "long.txt.gz").write_bytes(
        gzip.compress(b"the ship sees ||| the moon and the old star\nthe ship\nthe ship sees the moon .")
    )
    assert (
        extract(folder, tmp_path / "out.npz", "--input", tmp_path / "long.txt.gz", "--seq_len", 8, "--layers=-1") == 0
    )
    assert re.search(r'"truncated_lines": 1$', capsys.readouterr().out, re.MULTILINE)
    assert (
        extract(folder, tmp_path / "cut.npz", "--input", tmp_path / "long.txt.gz", "--seq_len", 7, "--layers=-1") == 0
    )
    assert re.search(r'"truncated_lines": 2$', capsys.readouterr().out, re.MULTILINE)
    with np.load(tmp_path / "cut.npz") as arrays:
        first, last = arrays["tokens"][: arrays["offsets"][1]], arrays["tokens"][arrays["offsets"][2] :]
    assert first.tolist() == ["[CLS]", "the", "ship", "[SEP]", "the", "moon", "[SEP]"]
    assert last.tolist() == ["[CLS]", "the", "ship", "sees", "the", "moon", "[SEP]"]


def test_a_pair_is_parted_at_the_last_bars(folder: Path, tmp_path: Path):
    (tmp_path / "bars.txt").write_text("the ship ||| the owl ||| star .\nthe ship |||  \n")
    assert extract(folder, tmp_path / "out.npz", "--layers=-1", "--input", tmp_path / "bars.txt") == 0
    with np.load(tmp_path / "out.npz") as arrays:
        first, second = np.split(arrays["tokens"], arrays["offsets"][1:2])
    assert " ".join(first) == "[CLS] the ship [UNK] [UNK] [UNK] the owl [SEP] star . [SEP]"
    assert " ".join(second) == "[CLS] the ship [UNK] [UNK] [UNK] [SEP]"


def test_the_default_is_the_last_four_layers_of_those_that_there_are(folder: Path, tmp_path: Path):
    assert extract(folder, tmp_path / "new" / "out.npz") == 0  # a model of three layers
    with np.load(tmp_path / "new" / "out.npz") as arrays:
        assert arrays["layers"].tolist() == ["-1", "-2", "-3"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers=-4"], r"layer '-4'.*-3 to 2"),
        (["--layers=3"], r"layer '3'"),
        (["--layers=middle"], "layer 'middle'.*embeddings"),
        (["--layers=-1,"], "layer ''"),
        (["--layers="], "layer ''"),
        ([f"--layers={'9' * 5000}"], "layer '9999"),
        (["--seq_len", "65"], r"--seq_len=65\b.*3 to 64"),
        (["--seq_len", "2"], r"--seq_len=2\b.*3 to 64"),
        (["--batch_size", "0"], r"--batch_size.*\b65,?536\b"),
        (["--input", "missing.txt"], "missing.txt"),
    ],
)
def test_refusals(options: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    if not any(option.startswith("--layers") for option in options):
        options = ["--layers=-1", *options]
    assert extract(folder, tmp_path / "out.npz", *options) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_input_that_can_be_read_once_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    os.mkfifo(tmp_path / "fifo")
    for given in (tmp_path / "fifo", tmp_path):
        assert extract(folder, tmp_path / "out.npz", "--layers=-1", "--input", given) == 2
        assert str(given) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["fifo"]


def test_input_that_is_not_text(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    for name, content, message in (("bad", b"the ship\n\xff\n", r"bad:2: .*UTF-8"), ("empty", b"", "empty: ")):
        (tmp_path / name).write_bytes(content)
        assert extract(folder, tmp_path / "out.npz", "--layers=-1", "--input", tmp_path / name) == 2
        assert re.search(message, capsys.readouterr().err)
    for name, content, found in (
        ("a.csv", b"text\nthe ship\n", "a table"), ("a.jsonl", b'{"text": "the ship"}\n', "JSON lines"),
        ("a.txt", b"PAR1\x15\x00", "0x00"), ("c.txt", "the ship\n".encode("utf-16"), "iconv -f UTF-16"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        assert extract(folder, tmp_path / "out.npz", "--layers=-1", "--input", tmp_path / name) == 2
        error = capsys.readouterr().err
        assert f"{tmp_path / name}: " in error
        assert found in error
    assert not (tmp_path / "out.npz").exists()
    (tmp_path / "mine.npz").write_text("mine")
    assert extract(folder, tmp_path / "mine.npz", "--layers=-1") == 2
    assert f"--output={tmp_path / 'mine.npz'}" in capsys.readouterr().err
    assert (tmp_path / "mine.npz").read_text() == "mine"
