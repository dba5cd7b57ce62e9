"""The command that `prepare` names next runs on what it made."""

import re
import shlex
from pathlib import Path

import pytest
from support import helpers

from bert_jax import cli


@pytest.mark.parametrize(
    ("options", "name"),
    [([], "a dataset"), (["--pairs", "none"], "-y"), (["--seq_len", "600"], "data"), ([], "a,b")],
    ids=["pairs", "singles", "long", "comma"],
)
def test_pretrain_accepts_the_dataset(
    options: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(helpers.make_corpus(documents=60))
    helpers.write_tokenizer(tmp_path / "t.json", helpers.make_vocabulary())
    words = ["prepare", "--input=a.txt", "--vocab=t.json", f"--output={name}", "--sentences=lines", "--workers=1"]
    assert cli.main([*words, *options]) == 0
    found = re.findall("Next: bert-jax (.*)", capsys.readouterr().out)
    assert len(found) == ("," not in name)
    for command in found:
        assert cli.main([*shlex.split(command), "--dry_run"]) == 0
