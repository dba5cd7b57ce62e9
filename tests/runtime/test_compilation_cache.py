"""The compilation cache: where it is, who may use it, and that a second run reads it."""

import logging
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from etils import epath
from jax.experimental.compilation_cache import compilation_cache
from support import helpers

from bert_jax.errors import InputError
from bert_jax.runtime.compilation_cache import kept_programs
from bert_jax.training.checks import check_config

NAMES = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture
def no_cache() -> Iterator[None]:
    """Removes the cache that tests share, until the end of the test."""
    before = {name: jax.config.values[name] for name in NAMES}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compile_something(number: float) -> None:
    jax.jit(lambda x: x * number)(1.0).block_until_ready()


def test_programs_are_kept_in_the_users_cache(no_cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "cache"))
    with kept_programs("auto", epath.Path(tmp_path / "run")):
        folder = Path(jax.config.values["jax_compilation_cache_dir"])
        assert folder == tmp_path / "cache" / "programs"
        assert folder.stat().st_mode & 0o777 == 0o700
        compile_something(3.25)
    assert jax.config.values["jax_compilation_cache_dir"] is None
    assert any(folder.iterdir())
    assert not (tmp_path / "run").exists()


def test_a_remote_workdir_has_its_own_cache(no_cache):
    with kept_programs("auto", epath.Path("gs://bucket/run")):
        assert jax.config.values["jax_compilation_cache_dir"] == "gs://bucket/run/programs"


def test_a_file_is_refused(no_cache, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match=r"compilation_cache=.*/file: "),
        kept_programs(str(tmp_path / "file"), epath.Path(tmp_path)),
    ):
        pass


@pytest.mark.parametrize("setting", ["False", "off", "None", "0"])
def test_a_switch_is_no_folder(setting: str, dataset_dir: Path):
    with pytest.raises(InputError, match=rf"compilation_cache={setting}: .*none"):
        check_config(helpers.small_config(dataset_dir, compilation_cache=setting), 8)


def test_a_folder_of_ones_own_or_none(no_cache, tmp_path: Path):
    with kept_programs(str(tmp_path / "mine"), epath.Path(tmp_path)):
        assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "mine")
        with kept_programs(str(tmp_path / "inner"), epath.Path(tmp_path)):  # a run of a search
            assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "mine")
        compile_something(4.25)
    assert any((tmp_path / "mine").iterdir())
    with kept_programs("none", epath.Path(tmp_path)):
        assert jax.config.values["jax_compilation_cache_dir"] is None
        with kept_programs(str(tmp_path / "inner"), epath.Path(tmp_path)):
            assert jax.config.values["jax_compilation_cache_dir"] is None
    assert not (tmp_path / "inner").exists()


def test_a_cache_that_cannot_be_made_is_none(
    no_cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING), kept_programs("auto", epath.Path(tmp_path / "run")):
        assert jax.config.values["jax_compilation_cache_dir"] is None
    assert str(tmp_path / "file") in caplog.text


@pytest.mark.long
def test_a_second_run_of_another_length_reads_the_programs(dataset_dir: Path, tmp_path: Path):
    """In processes of their own, because this one has compiled the programs already."""
    lines = []
    for number, steps in enumerate((2, 3)):
        overrides = {
            "data.path": dataset_dir, "total_steps": steps, "eval_every_steps": 100, "optimizer.warmup_steps": 1,
            "model.num_hidden_layers": 1, "model.hidden_size": 32, "model.num_attention_heads": 2,
            "model.intermediate_size": 64, "model.max_position_embeddings": 64, "global_batch_size": 8,
            "tracking.samples": 0, "compilation_cache": tmp_path / "programs", "seed": number,
        }  # fmt: skip
        result = helpers.run_cli(
            "pretrain", "--config=bert_tiny", f"--workdir={tmp_path / str(number)}", *helpers.flags(overrides),
            JAX_COMPILATION_CACHE_DIR="", JAX_LOG_COMPILES="0",
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert str(tmp_path / "programs") in result.stderr
        lines.append(sorted(path.name for path in (tmp_path / "programs").iterdir() if path.name.endswith("-cache")))
    assert lines[0] == lines[1]
    assert any(name.startswith("jit_train_step") for name in lines[0])
