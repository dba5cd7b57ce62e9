"""A training loop of one's own: the parts that `Training` has, which are those of `pretrain`."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from support import helpers
from support.devices import one_device  # noqa: F401

import bert_jax
from bert_jax import cli
from bert_jax.errors import InputError
from bert_jax.sections import with_values
from bert_jax.training.checkpoints import open_checkpoint
from bert_jax.training.initialization import fill_in_from_checkpoint


@pytest.fixture(scope="module")
def config(dataset_dir: Path) -> bert_jax.PretrainConfig:
    overrides = {"total_steps": 4, "gradient_accumulation": 2, "model__num_hidden_layers": 1}
    return helpers.small_config(dataset_dir, **overrides)


@pytest.fixture(scope="module")
def training(config: bert_jax.PretrainConfig, one_device: None) -> bert_jax.Training:  # noqa: F811
    return bert_jax.Training(config)


def test_its_steps_are_those_of_pretrain(training: bert_jax.Training, tmp_path: Path):
    state, losses, steps = training.initial_state(), [], []
    for step, batch in training.batches():
        assert batch["input_ids"].shape == (2, 8, 64)
        state, metrics = training.step(state, batch)
        losses.append(float(metrics["loss"]))
        steps.append(step)
    assert steps == [1, 2, 3, 4]
    evaluation = training.evaluate(state)
    training.save(str(tmp_path / "own"), state)

    final = bert_jax.pretrain(training.config, str(tmp_path / "run"))
    rows = [row for row in helpers.rows(tmp_path / "run") if row.get("split") != "eval"]
    assert losses == [row["loss"] for row in rows]
    assert evaluation == final
    parameters = [open_checkpoint(str(tmp_path / name)).load_parameters() for name in ("own", "run")]
    jax.tree.map(np.testing.assert_array_equal, *parameters)
    assert bert_jax.load(str(tmp_path / "own")).embed("the ship .").shape == (1, 32)


def test_a_head_that_is_not_trained_is_not_saved(
    config: bert_jax.PretrainConfig, dataset_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    first = bert_jax.Training(config)
    first.save(str(tmp_path / "first"), first.initial_state())
    settings = with_values(config, {"objective.nsp": False, "init": tmp_path / "first", "eval_batches": -1})
    training = bert_jax.Training(settings)
    state = training.initial_state()
    training.save(str(tmp_path / "own"), state)
    bert_jax.pretrain(with_values(settings, {"total_steps": 3}), str(tmp_path / "run"))
    saved = open_checkpoint(str(tmp_path / "own"))
    assert saved.heads == open_checkpoint(str(tmp_path / "run")).heads == ("pooler", "mlm_head")
    made = json.loads((tmp_path / "own" / "provenance" / "metadata").read_text())
    assert made["inputs"]["init"]["path"] == str(tmp_path / "first")
    capsys.readouterr()
    assert cli.main(["evaluate", f"--checkpoint={saved.path}", f"--data={dataset_dir}", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert not [name for name in scores if name.startswith("nsp")]
    assert scores["loss"] == pytest.approx(training.evaluate(state)["loss"], rel=1e-5)
    for name in ("own", "run"):
        continued = {"init": tmp_path / name, "data.path": dataset_dir}
        assert fill_in_from_checkpoint(bert_jax.load_config("continue", continued)).objective.nsp is False
        bert_jax.export(str(tmp_path / name), str(tmp_path / f"{name}-export"))
        exported = json.loads((tmp_path / f"{name}-export" / "config.json").read_text())
        assert exported["architectures"] == ["BertForMaskedLM"]
    with pytest.raises(bert_jax.InputError, match="has no nsp_head"):
        bert_jax.pretrain(with_values(config, {"init": tmp_path / "run"}), str(tmp_path / "next"))


def test_batches_resume_at_any_step(training: bert_jax.Training):
    every = dict(training.batches())
    [(step, batch)] = training.batches(start=3)
    assert step == 4
    np.testing.assert_array_equal(batch["input_ids"], every[4]["input_ids"])


def test_a_loop_of_several_phases_is_refused(config: bert_jax.PretrainConfig):
    several = with_values(config, {"phases": ({"steps": 2}, {"steps": 2})})
    with pytest.raises(InputError, match=r"phases.* 2"):
        bert_jax.Training(several)


def test_overrides_may_be_a_mapping_of_values(tmp_path: Path):
    config = bert_jax.load_config("bert_tiny", {"data.path": tmp_path, "total_steps": 7, "data.weights": (0.5, 0.5)})
    assert (config.data.path, config.total_steps, config.data.weights) == (str(tmp_path), 7, (0.5, 0.5))
    with pytest.raises(InputError, match=r"optimizer\.learning_rate"):
        bert_jax.load_config("bert_tiny", {"optimizer.learn_rate": 1})
