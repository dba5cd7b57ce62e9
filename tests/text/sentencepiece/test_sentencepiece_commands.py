"""A SentencePiece vocabulary through the commands: from text to an exported model, and back."""

import json
from pathlib import Path

import numpy as np
import pytest
from support import encoders, helpers

from bert_jax import cli, load
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.loading.loader import TrainRows
from bert_jax.data.loading.masking import Masking
from bert_jax.errors import InputError
from bert_jax.text.sentencepiece import model_proto
from bert_jax.text.sentencepiece.sentencepiece_tokenizer import SentencePieceTokenizer
from bert_jax.text.vocabulary_record import open_vocabulary

MODEL = {
    "total_steps": 3, "model.num_hidden_layers": 1, "model.hidden_size": 32, "model.num_attention_heads": 2,
    "model.intermediate_size": 64, "model.max_position_embeddings": 64, "global_batch_size": 8, "eval_batches": 1,
    "optimizer.warmup_steps": 1, "objective.whole_word": True, "tracking.samples": 1,
}  # fmt: skip
TEXT = "the old ship sees a [MASK] near the harbour ."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with corpus.txt, unigram.model, and data, a dataset of it."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "corpus.txt").write_text(helpers.make_corpus(60))
    corpus = str(folder / "corpus.txt")
    run("vocab", "--input", corpus, "--kind", "unigram", "--size", 120, "--output", folder / "unigram.model")
    run(
        "prepare", "--input", corpus, "--vocab", folder / "unigram.model", "--output", folder / "data",
        "--seq_len", 64, "--sentences", "lines", "--workers", 1, "--eval_fraction", 0.1,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    """A checkpoint with the vocabulary and initial values."""
    return encoders.save_encoder(folder / "checkpoint", open_vocabulary(str(folder / "unigram.model")))


def run(*arguments: object) -> None:
    assert cli.main([str(argument) for argument in arguments]) == 0


def test_record_and_dataset_know_the_kind(folder: Path):
    record = json.loads((folder / "unigram.model.json").read_text())
    assert (record["kind"], record["lowercase"], record["strip_accents"]) == ("sentencepiece", True, True)
    dataset = PreparedDataset(str(folder / "data"))
    assert isinstance(dataset.tokenizer, SentencePieceTokenizer)
    assert dataset.tokenizer.sha256 == open_vocabulary(str(folder / "unigram.model")).sha256
    assert dataset.info.tokenizer["kind"] == "sentencepiece"
    assert (folder / "data" / "sentencepiece.model").read_bytes() == (folder / "unigram.model").read_bytes()


def test_bytes_of_the_dataset_do_not_depend_on_workers(folder: Path):
    run(
        "prepare", "--input", folder / "corpus.txt", "--vocab", folder / "unigram.model", "--output", folder / "two",
        "--seq_len", 64, "--sentences", "lines", "--workers", 2, "--eval_fraction", 0.1,
    )  # fmt: skip
    names = {path.name for path in (folder / "data").iterdir()} - {"provenance.json"}
    assert names == {path.name for path in (folder / "two").iterdir()} - {"provenance.json"}
    for name in names:
        assert (folder / "data" / name).read_bytes() == (folder / "two" / name).read_bytes(), name


def test_damaged_model_file_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    data = (folder / "unigram.model").read_bytes()
    (tmp_path / "cut.model").write_bytes(data[: len(data) // 2])
    arguments = [
        "prepare",
        "--input",
        folder / "corpus.txt",
        "--vocab",
        tmp_path / "cut.model",
        "--output",
        tmp_path / "d",
    ]
    assert cli.main(list(map(str, arguments))) == 2
    assert str(tmp_path / "cut.model") in capsys.readouterr().err
    (tmp_path / "cut.model.json").write_bytes((folder / "unigram.model.json").read_bytes())
    assert cli.main(list(map(str, arguments))) == 2
    assert "sha256" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["piece", "normalizer"])
def test_a_model_whose_names_are_not_utf8_is_named(field: str, folder: Path, tmp_path: Path):
    data = (folder / "unigram.model").read_bytes()
    name = model_proto.parse(data).normalizer_spec.name if field == "normalizer" else "[MASK]"
    assert data.count(name.encode()) >= 1
    (tmp_path / "odd.model").write_bytes(data.replace(name.encode(), b"\xff" * len(name)))
    with pytest.raises(InputError, match=r"odd\.model.*UTF-8"):
        open_vocabulary(str(tmp_path / "odd.model"))


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


@pytest.mark.long
def test_pretraining_with_whole_word_masks(folder: Path, tmp_path: Path):
    run(
        "pretrain", "--config=bert_tiny", f"--workdir={tmp_path / 'run'}", f"--config.data.path={folder / 'data'}",
        *helpers.flags(MODEL),
    )  # fmt: skip
    pretrained = load(str(tmp_path / "run"))
    assert pretrained.tokenizer.sha256 == PreparedDataset(str(folder / "data")).tokenizer.sha256
    assert pretrained.config.vocab_size == pretrained.tokenizer.vocab_size


def test_inspect_joins_pieces_to_words(folder: Path, capsys: pytest.CaptureFixture):
    run("inspect", folder / "data", "--samples", 2)
    shown = capsys.readouterr().out
    assert "[CLS] " in shown
    assert ">[MASK]}" in shown


def test_fill_mask_and_features(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    run("fill-mask", "--checkpoint", checkpoint, TEXT, "--json")
    (shown,) = json.loads(capsys.readouterr().out)["texts"]
    assert len(shown["masks"][0]) == 5
    fillings = load(str(checkpoint)).fill_mask(TEXT)[0]
    assert all(filling.text.startswith("the old ship sees a") for filling in fillings)
    (tmp_path / "lines.txt").write_text("the old ship\na gull ||| near the harbour\n")
    run(
        "features",
        "--checkpoint",
        checkpoint,
        "--input",
        tmp_path / "lines.txt",
        "--output",
        tmp_path / "out.jsonl",
        "--layers=-1",
    )
    tokens = [json.loads(line)["features"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    joined = "".join(feature["token"] for feature in tokens[0])
    assert joined == "[CLS]▁the▁old▁ship[SEP]"


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


def test_import_refuses_another_case(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    run("export", "--checkpoint", checkpoint, "--output", tmp_path / "hf")
    assert cli.main(["import", "--source", str(tmp_path / "hf"), "--output", str(tmp_path / "i"), "--cased"]) == 2
    assert "--cased" in capsys.readouterr().err
    settings = tmp_path / "hf" / "tokenizer_config.json"
    described = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    described["normalizer"] = None  # not the normalization of this package: a model of another source
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(described))
    assert cli.main(["import", "--source", str(tmp_path / "hf"), "--output", str(tmp_path / "i")]) == 2
    assert f"{settings}: do_lower_case=true" in capsys.readouterr().err
