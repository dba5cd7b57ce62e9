"""Vocabularies of other kinds than WordPiece through the commands: from text to an exported model, and back."""

import json
from pathlib import Path

import numpy as np
import pytest
from support import encoders, helpers

from bert_jax import cli, load
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.loading.loader import TrainRows
from bert_jax.data.loading.masking import Masking
from bert_jax.text.tokenizer import read_tokenizer

TEXT = "the old ship sees a [MASK] near the harbour ."


@pytest.fixture(scope="module", params=["unigram", "byte_bpe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with corpus.txt, vocabulary.json, and data, a dataset of it."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "corpus.txt").write_text(helpers.make_corpus(60))
    size = {"unigram": 120, "byte_bpe": 300}[request.param]
    run(
        "vocab", "--input", folder / "corpus.txt", "--kind", request.param, "--size", size, "--output",
        folder / "vocabulary.json",
    )  # fmt: skip
    prepare(folder, "data", workers=1)
    return folder


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    """A checkpoint with the vocabulary and initial values."""
    return encoders.save_encoder(folder / "checkpoint", read_tokenizer(folder / "vocabulary.json"))


def run(*arguments: object) -> None:
    assert cli.main([str(argument) for argument in arguments]) == 0


def prepare(folder: Path, output: str, *, workers: int) -> None:
    run(
        "prepare", "--input", folder / "corpus.txt", "--vocab", folder / "vocabulary.json", "--output", folder / output,
        "--seq_len", 64, "--sentences", "lines", "--workers", workers, "--eval_fraction", 0.1,
    )  # fmt: skip


def test_whole_words_are_masked_together(folder: Path):
    dataset = PreparedDataset(str(folder / "data"))
    rows = TrainRows(dataset, seed=0, masking=Masking(mask_rate=0.4, whole_word=True))
    batch = rows.rows(np.arange(32))
    masked = np.zeros(batch["input_ids"].shape, bool)
    originals = batch["input_ids"].copy()
    for row, slot in zip(*np.nonzero(batch["masked_weights"]), strict=True):
        position = batch["masked_positions"][row, slot]
        masked[row, position] = True
        originals[row, position] = batch["masked_ids"][row, slot]
    continues = dataset.tokenizer.continues_word(originals)
    previous_is_special = np.isin(np.roll(originals, 1, axis=1), [dataset.tokenizer.cls_id, dataset.tokenizer.sep_id])
    tails = continues & ~previous_is_special
    assert tails.sum() > 200
    assert (masked[tails] == np.roll(masked, 1, axis=1)[tails]).all()
    assert 0.2 < masked[tails].mean() < 0.6


def test_fill_mask_and_features(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    run("fill-mask", "--checkpoint", checkpoint, TEXT, "--json")
    (shown,) = json.loads(capsys.readouterr().out)["texts"]
    assert len(shown["masks"][0]) == 5
    fillings = load(str(checkpoint)).fill_mask(TEXT)[0]
    assert all(filling.text.removeprefix("[CLS]").strip().startswith("the old ship sees a") for filling in fillings)
    (tmp_path / "lines.txt").write_text("the old ship\na gull ||| near the harbour\n")
    run(
        "features", "--checkpoint", checkpoint, "--input", tmp_path / "lines.txt", "--output", tmp_path / "out.jsonl",
        "--layers=-1",
    )  # fmt: skip
    tokens = [json.loads(line)["features"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    joined = "".join(feature["token"] for feature in tokens[0])
    assert joined.replace("Ġ", "▁") == "[CLS]▁the▁old▁ship[SEP]"


def test_exported_model_and_tokenizer_in_transformers_and_back(checkpoint: Path, tmp_path: Path):
    run("export", "--checkpoint", checkpoint, "--output", tmp_path / "hf")
    run("import", "--source", tmp_path / "hf", "--output", tmp_path / "imported")
    ours, imported = load(str(checkpoint)), load(str(tmp_path / "imported"))
    assert imported.tokenizer.to_json() == ours.tokenizer.to_json()
    expected = ours.fill_mask(TEXT)
    assert imported.fill_mask(TEXT) == expected
    transformers = pytest.importorskip("transformers", reason="needs the parity extra: torch and transformers")
    pipeline = transformers.pipeline("fill-mask", model=str(tmp_path / "hf"), top_k=5)
    theirs = pipeline(TEXT)
    np.testing.assert_allclose(
        [filling["score"] for filling in theirs], [filling.probability for filling in expected[0]], atol=1e-5
    )
    assert [ours.tokenizer.vocab[filling["token"]] for filling in theirs] == [filling.token for filling in expected[0]]
