"""The search over learning rates and seeds."""

import json
import shutil
from pathlib import Path

import pytest
from support import helpers
from support.several import finish, start_commands

from bert_jax.config import FinetuneConfig, load_config
from bert_jax.errors import InputError, Interrupted
from bert_jax.finetuning import finetune as module
from bert_jax.finetuning.finetune import finetune, search, summarize
from bert_jax.finetuning.run import finetune_once
from bert_jax.sections import with_values
from bert_jax.training.checkpoints import Checkpoint, open_checkpoint


def config_of(checkpoint: Path, folder: Path, **search_for: str) -> FinetuneConfig:
    settings = {
        "init": checkpoint, "data.path": folder, "task.train": "train.csv", "task.dev": "dev.csv",
        "task.max_seq_len": 16, "num_epochs": 1, "global_batch_size": 8,
    }  # fmt: skip
    return helpers.finetune_config("text", settings, **{f"search__{name}": value for name, value in search_for.items()})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("train.csv", "dev.csv"):
        (tmp_path / name).write_text("text,label\n" + "the ship .,sea\nthe owl .,night\n" * 8)
    return tmp_path


def test_each_pair_is_run_once_whatever_happens_between(checkpoint: Path, folder: Path, monkeypatch, caplog):
    runs = []

    def interrupted_once(config, workdir, **options):
        runs.append((config.optimizer.learning_rate, config.seed, Path(workdir).name))
        if len(runs) == 2:
            raise Interrupted("SIGTERM")
        return finetune_once(config, workdir, **options)

    monkeypatch.setattr(module, "finetune_once", interrupted_once)
    config = config_of(checkpoint, folder, learning_rates="(1e-2, 1e-3)", seeds="(3,)")
    with pytest.raises(Interrupted):
        search(config, str(folder / "runs"))
    with caplog.at_level("INFO"):
        found = search(config, str(folder / "runs"))
    assert "learning_rate=0.001, seed=3" in caplog.text
    assert [run[:2] for run in runs] == [(1e-2, 3), (1e-3, 3), (1e-3, 3)]
    assert runs[0][2] == "lr-0.01-seed-3"
    assert json.loads((folder / "runs" / "search.json").read_text()) == found
    assert open_checkpoint(str(folder / "runs" / found["best"]["folder"])).task is not None
    with pytest.raises(InputError, match="runs holds no complete checkpoint"):
        open_checkpoint(str(folder / "runs"))
    caplog.clear()
    with caplog.at_level("INFO"):
        assert finetune(config, str(folder / "runs")) == found
    assert len(runs) == 3
    assert "seed=" not in caplog.text  # what is finished is not named
    assert found["metric"] == "accuracy"
    assert set(found["by_learning_rate"]) == {"0.01", "0.001"}


def test_a_config_of_pre_training_and_trackers_of_a_search_are_refused(checkpoint: Path, folder: Path):
    with pytest.raises(InputError, match=r"config=PretrainConfig.*FinetuneConfig"):
        finetune(load_config("bert_tiny"), str(folder / "runs"))
    with pytest.raises(InputError, match="trackers: "):
        finetune(config_of(checkpoint, folder, seeds="(1,)"), str(folder / "runs"), trackers=[object()])


def test_what_is_reported():
    def result(score: float) -> dict:
        return {"main_metric": "f1", "scores": {"dev": {"f1": score, "accuracy": 0.1}, "other": {"f1": 0.0}}}

    scores = {5e-5: {0: 0.5, 1: 0.9, 2: 0.6}, 2e-5: {0: 0.7, 1: 0.8, 2: 0.75}}
    found = summarize({rate: {seed: result(x) for seed, x in of_seeds.items()} for rate, of_seeds in scores.items()})
    assert found["by_learning_rate"]["5e-05"] == {
        "median": 0.6, "best": 0.9, "worst": 0.5, "scores": {"0": 0.5, "1": 0.9, "2": 0.6}
    }  # fmt: skip
    assert found["best"] == {"learning_rate": 5e-5, "seed": 1, "score": 0.9, "folder": "lr-5e-05-seed-1"}
    assert found["learning_rate"] == 2e-5
    assert found["results"]["2"] == result(0.75)["scores"]
    assert list(found["results"]) == ["0", "1", "2"]


def test_what_cannot_be_searched_is_refused(checkpoint: Path, folder: Path):
    without = config_of(checkpoint, folder, seeds="(1, 2)")
    without = with_values(without, {"task.dev": ""})
    with pytest.raises(InputError, match=r"task\.dev"):
        search(without, str(folder / "runs"))
    assert not list((folder / "runs").glob("*/checkpoints"))  # which is known before any of the runs


def test_the_test_file_chooses_no_model(checkpoint: Path, tmp_path: Path):
    """Without a dev file a labelled test file would be the first that is scored."""
    for name in ("train.conll", "test.conll"):
        (tmp_path / name).write_text("Old O\nFox B-PER\n\n" * 8)
    settings = {"init": checkpoint, "data.path": tmp_path, "task.max_seq_len": 32, "search.seeds": "(1, 2)"}
    with pytest.raises(InputError, match=r"^task\.dev: "):
        search(helpers.finetune_config("ner", settings), str(tmp_path / "runs"))


def test_finished_trials_are_of_their_config_and_encoder_wherever_that_is(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    (folder / "lr-2e-05-seed-1").mkdir()
    shutil.copytree(checkpoint, folder / "encoder")
    config = config_of(folder / "encoder", folder, seeds="(1,)")
    found = search(config, str(folder))
    (folder / "encoder").rename(folder / "moved")
    moved = with_values(config, {"init": str(folder / "moved")})
    assert search(moved, str(folder)) == found
    with pytest.raises(InputError, match=r"num_epochs 1 -> 2"):
        search(with_values(moved, {"num_epochs": 2}), str(folder))
    for name in ("dev.csv", "train.csv"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("ship", "boat", 1))
        with pytest.raises(InputError, match=rf"seed-1: its run had other examples than {name[:-4]} of data.path="):
            search(moved, str(folder))
        (folder / name).write_text(text)
    reference = Checkpoint.reference
    monkeypatch.setattr(Checkpoint, "reference", lambda self: {**reference(self), "digest": "of more steps"})
    with pytest.raises(InputError, match=r"seed-1: its run started from other parameters than init="):
        search(moved, str(folder))
    with pytest.raises(InputError, match=r"^workdir="):
        search(config, "")


# --- Several processes -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_search_in_two_processes_is_one_in_one(checkpoint: Path, tmp_path: Path):
    for name, count in (("train.csv", 30), ("dev.csv", 7)):  # neither divides by batches or devices
        rows = ["the ship .,sea", "the owl near the moon .,night", "a lamp,town"]
        (tmp_path / name).write_text("\n".join(["text,label", *(rows[i % 3] for i in range(count))]) + "\n")
    settings = {
        "init": checkpoint, "data.path": tmp_path, "task.train": "train.csv", "task.dev": "dev.csv",
        "task.max_seq_len": 16, "num_epochs": 2, "global_batch_size": 8, "eval_batch_size": 4, "log_every_steps": 1,
        "optimizer.learning_rate": 1e-2, "search.seeds": "(0,1)",
    }  # fmt: skip
    for processes in (1, 2):
        command = helpers.command(
            "finetune", "--config=finetune/text", f"--workdir={tmp_path / str(processes)}", *helpers.flags(settings)
        )
        finish(start_commands([command] * processes))
    one, two = (tmp_path / "1", tmp_path / "2")
    assert json.loads((two / "search.json").read_text()) == json.loads((one / "search.json").read_text())
    for seed in (0, 1):
        run = f"lr-0.01-seed-{seed}"
        losses = [[row["loss"] for row in helpers.rows(folder / run) if "loss" in row] for folder in (one, two)]
        assert len(losses[0]) == 8
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
        predictions = [
            [json.loads(line) for line in (folder / run / "predictions" / "dev.jsonl").read_text().splitlines()]
            for folder in (one, two)
        ]
        assert len(predictions[0]) == 7
        for first, second in zip(*predictions, strict=True):
            # Sums over the devices of two processes are rounded otherwise.
            assert second.pop("probabilities") == pytest.approx(first.pop("probabilities"), abs=1e-5)
            assert second == first
