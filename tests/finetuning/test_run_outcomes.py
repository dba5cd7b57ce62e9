"""Reports of a fine-tuning run on itself: scores, the label they are of, rows without a score, and how it ended."""

import json
import re
from pathlib import Path

import pytest
from support import helpers

from bert_jax.cli import main
from bert_jax.config import FinetuneConfig
from bert_jax.errors import BertJaxError
from bert_jax.finetuning.batches import Predictor
from bert_jax.finetuning.finetune import finetune

TRAIN = "text,label\n" + "the ship .,sea\nthe owl .,night\n" * 8


def values_of(checkpoint: Path, folder: Path, **overrides: object) -> dict[str, object]:
    return {
        "init": checkpoint, "data.path": folder, "task.train": "train.csv", "task.dev": "dev.csv",
        "task.max_seq_len": 16, "num_epochs": 2, "global_batch_size": 8, "optimizer.learning_rate": 1e-3,
        **{key.replace("__", "."): value for key, value in overrides.items()},
    }  # fmt: skip


def config_of(checkpoint: Path, folder: Path, **overrides: object) -> FinetuneConfig:
    return helpers.finetune_config("text", values_of(checkpoint, folder, **overrides))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.csv").write_text(TRAIN)
    (tmp_path / "dev.csv").write_text(
        "text,label\nthe ship .,sea\nthe owl .,night\nthe owl .,night\nthe fox .,wood\n,sea\n"
    )
    (tmp_path / "test.csv").write_text("text\nthe ship .\nthe moon .\n")
    return tmp_path


@pytest.mark.usefixtures("all_devices")
def test_a_run_says_which_rows_have_no_score_and_predicts_each_split_once(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    predicted: list[int] = []
    real = Predictor.outputs

    def counting(self, parameters, rows, *more, **options):
        predicted.append(len(rows))
        return real(self, parameters, rows, *more, **options)

    monkeypatch.setattr(Predictor, "outputs", counting)
    config = config_of(checkpoint, folder, task__test="test.csv")
    scores = finetune(config, str(folder / "run"))["dev"]
    assert predicted == [3, 3, 2]  # dev after each of two epochs, and test
    result = json.loads((folder / "run" / "result.json").read_text())
    assert result["scores"] == {"dev": scores}
    assert result["rows"] == {"dev": {"scored": 3, "left_out": 2}}


def test_a_run_without_labels_to_score_by_says_so_first_and_last(checkpoint: Path, folder: Path, capfd):
    values = values_of(checkpoint, folder, task__dev="", num_epochs=1)
    flags = [f"--config.{key}={value}" for key, value in values.items()]
    assert main(["finetune", "--config=finetune/text", f"--workdir={folder / 'run'}", *flags]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == {}
    assert err.index("task.dev") < re.search(r"[Ss]tep \d", err).start()


def test_a_run_that_is_not_finite_names_the_keys_of_fine_tuning(checkpoint: Path, folder: Path):
    config = config_of(
        checkpoint, folder, optimizer__learning_rate=1e38, optimizer__warmup_proportion=0.0, max_nonfinite_steps=1
    )
    with pytest.raises(BertJaxError, match=r"optimizer\.learning_rate .*optimizer\.warmup_proportion") as error:
        finetune(config, str(folder / "run"))
    assert "warmup_steps" not in str(error.value)
