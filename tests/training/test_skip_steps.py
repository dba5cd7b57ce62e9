"""Batches that `data.skip_steps` leaves out: those around a loss spike."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from support import helpers
from support.devices import one_device  # noqa: F401
from support.runs import assert_same_run, rows_without_times, train, train_until

from bert_jax.batch import HostBatch
from bert_jax.config import load_config
from bert_jax.errors import InputError
from bert_jax.training.phases import plan_phases
from bert_jax.training.pretrain import pretrain

SETTINGS = {"eval_batches": 0, "checkpoint__every_steps": 2, "checkpoint__keep": 9}


def batches(
    dataset: Path | str, skip_steps: str = "", rows: slice = slice(None), **settings: object
) -> list[HostBatch]:  # fmt: skip
    """Returns those that the steps of a run train on, in order."""
    config = helpers.small_config(dataset, data__skip_steps=skip_steps, **settings)
    return [
        phase.train_loader.batch(step, rows)
        for phase in helpers.open_phases(config) for step in range(phase.start, phase.stop)
    ]  # fmt: skip


def assert_equal(one: list[HostBatch], other: list[HostBatch]) -> None:
    for ours, expected in zip(one, other, strict=True):
        for name, entry in expected.items():
            np.testing.assert_array_equal(ours[name], entry)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("settings", [{}, {"data__packing": True}, {"objective__lm": "ltr", "objective__nsp": False}])
@pytest.mark.parametrize(
    ("skip_steps", "left"),
    [
        ("3:4", [1, 2, 5, 6, 7, 8, 9, 10]),
        ("1:1,3:4", [2, 3, 6, 7, 8, 9, 10, 11]),  # steps 3 and 4 would train on batches 4 and 5
        ("2:4,3:3", [1, 5, 7, 8, 9, 10, 11, 12]),  # the run spiked again at step 3
        ("8:9", [1, 2, 3, 4, 5, 6, 7, 10]),
    ],
)
def test_batches_are_those_of_the_run_without_the_skipped_ones(
    skip_steps: str, left: list[int], settings: dict, mixed: bool, dataset_dir: Path, other_dir: Path
):
    path = f"{dataset_dir},{other_dir}" if mixed else dataset_dir
    whole = batches(path, total_steps=12, **settings)
    expected = [whole[number - 1] for number in left]
    assert_equal(batches(path, skip_steps, **settings), expected)
    of_host = [{name: entry[4:8] for name, entry in batch.items()} for batch in expected]
    assert_equal(batches(path, skip_steps, slice(4, 8), **settings), of_host)


def test_later_phases_continue_after_the_skipped_batches(dataset_dir: Path, other_dir: Path):
    """The batch of the second phase is twice as large, so that a range there is of as many more rows."""
    both = f"{dataset_dir},{other_dir}"
    phases = ({"steps": 3}, {"steps": 2, "global_batch_size": 32}, {"steps": 2, "data.path": both}, {"steps": 1})
    found = batches(dataset_dir, "2:3,5:5", phases=phases)
    ids = [batch["input_ids"] for batch in (found[:5] + found[7:])]
    whole = [batch["input_ids"] for batch in batches(dataset_dir, total_steps=20)]
    read = [whole[0], whole[3], whole[4], *whole[5:7], *whole[9:11]]
    np.testing.assert_array_equal(np.concatenate(ids[:5]), np.concatenate(read))
    opened = helpers.open_phases(helpers.small_config(dataset_dir, data__skip_steps="2:3,5:5", phases=phases))
    assert opened[2].train_loader.next_rows(opened[2].start) == [11 * 16, 0]
    third = opened[2].train_loader.next_rows(opened[2].stop)[0]
    assert opened[3].train_loader.next_rows(opened[3].start) == [third]


def test_epochs_count_skipped_batches_and_examples_do_not(dataset_dir: Path, tmp_path: Path):
    config = helpers.small_config(dataset_dir, data__skip_steps="3:6", total_steps=4, **SETTINGS)
    pretrain(config, str(tmp_path / "run"))
    rows = [row for row in rows_without_times(tmp_path / "run") if "split" not in row]
    assert [row["examples_seen"] for row in rows] == [16, 32, 48, 64]
    ratios = np.array([row["epoch"] for row in rows]) / rows[0]["epoch"]
    np.testing.assert_allclose(ratios, [1, 2, 7, 8], rtol=1e-6)


@pytest.mark.parametrize(
    ("skip_steps", "message"),
    [
        ("5", r"data\.skip_steps=5: .*1000:1200"),
        ("0:2", r"data\.skip_steps=0:2: "),
        ("4:3", r"data\.skip_steps=4:3: "),
        ("-4:3", r"data\.skip_steps=-4:3: "),
        ("5:6,3:4", r"data\.skip_steps=5:6,3:4: .*ascending"),
        ("3:4,3:6", r"data\.skip_steps=3:4,3:6: .*ascending"),
        ("9:9", r"data\.skip_steps: step 9 .*total_steps=8"),
    ],
)
def test_invalid_ranges_are_refused(skip_steps: str, message: str):
    with pytest.raises(InputError, match=message):
        plan_phases(
            load_config(
                "default", {"total_steps": 8, "phases": ({"steps": 4}, {"steps": 4}), "data.skip_steps": skip_steps}
            )
        )


def test_a_phase_may_not_set_the_ranges():
    phases = ({"steps": 8, "data.skip_steps": "3:4"},)
    with pytest.raises(InputError, match=r"phases\.0\.data\.skip_steps: "):
        plan_phases(load_config("default", {"total_steps": 8, "phases": phases}))


# --- Resumed runs ----------------------------------------------------------------------------------------------------


def keep_until(workdir: Path, step: int) -> None:
    for folder in (workdir / "checkpoints").iterdir():
        if int(folder.name) > step:
            shutil.rmtree(folder)


def test_a_range_may_be_added_before_its_first_step_alone(dataset_dir: Path, tmp_path: Path):
    """A run that spiked at step 6 ends as one that left the batches out from the start."""

    def run(folder: str, skip_steps: str) -> None:
        pretrain(helpers.small_config(dataset_dir, data__skip_steps=skip_steps, **SETTINGS), str(tmp_path / folder))

    run("run", "2:2")
    for skip_steps, message in (
        ("2:2,6:7", r"data\.skip_steps=6:7: .*run is at step 8 .*without.* after step 5 "),
        ("2:3", r"data\.skip_steps=2:2: .*with this range.* after step 1 "),
        ("", r"data\.skip_steps=2:2: .*with this range"),
    ):
        with pytest.raises(InputError, match=message):
            run("run", skip_steps)
    keep_until(tmp_path / "run", 4)
    run("run", "2:2,6:7")
    run("plain", "2:2,6:7")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    run("run", "2:2,6:7")
    assert_same_run(tmp_path / "run", tmp_path / "plain")


@pytest.mark.long
def test_a_killed_run_skips_as_one_that_was_not(dataset_dir: Path, tmp_path: Path):
    settings = {
        "total_steps": 30, "checkpoint.every_steps": 2, "eval_batches": 0, "log_every_steps": 3,
        "data.skip_steps": "5:9,17:17,29:30",
    }  # fmt: skip
    killed = train_until(9, dataset_dir, tmp_path / "run", signal.SIGKILL, saved=10, **settings)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    for folder in ("run", "plain"):
        done = train(dataset_dir, tmp_path / folder, **settings)
        assert done.returncode == 0, done.stderr
    assert "data.skip_steps=5:9: leaves out 5 batches, 80 rows, before step 5" in done.stderr
    assert_same_run(tmp_path / "run", tmp_path / "plain")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"]["skip_steps"] == "5:9,17:17,29:30"
