"""Warnings about the characters of a corpus."""

import logging

import pytest

from bert_jax import cli
from bert_jax.data.corpora.corpus import CorpusOptions, plan, warn_of_text

PLAIN = "The ship sees the storm, and 1 < 2 & 3 > 2. It is a little wave.\n" * 200
TURKISH = "Işıklı kıyıda İstanbul'un ılık sabahı. It is in English, too.\n"


@pytest.mark.parametrize(
    ("text", "lowercase", "words"),
    [
        (PLAIN + "A review.<br />It is good.\n" * 9, True, ["<br />"]),
        (PLAIN + "Q&amp;A, Tom&#39;s\n" * 9, False, ["&amp; and &#39;"]),
        (PLAIN + TURKISH, True, []),
        (TURKISH * 9, True, ["--cased"]),
        (TURKISH * 9, False, []),
        ("", True, []),
        (b"caf\xe9\n", True, []),  # an error of the reader of the whole
    ],
)
def test_html_and_letters_i(text, lowercase, words, tmp_path, caplog):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    warn_of_text(plan([str(tmp_path)], CorpusOptions()), CorpusOptions(), lowercase=lowercase)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * len(words)
    assert all(word in message for word, message in zip(words, caplog.messages, strict=True))


@pytest.mark.parametrize("command", ["vocab", "prepare"])
def test_commands_warn(command, tmp_path, vocabulary_file, capsys):
    (tmp_path / "a.txt").write_text(("the ship<br />sees .\n" + TURKISH + "\n") * 40)
    arguments = {
        "vocab": ["--size", 200], "prepare": ["--vocab", vocabulary_file, "--allow_unk", 1, "--workers", 1],
    }[command]  # fmt: skip
    output = tmp_path / {"vocab": "made.json", "prepare": "made"}[command]
    words = [command, "--input", tmp_path / "a.txt", "--output", output, *arguments]
    assert cli.main([str(word) for word in words]) == 0
    error = capsys.readouterr().err
    assert "<br />" in error
    assert "--cased" in error
