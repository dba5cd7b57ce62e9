"""Files of folders and patterns: those that describe a dataset are skipped."""

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest

from bert_jax import cli
from bert_jax.data.corpora import corpus
from bert_jax.data.corpora.corpus_inputs import expand
from bert_jax.data.corpora.corpus_options import CorpusOptions
from bert_jax.errors import InputError

DATASET = ("20231101.ab/train-00000-of-00001.parquet", "20231101.en/train-00000-of-00001.parquet")
DESCRIPTIONS = (
    "README.md", "LICENSE", "CITATION.cff", "dataset_infos.json", "wiki.py", "20231101.ab/readme_ab.md",
    "20231101.en/_SUCCESS", "assets/README.md",
)  # fmt: skip


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write_files(*names):
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("text")

    return write_files


def skipped(caplog):
    """Returns the names in the log of what was skipped."""
    lines = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    return " ".join(lines)


def test_descriptions_of_a_dataset_are_skipped_and_logged(write, caplog):
    write(*(f"wiki/{name}" for name in (*DATASET, *DESCRIPTIONS, ".gitattributes", ".cache/x.parquet")))
    with caplog.at_level(logging.INFO):
        assert expand(["wiki"]) == [f"wiki/{name}" for name in DATASET]
    log = skipped(caplog)
    assert "--input=wiki" in log
    assert "wiki/README.md" in log
    assert ".gitattributes" in log
    assert "more" in log  # eight files are too many for a line


@pytest.mark.parametrize("name", ["a.arrow", "a.csv", "a.tsv.gz", "a.jsonl.zst", "a.JSON"])
@pytest.mark.parametrize("pattern", ["d", "d/*", "**"])
def test_records_of_any_format_make_a_dataset(write, name, pattern):
    write(f"d/{name}", "d/README.md", "d/state.json", "d/notes.txt")
    assert expand([pattern]) == [f"d/{name}", "d/notes.txt"]


def test_text_files_are_all_read(write, caplog):
    names = ["d/README.md", "d/a.md", "d/licensed.txt", "d/more/LICENSE.txt", "d/x.py"]
    write(*names)
    with caplog.at_level(logging.INFO):
        assert expand(["d"]) == names
        assert expand(["d/*.md"]) == names[:2]
    assert not caplog.records


def test_text_beside_a_dataset_is_read(write):
    """Only names that describe a dataset are skipped, and apart from README.md only beside it or above it."""
    write("d/books/LICENSE", "d/books/a.md", "d/books/readme.txt", "d/wiki/a.jsonl", "d/wiki/b.md", "d/wiki/LICENSE")
    assert expand(["d"]) == ["d/books/LICENSE", "d/books/a.md", "d/wiki/a.jsonl", "d/wiki/b.md"]


def test_a_file_that_is_named_is_read(write):
    write("d/a.parquet", "d/README.md")
    assert expand(["d", "d/README.md"]) == ["d/a.parquet", "d/README.md"]


def test_a_link_to_the_folder_itself_ends(write, tmp_path):
    write("d/e/a.parquet", "d/README.md")
    (tmp_path / "d" / "e" / "loop").symlink_to("..")
    (tmp_path / "d" / "again").symlink_to(".")
    assert expand(["d"]) == ["d/e/a.parquet"]


@pytest.mark.parametrize("pattern", ["d", "d/**", "d/**/*.txt", "d/*/*.txt", "d/*/*/*.txt"])
def test_a_folder_that_cannot_be_read_is_refused(write, pattern, monkeypatch):
    write("d/a.txt", "d/open/b.txt", "d/open/e/b.txt", "d/closed/c.txt")
    real = os.scandir

    def scandir(path):
        if str(path).rstrip("/") == "d/closed":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(InputError, match="d/closed"):
        expand([pattern])


@pytest.mark.parametrize("pattern", ["d", "d/*", "d/gone.txt"])
def test_a_link_to_nothing_is_refused(write, pattern):
    write("d/a.txt")
    os.symlink("missing", "d/gone.txt")
    os.symlink("missing", "d/.lock")
    with pytest.raises(InputError, match=r"d/gone\.txt"):
        expand([pattern])


def test_descriptions_in_a_store_are_skipped(store, caplog):
    for name in ("wiki/en/a.parquet", "wiki/README.md", "wiki/.gitattributes", "text/README.md"):
        store.put(name, b"text")
    with caplog.at_level(logging.INFO):
        assert expand(["gs://bucket/wiki"]) == ["gs://bucket/wiki/en/a.parquet"]
    assert "gs://bucket/wiki/README.md" in skipped(caplog)
    assert expand(["gs://bucket/text"]) == ["gs://bucket/text/README.md"]


@pytest.mark.parametrize("name", [b"caf\xe9.txt", b"caf\xe9/a.txt"])
def test_a_name_that_is_not_utf8_is_refused_in_one_line(name, tmp_path, vocabulary_file, capsys):
    path = os.fsdecode(os.fsencode(tmp_path / "d") + b"/" + name)
    os.makedirs(os.path.dirname(path))
    Path(path).write_text("the ship .\n\nthe storm .\n")
    (tmp_path / "a.txt").write_text("the ship .\n\nthe storm .\n")
    output = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    good = {"--input": tmp_path / "a.txt", "--output": tmp_path / "data", "--scratch": tmp_path / "s"}
    for changed in ({"--input": path}, {"--input": tmp_path / "d"}, {"--output": output}, {"--scratch": output}):
        options = [str(word) for option in {**good, **changed}.items() for word in option]
        assert cli.main(["prepare", "--vocab", str(vocabulary_file), *options]) == 2
        error = capsys.readouterr().err
        assert r"caf\xe9" in error
        assert error.count("\n") == 1
    assert cli.main(["vocab", "--input", str(tmp_path / "a.txt"), "--output", output]) == 2
    assert not (tmp_path / "data").exists()


def test_own_files_are_no_input(dataset_dir: Path, tokenizer, tmp_path: Path, caplog):
    """A pattern also matches the vocabulary of the command, and files of earlier datasets."""
    (tmp_path / "a.txt").write_text("the ship .")
    (tmp_path / "dataset.json").write_text('{"text": "the sea ."}')  # not of a prepared dataset
    (tmp_path / "words.txt").write_text("[PAD]\n")
    shutil.copytree(dataset_dir, tmp_path / "earlier")
    shutil.copy(dataset_dir / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "earlier" / "notes.txt").write_text("the moon .")
    vocabulary = str(tmp_path / "words.txt")
    with caplog.at_level(logging.INFO):
        found = corpus.plan([str(tmp_path)], CorpusOptions(), vocabulary=vocabulary)
    assert [os.path.relpath(piece.path, tmp_path) for piece in found] == ["a.txt", "dataset.json", "earlier/notes.txt"]
    assert len([message for message in caplog.messages if "earlier/dataset.json" in message]) == 1
    found = corpus.plan([f"{tmp_path}/**/*.txt"], CorpusOptions(), vocabulary=str(tmp_path / "earlier"))
    assert [os.path.basename(piece.path) for piece in found] == ["a.txt", "notes.txt", "words.txt"]
    with pytest.raises(InputError, match=r"input=.*words\.txt"):
        corpus.plan([vocabulary], CorpusOptions(), vocabulary=vocabulary)


@pytest.mark.parametrize("has_model", [False, True])
def test_text_beside_the_vocabulary_is_read(write, has_model):
    """Only files of the tokenizer and the model are skipped in the folder of a vocabulary."""
    names = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "merges.txt"]
    names += ["config.json", "model.safetensors", "pytorch_model.bin", "spiece.model"] if has_model else []
    write("c/a.txt", "c/README.md", "c/sub/b.jsonl", "c/sub/vocab.txt", *(f"c/{name}" for name in names))
    found = [piece.path for piece in corpus.plan(["c/a.txt", "c/README.md", "c"], CorpusOptions(), vocabulary="c")]
    assert found == ["c/a.txt", *([] if has_model else ["c/README.md"]), "c/sub/b.jsonl", "c/sub/vocab.txt"]
