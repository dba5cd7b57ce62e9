"""The user's cache folder."""

import os
from pathlib import Path

import pytest

from bert_jax.files.remote import cache_folder


def test_folder_is_the_given_one_or_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "given"))
    assert cache_folder() == tmp_path / "given"
    monkeypatch.delenv("BERT_JAX_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "bert_jax"


def test_user_without_a_home_has_a_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("BERT_JAX_CACHE", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_folder() == tmp_path / f"bert_jax-{os.getuid()}"
