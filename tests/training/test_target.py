"""Runs that end with the first evaluation that reaches `target`."""

import json
import shutil
from pathlib import Path

import pytest
from support import helpers
from support.devices import one_device  # noqa: F401
from support.runs import assert_same_run

from bert_jax import cli
from bert_jax.config_keys import TargetKeys
from bert_jax.errors import InputError
from bert_jax.tracking.report import read_runs, results
from bert_jax.training.pretrain import pretrain

EASY = {"target.metric": "mlm_loss", "target.value": 100.0}


def config_of(dataset: Path, **settings: object):
    phases = ({"steps": 6}, {"steps": -1})
    small = {"phases": phases, "log_every_steps": 3, "eval_every_steps": 4, "checkpoint__every_steps": 3}
    return helpers.small_config(dataset, **{**small, **settings})


@pytest.fixture(scope="module")
def reached(dataset_dir: Path, tmp_path_factory: pytest.TempPathFactory, one_device: None) -> tuple[Path, dict]:  # noqa: F811
    """A run of 8 steps that reaches its target at step 4, between two saves; its workdir, and what it returned."""
    workdir = tmp_path_factory.mktemp("reached") / "run"
    return workdir, pretrain(config_of(dataset_dir, **EASY), str(workdir))


def test_run_ends_at_the_evaluation_that_reaches_the_target(reached: tuple[Path, dict]):
    workdir, scores = reached
    assert helpers.kept_steps(workdir) == [3, 4]
    rows = helpers.rows(workdir)
    assert [row["step"] for row in rows if "split" not in row] == [3]
    (row,) = (row for row in rows if row.get("split") == "eval")
    assert (row["step"], row["target_reached"], row["mlm_loss"]) == (4, 1, scores["mlm_loss"])
    _, heads, (values,) = results(read_runs([str(workdir)]))
    assert dict(zip(heads, values, strict=True))["target_reached"] == 1


def test_resuming_does_nothing_more_until_the_target_changes(
    reached: tuple[Path, dict], dataset_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    shutil.copytree(reached[0], tmp_path / "run")
    workdir = tmp_path / "run"

    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in workdir.rglob("*") if path.name != "lock"}

    before = times()
    with caplog.at_level("INFO"):
        assert pretrain(config_of(dataset_dir, **EASY), str(workdir)) == {}
    assert "is finished: step 4 of 8, target.metric=mlm_loss of 100.0 reached" in caplog.text
    assert times() == before
    caplog.clear()
    with caplog.at_level("INFO"):
        pretrain(config_of(dataset_dir, **{**EASY, "target.value": 1e-9}), str(workdir))
    assert "Finished step 8, target.metric=mlm_loss of 1e-09 not reached" in caplog.text
    pretrain(config_of(dataset_dir, **{**EASY, "target.value": 1e-9}), str(tmp_path / "plain"))
    metrics = workdir / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"target_reached": 1', '"target_reached": 0'))
    assert_same_run(workdir, tmp_path / "plain")


def cut(workdir: Path, step: int, *, rows: int) -> None:
    """Leaves what a kill does: the checkpoints up to `step`, and the metrics up to step `rows`."""
    for folder in (workdir / "checkpoints").iterdir():
        if int(folder.name) > step:
            shutil.rmtree(folder)
    lines = [line for line in (workdir / "metrics.jsonl").read_text().splitlines() if json.loads(line)["step"] <= rows]
    (workdir / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.usefixtures("one_device")
def test_a_target_that_is_new_on_resume_is_that_of_the_newest_checkpoint(
    dataset_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    pretrain(config_of(dataset_dir, checkpoint__every_steps=4), str(tmp_path))
    cut(tmp_path, 4, rows=6)
    with caplog.at_level("INFO"):
        pretrain(config_of(dataset_dir, **EASY, checkpoint__every_steps=4), str(tmp_path))
    assert "Finished step 4, target.metric=mlm_loss of 100.0 reached" in caplog.text
    assert helpers.kept_steps(tmp_path) == [4]


@pytest.mark.usefixtures("one_device")
def test_the_evaluation_of_step_0_ends_no_run_that_a_kill_left_there(dataset_dir: Path, tmp_path: Path):
    config = config_of(dataset_dir, **EASY, eval_at_start=True, checkpoint__milestones=(0,))
    pretrain(config, str(tmp_path))
    cut(tmp_path, 0, rows=0)
    assert helpers.kept_steps(tmp_path) == [0]
    pretrain(config, str(tmp_path))
    assert helpers.kept_steps(tmp_path)[-1] == 4


def test_accuracies_are_to_rise_and_losses_to_fall():
    for metric, at_least in (("mlm_accuracy", True), ("nsp_accuracy", True), ("loss", False), ("nsp_loss", False)):
        target = TargetKeys(metric, 0.5)
        assert target.is_reached({metric: 0.5})
        assert target.is_reached({metric: 0.6}) is at_least
        assert target.is_reached({metric: 0.4}) is not at_least
        assert not target.is_reached({metric: float("nan")})
        assert not target.is_reached({metric: None})
        assert not target.is_reached({})
    assert not TargetKeys().is_reached({"loss": 0.0})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target__metric": "mlm_accuracy"}, r"target\.metric=mlm_accuracy: .* got 0\.0"),
        (
            {"target__metric": "mlm_accuracy", "target__value": 72},
            r"target\.metric=mlm_accuracy: .* at most 1 .*got 72",
        ),
        ({**EASY, "eval_every_steps": 0}, r"target\.metric=mlm_loss: .*eval_every_steps=0"),
        ({**EASY, "eval_batches": 0}, r"target\.metric=mlm_loss: .*eval_batches=0"),
        ({"target__metric": "nsp_loss", "target__value": 1, "objective__nsp": False}, r"nsp_loss: .*another objective"),
        ({**EASY, "objective__lm": "ltr", "objective__nsp": False}, r"mlm_loss: .*another objective"),
        ({"target__metric": "f1"}, r"target\.metric=f1: expected one of"),
        ({"target__value": -1}, r"target\.value=-1"),
        ({"target__value": 3.6}, r"target\.metric=: .*got 3\.6"),
    ],
)
def test_targets_that_no_evaluation_measures_are_refused(settings: dict, message: str, dataset_dir: Path):
    with pytest.raises(InputError, match=message):
        helpers.open_phases(config_of(dataset_dir, **settings))


def test_command_has_the_step_that_the_run_ended_at(
    reached: tuple[Path, dict], tmp_path: Path, capsys: pytest.CaptureFixture
):
    workdir, _ = reached
    own = json.loads((workdir / "config.json").read_text())
    (tmp_path / "same.py").write_text(
        "from bert_jax.config import PretrainConfig, to_config_dict\nfrom bert_jax.sections import from_mapping\n"
        f"def get_config():\n    return to_config_dict(from_mapping(PretrainConfig, {own!r}))\n"
    )
    assert cli.main(["pretrain", f"--config={tmp_path / 'same.py'}", f"--workdir={workdir}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 4
