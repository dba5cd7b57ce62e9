"""Tokenizer of a checkpoint, an export or a folder of transformers, for `prepare --vocab`."""

import shutil
from pathlib import Path

import pytest
from support import helpers

from bert_jax import cli
from bert_jax.data.dataset import PreparedDataset
from bert_jax.interop import huggingface
from bert_jax.text.tokenizer import read_tokenizer
from bert_jax.training.checkpoints import open_checkpoint


def prepare(corpus: Path, vocabulary: Path, output: Path, *more: object) -> int:
    words = ["prepare", "--input", corpus, "--vocab", vocabulary, "--output", output, "--workers", 1, *more]
    return cli.main([str(word) for word in words])


@pytest.mark.parametrize("kind", ["transformers", "imported", "workdir", "export"])
def test_prepare_takes_the_tokenizer_of_a_folder(kind: str, folder: Path, corpus_file: Path, tmp_path: Path):
    (folder / "vocab.txt").unlink()
    place = folder
    if kind != "transformers":
        place = tmp_path / "imported"
        assert cli.main(["import", "--source", str(folder), "--output", str(place)]) == 0
    if kind == "workdir":
        shutil.copytree(place, tmp_path / "workdir" / "checkpoints" / "7")
        place = tmp_path / "workdir"
        (place / "config.json").write_text("{}")
    if kind == "export":
        huggingface.export(open_checkpoint(str(place)), str(tmp_path / "export"))
        place = tmp_path / "export"
    assert prepare(corpus_file, place, tmp_path / "data", "--sentences", "lines") == 0
    dataset = PreparedDataset(str(tmp_path / "data"))
    imported = read_tokenizer(folder / "tokenizer.json")
    assert dataset.tokenizer.sha256 == imported.sha256
    assert dataset.tokenizer.to_json() == imported.to_json()


@pytest.mark.parametrize("kind", ["nothing", "empty", "file"])
def test_what_is_no_tokenizer_is_refused_in_one_line(
    kind: str, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    (tmp_path / "empty").mkdir()
    place = {"nothing": tmp_path / "nothing", "empty": tmp_path / "empty", "file": corpus_file}[kind]
    assert prepare(corpus_file, place, tmp_path / "data") == 2
    (line,) = helpers.error_lines(capsys.readouterr().err)
    assert str(place) in line
    assert not (tmp_path / "data").exists()
