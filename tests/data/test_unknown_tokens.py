"""Text that does not fit the vocabulary: a warning, or an error before the pairs are made."""

import logging

import pytest
from support.preparing import run

from bert_jax import cli
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.preparation import shards

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
