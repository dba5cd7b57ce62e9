"""Suggestions for paths that do not exist."""

from pathlib import Path

from bert_jax.files.remote import similar_name


def test_missing_path_suggests_the_most_similar_one(tmp_path: Path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "corpus.txt").touch()
    assert f"{tmp_path / 'corpus.txt'}?" in similar_name(tmp_path / "corpsu.txt")
    assert f"{tmp_path / 'runs'}?" in similar_name(tmp_path / "run" / "tiny")
    assert similar_name(tmp_path / "vocabulary") == ""
    assert similar_name(tmp_path / "corpus.txt") == ""
    assert similar_name("gs://bucket/none") == ""
