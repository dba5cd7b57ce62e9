"""Fine-tuning that keeps the best epoch, ends early, and selects by another metric."""

import json
import shutil
from pathlib import Path

import pytest
from etils import epath
from support.finetuning import finetune_config
from support.runs import rows_without_times

import bert_jax
from bert_jax.config import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.finetuning.fine_tuned import evaluate_finetuned
from bert_jax.finetuning.finetune import finetune, search
from bert_jax.training.checkpoints import kept_steps, open_checkpoint

AN_EPOCH, EPOCHS, PATIENCE = 4, 8, 2  # steps, epochs, epochs
TRAIN = ["the ship .,sea", "the owl .,night"] * 14 + ["the fox .,sea", "the moon .,night"] * 2
# The rare words of the training examples have the other label here: once they are learned, scores fall.
DEV = ["the ship .,sea", "the owl .,night"] * 3 + ["the fox .,night", "the moon .,sea"] * 2
SETTINGS = {
    "task.train": "train.csv", "task.dev": "dev.csv", "task.test": "test.csv", "task.max_seq_len": 16,
    "num_epochs": EPOCHS, "global_batch_size": 8, "optimizer.learning_rate": 3e-4, "log_every_steps": 3,
    "keep_best": True, "checkpoint.every_steps": AN_EPOCH * 3 + 1, "checkpoint.keep": 2,
}  # fmt: skip


def config_of(checkpoint: Path, folder: Path, **overrides: object) -> FinetuneConfig:
    return finetune_config("text", {**SETTINGS, "init": checkpoint, "data.path": folder}, **overrides)


def result_of(workdir: Path) -> dict:
    return json.loads((workdir / "result.json").read_text())


def best_of(workdir: Path, metric: str = "dev/accuracy") -> int:
    """Returns the step of the best evaluation, the first of equals."""
    rows = [row for row in rows_without_times(workdir) if row.get("split") == "eval"]
    return max(rows, key=lambda row: row[metric])["step"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    (folder / "train.csv").write_text("\n".join(["text,label", *TRAIN]) + "\n")
    (folder / "dev.csv").write_text("\n".join(["text,label", *DEV]) + "\n")
    (folder / "test.csv").write_text("text\nthe fox .\nthe moon .\nthe ship .\n")
    return folder


@pytest.fixture(scope="module")
def whole(checkpoint: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all epochs."""
    workdir = tmp_path_factory.mktemp("whole")
    finetune(config_of(checkpoint, folder), str(workdir))
    return workdir


@pytest.fixture(scope="module")
def stopped(checkpoint: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The only trial of a search, which ended early."""
    workdir = tmp_path_factory.mktemp("search")
    config = config_of(checkpoint, folder, early_stopping__patience=PATIENCE, search__seeds="(0,)")
    best = search(config, str(workdir))["best"]
    trial = workdir / best["folder"]
    assert best["score"] == result_of(trial)["best"]["score"]
    return trial


def test_best_epoch_is_the_result(whole: Path, folder: Path):
    step, last, result = best_of(whole), AN_EPOCH * EPOCHS, result_of(whole)
    assert step < last  # or the last epoch would be the result without keep_best, too
    scores = next(row for row in rows_without_times(whole) if (row["step"], row.get("split")) == (step, "eval"))
    assert result["step"] == step
    assert result["scores"]["dev"] == {name: scores[f"dev/{name}"] for name in ("accuracy", "f1", "f1_macro")}
    assert result["best"] == {"epoch": step // AN_EPOCH, "step": step, "score": scores["dev/accuracy"]}
    assert (result["last"], result["stopped_early"]) == ({"epoch": EPOCHS, "step": last}, False)
    every = SETTINGS["checkpoint.every_steps"]
    assert kept_steps(epath.Path(whole)) == [step, last // every * every, last]


def test_best_epoch_is_what_a_workdir_opens(whole: Path, folder: Path):
    step = best_of(whole)
    found = open_checkpoint(str(whole))
    assert (found.step, found.path.name) == (step, str(step))
    assert evaluate_finetuned(found, str(folder / "dev.csv"))["scores"] == {
        "dev.csv": result_of(whole)["scores"]["dev"]
    }
    said = bert_jax.load(str(whole)).predict(["the fox .", "the moon .", "the ship ."])
    written = [line.split("\t")[1] for line in (whole / "predictions" / "test.tsv").read_text().splitlines()[1:]]
    assert [one["prediction"] for one in said] == written
    last = str(whole / "checkpoints" / str(AN_EPOCH * EPOCHS))
    assert open_checkpoint(last).step == open_checkpoint(str(whole), AN_EPOCH * EPOCHS).step == AN_EPOCH * EPOCHS


def test_training_ends_after_epochs_without_improvement(whole: Path, stopped: Path):
    step = best_of(whole)
    last = step + PATIENCE * AN_EPOCH
    result = result_of(stopped)
    assert (result["step"], result["stopped_early"]) == (step, True)
    assert result["last"] == {"epoch": last // AN_EPOCH, "step": last}
    assert result["scores"] == result_of(whole)["scores"]
    assert kept_steps(epath.Path(stopped))[-1] == last


def test_resumed_run_knows_the_best_epoch_and_counts_on(
    stopped: Path, checkpoint: Path, folder: Path, tmp_path: Path
):  # fmt: skip
    """It resumes between the best epoch and the last one; then it is finished, and scores again."""
    workdir = Path(shutil.copytree(stopped, tmp_path / "run"))
    result = result_of(stopped)
    shutil.rmtree(workdir / "checkpoints" / str(result["last"]["step"]))
    shutil.rmtree(workdir / "predictions")
    (workdir / "result.json").unlink()
    resumed_from = kept_steps(epath.Path(workdir))[-1]
    assert result["best"]["step"] < resumed_from < result["last"]["step"]
    config = config_of(checkpoint, folder, early_stopping__patience=PATIENCE)
    for _ in range(2):
        finetune(config, str(workdir))
        assert rows_without_times(workdir) == rows_without_times(stopped)
        assert (workdir / "result.json").read_bytes() == (stopped / "result.json").read_bytes()
        for path in (stopped / "predictions").iterdir():
            assert (workdir / "predictions" / path.name).read_bytes() == path.read_bytes()
        assert kept_steps(epath.Path(workdir)) == kept_steps(epath.Path(stopped))


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"keep_best": False, "early_stopping__patience": 1}, r"early_stopping\.patience=1: .*keep_best=True"),
        ({"early_stopping__patience": -1}, r"early_stopping\.patience=-1"),
        ({"head__bilstm_layers": 2}, r"head\.bilstm_layers=2: .*head\.bilstm=768"),
        ({"task__dev": ""}, r"keep_best=True: .*task\.dev"),
        ({"task__main_metric": "f2"}, r"task\.main_metric=f2: .*accuracy, f1, f1_macro"),
    ],
)
def test_settings_without_effect_are_refused(
    overrides: dict, key: str, checkpoint: Path, folder: Path, tmp_path: Path
):  # fmt: skip
    with pytest.raises(InputError, match=key):
        finetune(config_of(checkpoint, folder, **overrides), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_scores_of_another_dev_file_do_not_choose_the_epoch(
    stopped: Path, checkpoint: Path, folder: Path, tmp_path: Path
):  # fmt: skip
    workdir = Path(shutil.copytree(stopped, tmp_path / "run"))
    config = config_of(checkpoint, folder, early_stopping__patience=PATIENCE)
    dev = (folder / "dev.csv").read_text()
    (folder / "dev.csv").write_text("\n".join(["text,label", *DEV[:-1], "the moon .,night"]) + "\n")
    try:
        with pytest.raises(InputError, match=r"keep_best=True: .*other examples;"):
            finetune(config, str(workdir))
    finally:
        (folder / "dev.csv").write_text(dev)
    assert (workdir / "result.json").read_bytes() == (stopped / "result.json").read_bytes()
    finetune(config, str(workdir))
