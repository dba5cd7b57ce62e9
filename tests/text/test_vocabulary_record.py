"""The case of a vocabulary, recorded by `vocab` and read by `prepare`."""

import hashlib
import json

import pytest

from bert_jax import cli
from bert_jax.data.dataset import PreparedDataset
from bert_jax.text.tokenizer import SPECIAL_TOKENS
from bert_jax.text.wordpiece import WordPieceTokenizer

TEXT = "\n\n".join(f"The Ship {letter} sees the OLD Sailor .\nA wave hears the Ghost ." for letter in "abcdefgh") + "\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "corpus.txt").write_text(TEXT)
    return tmp_path


def vocab(folder, *more: str) -> int:
    arguments = ["vocab", "--input", folder / "corpus.txt", "--output", folder / "vocab.txt", "--size", 90, *more]
    return cli.main([str(word) for word in arguments])


def prepare(folder, output: str, *more: object) -> int:
    arguments = ["prepare", "--input", folder / "corpus.txt", "--vocab", folder / "vocab.txt", "--workers", 1]
    return cli.main([str(word) for word in [*arguments, "--output", folder / output, "--sentences", "lines", *more]])


def record(folder, **values: object) -> None:
    path = folder / "vocab.txt.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_vocab_writes_the_record(folder):
    assert vocab(folder, "--cased") == 0
    assert json.loads((folder / "vocab.txt.json").read_text()) == {
        "format_version": 1, "kind": "wordpiece", "lowercase": False, "strip_accents": False,
        "sha256": hashlib.sha256((folder / "vocab.txt").read_bytes()).hexdigest(),
    }  # fmt: skip
    assert (folder / "vocab.txt").read_text().split("\n")[:5] == list(SPECIAL_TOKENS)
    assert sorted(path.name for path in folder.iterdir()) == ["corpus.txt", "vocab.txt", "vocab.txt.json"]


@pytest.mark.parametrize("cased", [True, False])
def test_prepare_follows_the_record(cased, folder):
    assert vocab(folder, *["--cased"] * cased) == 0
    assert prepare(folder, "data") == 0
    dataset = PreparedDataset(str(folder / "data"))
    assert dataset.info.tokenizer["lowercase"] is not cased
    assert dataset.token_counts()[dataset.tokenizer.unk_id] == 0
    if cased:
        assert prepare(folder, "again", "--cased") == 0
        assert PreparedDataset(str(folder / "again")).info.hash == dataset.info.hash


def test_a_contrary_option_is_refused(folder, capsys):
    assert vocab(folder) == 0
    assert prepare(folder, "data", "--cased") == 2
    error = capsys.readouterr().err
    assert "--cased: " in error
    assert f"{folder / 'vocab.txt.json'}" in error
    assert not (folder / "data").exists()


@pytest.mark.parametrize("case", ["capital", "continuation", "none"])
def test_vocabulary_without_record_is_cased_if_a_piece_has_a_capital(case, folder, caplog):
    assert vocab(folder) == 0
    (folder / "vocab.txt.json").unlink()
    more = {"capital": "T\n", "continuation": "##Ж\n", "none": "[A]\nΩ\u0301\n第\n"}[case]
    with (folder / "vocab.txt").open("a") as file:
        file.write(more)
    assert prepare(folder, "data", "--allow_unk", 1) == 0
    assert PreparedDataset(str(folder / "data")).info.tokenizer["lowercase"] is (case == "none")


@pytest.mark.parametrize(("name", "lowercase"), [("uncased", True), ("cased", False), ("multilingual-cased", False)])
def test_released_vocabularies(name, lowercase, data_dir, folder):
    from bert_jax.text.vocabulary_record import open_vocabulary

    path = str(data_dir / f"vocab/bert-base-{name}-vocab.txt")
    assert open_vocabulary(path, cased=False).lowercase is lowercase
    assert open_vocabulary(path, cased=True).lowercase is False


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "vocab.txt").write_text((f / "vocab.txt").read_text() + "more\n"), "sha256"),
        (lambda f: record(f, lowercase="yes"), "lowercase"),
        (lambda f: record(f, kind="unigram"), "kind='unigram'"),
        (lambda f: record(f, text_rules="own"), "text_rules='own'"),
        (lambda f: record(f, format_version=3), "format_version=3"),
        (lambda f: (f / "vocab.txt.json").write_text("[1"), "vocab.txt.json: "),
        (lambda f: (f / "vocab.txt.json").write_bytes(b"\xff"), "vocab.txt.json: "),
    ],
)
def test_records_that_cannot_be_followed(spoil, message, folder, capsys):
    assert vocab(folder) == 0
    spoil(folder)
    assert prepare(folder, "data") == 2
    error = capsys.readouterr().err
    assert str(folder / "vocab.txt.json") in error
    assert message in error
    assert "Traceback" not in error


def test_vocab_replaces_a_record_alone_but_no_other_file(folder, capsys):
    assert vocab(folder) == 0
    (folder / "vocab.txt").unlink()  # as after a kill between the two
    assert vocab(folder, "--cased") == 0
    (folder / "vocab.txt").unlink()
    (folder / "vocab.txt.json").write_text('{"mine": 1}')
    assert vocab(folder) == 2
    assert str(folder / "vocab.txt.json") in capsys.readouterr().err
    assert (folder / "vocab.txt.json").read_text() == '{"mine": 1}'
    assert not (folder / "vocab.txt").exists()


def test_a_vocabulary_in_a_store(store, tmp_path):
    from bert_jax.text.vocabulary_record import open_vocabulary, save_vocabulary

    tokenizer = WordPieceTokenizer([*SPECIAL_TOKENS, "a"], lowercase=False)
    save_vocabulary("gs://bucket/vocab.txt", tokenizer)
    assert store.names() == ["vocab.txt", "vocab.txt.json"]
    assert open_vocabulary("gs://bucket/vocab.txt", cased=False).sha256 == tokenizer.sha256
