"""The user's cache folder."""

import os
from pathlib import Path

import pytest

from bert_jax.files.user_cache import CACHE_VARIABLE, cache_folder, make_private


def test_folder_is_the_given_one_or_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "given"))
    assert cache_folder() == tmp_path / "given"
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "bert_jax"


def test_user_without_a_home_has_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in (CACHE_VARIABLE, "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = cache_folder()
    assert folder == tmp_path / f"bert_jax-{os.getuid()}"
    assert make_private(folder) == ""


def test_folder_below_one_that_everybody_may_write_to_is_not_private(tmp_path: Path):
    folder = tmp_path / "shared" / "cache"
    assert make_private(folder) == ""
    (tmp_path / "shared").chmod(0o777)
    assert str(tmp_path / "shared") in make_private(folder)
    (tmp_path / "shared").chmod(0o1777)  # as /tmp: nobody else may rename the folder
    assert make_private(folder) == ""
