"""Scratch folders in a world-writable folder: links and files of other users are not followed, truncated or used."""

import os
import tempfile

import pytest
from support.preparing import SMALL, run

from bert_jax.data.preparation import pipeline as prepare_module
from bert_jax.data.preparation.pipeline import PrepareOptions, prepare
from bert_jax.errors import InputError


def start(corpus_file, tokenizer, output, **options):
    prepare([str(corpus_file)], tokenizer, str(output), PrepareOptions(**SMALL), **options)


@pytest.fixture
def work(corpus_file, tokenizer, tmp_path, monkeypatch):
    """Returns the path of the scratch folder, which does not exist."""
    seen = []

    def stop(*arguments):
        seen.extend((tmp_path / "temporary").iterdir())
        raise KeyboardInterrupt

    (tmp_path / "temporary").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, "_build", stop)
        with pytest.raises(KeyboardInterrupt):
            start(corpus_file, tokenizer, tmp_path / "data", scratch=str(tmp_path / "temporary"))
    (folder,) = seen
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    return folder


def test_a_link_is_not_followed(work, corpus_file, tokenizer, tmp_path):
    (tmp_path / "theirs").mkdir()
    work.symlink_to(tmp_path / "theirs")
    with pytest.raises(InputError, match=rf"{work}: .*link"):
        start(corpus_file, tokenizer, tmp_path / "data", scratch=str(work.parent))
    assert not list((tmp_path / "theirs").iterdir())


def test_a_folder_of_another_user_is_refused(work, corpus_file, tokenizer, tmp_path, monkeypatch):
    work.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InputError, match=rf"{work}: .*\b{os.getuid()}\b.*\b{os.getuid() + 1}\b"):
        start(corpus_file, tokenizer, tmp_path / "data", scratch=str(work.parent))


def test_a_folder_that_others_may_write_to_is_refused(work, corpus_file, tokenizer, tmp_path):
    work.mkdir()
    work.chmod(0o777)
    with pytest.raises(InputError, match=rf"{work}: .*0777.*0700"):
        start(corpus_file, tokenizer, tmp_path / "data", scratch=str(work.parent))
    work.chmod(0o755)  # as versions before have left it: what is in it is the user's own
    start(corpus_file, tokenizer, tmp_path / "data", scratch=str(work.parent))


def test_a_lock_that_is_a_link_empties_nothing(corpus_file, tokenizer, tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / ".prepare.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(InputError, match=r"\.prepare\.lock: .*link"):
        run(corpus_file, tokenizer, tmp_path / "data")
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_lock_with_something_in_it_is_not_emptied(corpus_file, tokenizer, tmp_path, monkeypatch):
    lock = tmp_path / "data" / ".prepare.lock"
    lock.parent.mkdir()
    lock.write_text("theirs")
    os.link(lock, tmp_path / "theirs")
    run(corpus_file, tokenizer, tmp_path / "data")
    assert (tmp_path / "theirs").read_text() == "theirs"


def test_a_remote_output_is_prepared_in_a_private_folder(corpus_file, tokenizer, tmp_path, store, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir(mode=0o777)
    modes = []

    def stop(*arguments):
        modes.extend(path.stat().st_mode & 0o777 for path in (tmp_path / "temporary").glob("bert-jax-prepare-*"))
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module, "_build", stop)
    with pytest.raises(KeyboardInterrupt):
        start(corpus_file, tokenizer, "gs://bucket/data")
    assert modes == [0o700]
