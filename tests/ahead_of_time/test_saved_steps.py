"""Training steps that `compile --output` writes: a run loads the one that fits, or names why none does."""

import logging
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support import helpers, runs
from support.compilations import COMPILED, logged_compilations
from support.devices import one_device  # noqa: F401

from bert_jax.ahead_of_time import command
from bert_jax.ahead_of_time.command import compile_config
from bert_jax.ahead_of_time.target import Target
from bert_jax.errors import InputError
from bert_jax.runtime.saved_programs import SavedPrograms, describe_environment
from bert_jax.training.checkpointing.checkpoints import open_checkpoint
from bert_jax.training.pretrain import pretrain

LOGGED = {"JAX_LOG_COMPILES": "1", "JAX_COMPILATION_CACHE_DIR": "", "XLA_FLAGS": helpers.QUICK_COMPILATION}


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 8])
def test_command_with_a_file_compiles_no_step_and_is_bit_identical(devices: int, dataset_dir: Path, tmp_path: Path):
    environment = {
        **LOGGED, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {helpers.QUICK_COMPILATION}"
    }  # fmt: skip
    settings = {**runs.SETTINGS, "data.path": dataset_dir, "total_steps": 6, "eval_every_steps": 3, "seed": 5}
    settings |= {"log_every_steps": 1, "optimizer.warmup_steps": 2, "tracking.samples": 0, "compilation_cache": "none"}
    of_study = {**settings, "seed": 1, "total_steps": 90, "optimizer.warmup_steps": 30, "optimizer.learning_rate": 0.1}
    file = tmp_path / "step.compiled"
    done = helpers.run_cli(
        "compile", "--config=bert_tiny", f"--output={file}", *helpers.flags(of_study), **environment
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"cpu:{devices}" in done.stdout
    found = {}
    for name, path in (("compiled", ""), ("loaded", file)):
        done = helpers.run_cli(
            "pretrain", "--config=bert_tiny", f"--workdir={tmp_path / name}",
            *helpers.flags({**settings, "compiled": path}), **environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found[name] = COMPILED.findall(done.stderr)
    assert "train_step" in found["compiled"]
    assert "train_step" not in found["loaded"]
    runs.assert_same_run(tmp_path / "compiled", tmp_path / "loaded")


@pytest.fixture(autouse=True, scope="module")
def _one_device_is_compiled_for() -> Iterator[None]:
    target = Target("cpu:1", 1, tuple(jax.devices()[:1]), None, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "local_target", lambda: target)
        yield


@pytest.fixture(scope="module")
def file(_one_device_is_compiled_for: None, dataset_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with the step of `small_config`, of another seed and schedule."""
    overrides = {"seed": 1, "total_steps": 90, "optimizer__learning_rate": 0.1}
    return make_file(tmp_path_factory.mktemp("compiled") / "file", dataset_dir, **overrides)


def make_file(path: Path, dataset: Path, **overrides: object) -> str:
    config = helpers.small_config(dataset, **overrides)
    compile_config(config, None, output=str(path))
    return str(path)


def test_run_of_a_file_compiles_no_step_and_is_bit_identical(file: str, dataset_dir: Path, tmp_path: Path):
    settings = {"eval_batches": 0, "total_steps": 4, "seed": 5}
    with logged_compilations() as found:
        pretrain(helpers.small_config(dataset_dir, compiled=file, **settings), str(tmp_path / "loaded"))
    assert "train_step" not in dict(found)
    with logged_compilations() as found:
        pretrain(helpers.small_config(dataset_dir, **settings), str(tmp_path / "compiled"))
    assert "train_step" in dict(found)
    runs.assert_same_run(tmp_path / "compiled", tmp_path / "loaded")


def test_a_phase_without_a_fitting_program_is_compiled_and_the_difference_named(
    file: str, dataset_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    phases = ({"steps": 2}, {"steps": 2, "global_batch_size": 8}, {"steps": 2, "optimizer.weight_decay": 0.3})
    config = helpers.small_config(dataset_dir, compiled=file, phases=phases, total_steps=6, eval_batches=0)
    with logged_compilations() as found, caplog.at_level(logging.INFO):
        pretrain(config, str(tmp_path / "run"))
    assert [name for name, _ in found].count("train_step") == 2
    refused = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    refused = [message for message in refused if message.startswith(f"compiled={file} ")]
    assert len(refused) == 2
    assert "batch.input_ids [1, 16, 64], here [1, 8, 64]" in refused[0]
    assert "optimizer.weight_decay 0.01, here 0.3" in refused[1]


def test_other_model_is_compiled_and_named(
    file: str, dataset_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    overrides = {"model__num_hidden_layers": 1, "total_steps": 3, "eval_batches": 0}
    pretrain(helpers.small_config(dataset_dir, compiled=file, **overrides), str(tmp_path / "run"))
    assert "model.num_hidden_layers 2, here 1" in caplog.text
    assert open_checkpoint(str(tmp_path / "run")).step == 3


def test_changed_code_is_noticed(
    file: str, dataset_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("optax.tree.norm", lambda tree: jnp.float32(1))
    pretrain(
        helpers.small_config(dataset_dir, compiled=file, total_steps=3, eval_batches=0), str(tmp_path / "run")
    )  # fmt: skip
    assert "the code of the step or a setting of JAX" in caplog.text


@pytest.mark.long
def test_a_run_of_one_phase_of_a_file_of_several_finds_its_program(dataset_dir: Path, tmp_path: Path):
    phases = ({"steps": 4}, {"steps": 4, "global_batch_size": 8})
    file = make_file(tmp_path / "file", dataset_dir, phases=phases, total_steps=8)
    assert len(SavedPrograms.open("compiled", file).header["programs"]) == 2
    config = helpers.small_config(dataset_dir, compiled=file, global_batch_size=8, total_steps=3, eval_batches=0)
    with logged_compilations() as found:
        pretrain(config, str(tmp_path / "run"))
    assert "train_step" not in dict(found)


def test_missing_file_is_refused_before_the_workdir_is_made(dataset_dir: Path, tmp_path: Path):
    config = helpers.small_config(dataset_dir, compiled=tmp_path / "none")
    with pytest.raises(InputError, match=r"compiled=.*none: file not found"):
        pretrain(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_memory_of_this_machine_is_not_guessed(dataset_dir: Path):
    with pytest.raises(InputError, match="--find_batch: "):
        compile_config(helpers.small_config(dataset_dir), None, largest_batch=True)
    described, problems = compile_config(helpers.small_config(dataset_dir), None)
    assert problems == []
    assert (described["hbm_bytes"], described["hbm_share"], described["fits"]) == (None, None, True)
    assert described["peak_bytes"] > described["state_bytes"] > 0


@pytest.mark.long
def test_file_for_tpus_is_written_here_and_refused_here(
    dataset_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    file, small = tmp_path / "v5e", helpers.small_config(dataset_dir)
    overrides = {key: value for key, value in runs.SETTINGS.items() if key.startswith(("model.", "data."))}
    done = helpers.run_cli(
        "compile", "--config=bert_tiny", "--topology=v5e:2x4", f"--output={file}",
        *helpers.flags({**overrides, "data.path": dataset_dir, "global_batch_size": 16}), XLA_FLAGS="",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (program,) = SavedPrograms.open("compiled", str(file)).header["programs"]
    found = program["environment"]
    assert (found["platform"], found["device_kind"], found["devices"]) == ("tpu", "TPU v5 lite", 8)
    assert found["libtpu"]
    assert found["jax"] == describe_environment(jax.devices())["jax"]
    with small.unlocked():
        small.compiled, small.total_steps, small.eval_batches = str(file), 3, 0
    pretrain(small, str(tmp_path / "run"))
    assert "platform 'tpu', here 'cpu'" in caplog.text


def test_an_output_that_cannot_be_written_is_refused_before_compiling(dataset_dir: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with logged_compilations() as found:
        with pytest.raises(OSError, match="file"):
            make_file(tmp_path / "file" / "step.compiled", dataset_dir)
        with pytest.raises(InputError, match=f"--output={tmp_path}: is a folder"):
            make_file(tmp_path, dataset_dir)
    assert "train_step" not in [name for name, _ in found]
