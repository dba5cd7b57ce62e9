"""Fine-tuning that keeps the best epoch, ends early, and selects by another metric."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from etils import epath
from support.finetuning import finetune_config
from support.runs import rows_without_times

import bert_jax
from bert_jax.config import FinetuneConfig, load_config
from bert_jax.errors import InputError
from bert_jax.finetuning.fine_tuned import evaluate_finetuned
from bert_jax.finetuning.finetune import finetune, search
from bert_jax.finetuning.tasks.kinds import read_task
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


def test_main_metric_of_the_config_is_that_of_result_search_and_evaluate(
    checkpoint: Path, folder: Path, tmp_path: Path
):  # fmt: skip
    config = config_of(checkpoint, folder, task__main_metric="f1", search__seeds="(0,)", num_epochs=3)
    found = search(config, str(tmp_path))
    trial = tmp_path / found["best"]["folder"]
    result = result_of(trial)
    assert found["metric"] == result["main_metric"] == "f1"
    assert found["best"]["score"] == result["scores"]["dev"]["f1"]
    assert result["step"] == best_of(trial, "dev/f1")
    assert evaluate_finetuned(open_checkpoint(str(trial)), str(folder / "dev.csv"))["main_metric"] == "f1"


def test_main_metric_of_a_tagger_may_be_that_of_a_type(checkpoint: Path, tmp_path: Path):
    """It is 0 if the split has none of the type and none is predicted."""
    (tmp_path / "train.conll").write_text("the O\nship B-SEA\n\nfox B-WOOD\n")
    (tmp_path / "dev.conll").write_text("the O\nship B-SEA\n")

    def task_of(metric: str):
        values = {"init": checkpoint, "data.path": tmp_path, "task.main_metric": metric}
        config = load_config("finetune/ner", values, kind=FinetuneConfig)
        task, _, (dev,) = read_task(config, open_checkpoint(str(checkpoint)).tokenizer)
        return task, dev

    task, dev = task_of("f1_WOOD")
    outside = [[[1.0, *[0.0] * (task.size - 1)]] * len(sequence.input_ids) for sequence in dev.encoded.sequences]
    assert task.score(dev, [np.array(outputs) for outputs in outside])[task.main_metric] == 0.0
    with pytest.raises(InputError, match=r"task\.main_metric=f1_SKY: .*f1, precision, recall, f1_SEA, f1_WOOD"):
        task_of("f1_SKY")
    assert task_of("")[0].main_metric == "f1"
