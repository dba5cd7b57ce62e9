"""Runs whose number of steps changes."""

from pathlib import Path

import pytest
from etils import epath
from support import helpers
from support.devices import one_device  # noqa: F401

from bert_jax.errors import InputError
from bert_jax.tracking.metrics import read_metrics
from bert_jax.training.pretrain import pretrain


def rows_of(workdir: Path, split: str | None = None) -> list[dict]:
    return [row for row in read_metrics(epath.Path(workdir)) if row.get("split") == split]


def test_log_of_a_prolonged_run_names_the_rate_before_and_after(
    dataset_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "bert_jax")
    few = {"eval_batches": 0, "log_every_steps": 1}
    pretrain(helpers.small_config(dataset_dir, total_steps=8, optimizer__warmup_steps=2, **few), str(tmp_path))
    caplog.clear()
    pretrain(helpers.small_config(dataset_dir, total_steps=16, optimizer__warmup_steps=2, **few), str(tmp_path))
    rates = [row["learning_rate"] for row in rows_of(tmp_path)]
    assert rates[7:] == pytest.approx([1e-2 / 8, *(1e-2 * (16 - step) / 16 for step in range(8, 16))])
    messages = [record.getMessage() for record in caplog.records]
    assert "Learning rate: 0.00125 at step 8, 0.005 at step 9" in messages


def test_resumed_run_of_the_same_length_logs_no_changed_rate(
    dataset_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    few = {"eval_batches": 0, "checkpoint__every_steps": 3, "checkpoint__keep": 9}
    pretrain(helpers.small_config(dataset_dir, **few), str(tmp_path))
    (epath.Path(tmp_path) / "checkpoints" / "8").rmtree()
    pretrain(helpers.small_config(dataset_dir, **few), str(tmp_path))
    assert not any("Learning rate: " in record.getMessage() for record in caplog.records)


def test_run_whose_steps_are_lowered_to_its_newest_checkpoint_is_evaluated_there(dataset_dir: Path, tmp_path: Path):
    long = helpers.small_config(dataset_dir, eval_every_steps=0, checkpoint__keep=9)
    pretrain(long, str(tmp_path))
    (epath.Path(tmp_path) / "checkpoints" / "8").rmtree()
    lowered = helpers.small_config(dataset_dir, total_steps=4, eval_every_steps=0)
    scores = pretrain(lowered, str(tmp_path))
    assert scores["mlm_loss"] > 0
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3, 4]
    (row,) = rows_of(tmp_path, "eval")
    assert (row["step"], row["mlm_loss"]) == (4, scores["mlm_loss"])
    assert pretrain(lowered, str(tmp_path)) == {}


def test_more_steps_than_a_counter_holds_are_refused(dataset_dir: Path, tmp_path: Path):
    with pytest.raises(InputError, match=r"total_steps=3000000000: must be in \[1, 2\*\*31\)"):
        pretrain(helpers.small_config(dataset_dir, total_steps=3_000_000_000), str(tmp_path))
