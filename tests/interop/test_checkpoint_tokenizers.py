"""Tokenizer of a checkpoint, an export or a folder of transformers, for `prepare --vocab` and `vocab --extend`."""

import json
from pathlib import Path

import pytest
from etils import epath
from support import helpers

from bert_jax import cli
from bert_jax.data.dataset import PreparedDataset
from bert_jax.interop import huggingface
from bert_jax.interop.source_tokenizers.huggingface_tokenizer import read_tokenizer
from bert_jax.text.wordpiece import TokenizerRules
from bert_jax.training.checkpoints import open_checkpoint


def prepare(corpus: Path, vocabulary: Path, output: Path, *more: object) -> int:
    words = ["prepare", "--input", corpus, "--vocab", vocabulary, "--output", output, "--workers", 1, *more]
    return cli.main([str(word) for word in words])


@pytest.mark.parametrize("kind", ["transformers", "imported", "export"])
def test_prepare_takes_the_tokenizer_of_a_folder(kind: str, folder: Path, corpus_file: Path, tmp_path: Path):
    (folder / "vocab.txt").unlink()
    place = folder
    if kind != "transformers":
        place = tmp_path / "imported"
        assert cli.main(["import", "--source", str(folder), "--output", str(place)]) == 0
    if kind == "export":
        huggingface.export(open_checkpoint(str(place)), str(tmp_path / "export"))
        place = tmp_path / "export"
    assert prepare(corpus_file, place, tmp_path / "data", "--sentences", "lines") == 0
    dataset = PreparedDataset(str(tmp_path / "data"))
    imported = read_tokenizer(epath.Path(folder))
    assert dataset.tokenizer.sha256 == imported.sha256
    assert dataset.tokenizer.rules == imported.rules == TokenizerRules(100, "library")


def test_a_vocabulary_of_a_checkpoint_is_extended(source: Path, tmp_path: Path):
    (tmp_path / "domain.txt").write_text("the shipwreck near the moonlit harbour\n\n" * 20)
    words = ["vocab", "--input", tmp_path / "domain.txt", "--extend", source, "--output", tmp_path / "new.txt"]
    assert cli.main([str(word) for word in words]) == 0
    record = json.loads((tmp_path / "new.txt.json").read_text())
    assert (record["max_word_characters"], record["text_rules"]) == (100, "library")
    assert {"shipwreck", "moonlit"} <= {*(tmp_path / "new.txt").read_text().split("\n")}


@pytest.mark.parametrize("kind", ["nothing", "empty", "dataset", "case"])
def test_what_is_no_tokenizer_is_refused_in_one_line(
    kind: str, source: Path, dataset_dir: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    (tmp_path / "empty").mkdir()
    place = {
        "nothing": tmp_path / "nothing", "empty": tmp_path / "empty", "dataset": dataset_dir, "case": source,
    }[kind]  # fmt: skip
    assert prepare(corpus_file, place, tmp_path / "data", *["--cased"] * (kind == "case")) == 2
    (line,) = helpers.error_lines(capsys.readouterr().err)
    assert str(place) in line
    assert not (tmp_path / "data").exists()
