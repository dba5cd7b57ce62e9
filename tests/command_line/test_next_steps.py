"""The commands that `prepare` and `inspect` name next run on what they made."""

import re
import shlex
from pathlib import Path

import pytest
from support import helpers

from bert_jax import cli


@pytest.mark.parametrize("options", [[], ["--pairs", "none"], ["--seq_len", "600"]], ids=["pairs", "singles", "long"])
def test_pretrain_accepts_the_dataset(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "a.txt").write_text(helpers.make_corpus(documents=60))
    helpers.write_tokenizer(tmp_path / "t.json", helpers.make_vocabulary())
    data = str(tmp_path / "a dataset")
    words = ["prepare", "--input", str(tmp_path / "a.txt"), "--vocab", str(tmp_path / "t.json"), "--output", data]
    assert cli.main([*words, "--sentences", "lines", "--workers", "1", *options]) == 0
    prepared = re.findall("Next: bert-jax (.*)", capsys.readouterr().err)
    assert prepared[0] == f"inspect {shlex.quote(data)}"
    assert cli.main(shlex.split(prepared[0])) == 0
    assert re.findall("Next: bert-jax (.*)", capsys.readouterr().err) == prepared[1:]
    assert cli.main([*shlex.split(prepared[1]), "--dry_run"]) == 0


@pytest.mark.parametrize(("name", "commands"), [("-y", 2), ("a,b", 1), (" a", 1)])
def test_commands_that_follow_take_any_name(
    name: str, commands: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-a.txt").write_text(helpers.make_corpus(documents=60))
    words = ["--input=-a.txt", "--size", "300", "--output=-t.json"]
    assert cli.main(["vocab", *words]) == 0
    [prepare] = re.findall("Next: bert-jax (.*)", capsys.readouterr().err)
    assert cli.main([*shlex.split(prepare)[:-2], f"--output={name}", "--sentences", "lines", "--workers", "1"]) == 0
    found = re.findall("Next: bert-jax (.*)", capsys.readouterr().err)
    assert len(found) == commands
    for command, more in zip(found, ([], ["--dry_run"]), strict=False):
        assert cli.main([*shlex.split(command), *more]) == 0
