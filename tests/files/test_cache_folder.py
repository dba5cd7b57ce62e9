"""The user's cache folder."""

from pathlib import Path

import pytest

from bert_jax.files.remote import cache_folder


def test_folder_is_the_given_one_or_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "given"))
    assert cache_folder() == tmp_path / "given"
    monkeypatch.delenv("BERT_JAX_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "bert_jax"
