"""Rows at which phases begin to read datasets that earlier phases have read."""

import itertools
import json
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from etils import epath
from support import helpers
from support.devices import all_devices, one_device  # noqa: F401
from support.runs import assert_same_run, rows_without_times, train, train_until

from bert_jax.batch import HostBatch
from bert_jax.config import PretrainConfig, load_config
from bert_jax.errors import InputError
from bert_jax.training.phases import Phase, log_data, plan_phases
from bert_jax.training.pretrain import pretrain
from bert_jax.training.run import claim_workdir

STEPS = 4
PACKED = {"data.packing": True, "data.max_sequences": 4}


def config_of(dataset: Path, *phases: dict, **overrides: object) -> PretrainConfig:
    return helpers.small_config(
        dataset, phases=tuple({"steps": STEPS, **phase} for phase in phases), total_steps=STEPS * len(phases),
        optimizer__warmup_steps=1, **overrides,
    )  # fmt: skip


def sequences_of(phase: Phase) -> list[tuple[bytes, bytes]]:
    """(unmasked ids, masked ids) of every sequence that a phase reads and that has 6 predictions or more."""
    loader, found = phase.train_loader, []
    for step in range(phase.start, phase.stop):
        batch = loader.batch(step)
        ids = batch["input_ids"].copy()
        row, slot = np.nonzero(batch["masked_weights"])
        ids[row, batch["masked_positions"][row, slot]] = batch["masked_ids"][row, slot]
        of_prediction = batch["sequence_ids"][row, batch["masked_positions"][row, slot]]
        for number in range(1, batch["sequence_ids"].max() + 1):
            counts = np.bincount(row[of_prediction == number], minlength=len(ids))
            for place in np.nonzero(counts >= 6)[0]:
                columns = batch["sequence_ids"][place] == number
                found.append((ids[place, columns].tobytes(), batch["input_ids"][place, columns].tobytes()))
    assert len(found) > 20
    return found


def changes_of(dataset: Path, other: Path) -> dict[str, tuple[dict, ...]]:
    both = {"data.path": f"{dataset},{other}"}
    even, uneven = ({**both, "data.weights": weights} for weights in ((0.5, 0.5), (0.8, 0.2)))
    return {
        "the same": ({}, {}),
        "mixture": ({}, both),
        "weights": (even, uneven),
        "order of the mixture": (even, {**even, "data.path": f"{other},{dataset}"}),
        "back and forth": ({}, both, {}),
        "a mixture that returns": (even, {}, even),
        "packed": (PACKED, {**PACKED, **both}),
    }


def first_rows(phase: Phase) -> list[int]:
    return phase.train_loader.next_rows(phase.start)


@pytest.mark.parametrize("change", changes_of(Path(), Path()))
def test_phases_read_each_instance_once_per_epoch(change: str, dataset_dir: Path, other_dir: Path):
    phases = helpers.open_phases(config_of(dataset_dir, *changes_of(dataset_dir, other_dir)[change]))
    instances = [unmasked for phase in phases for unmasked, _ in sequences_of(phase)]
    assert len(set(instances)) == len(instances)


@pytest.mark.parametrize(
    "phases",
    [({}, PACKED), (PACKED, {}), ({}, PACKED, {}), (PACKED, {**PACKED, "data.max_sequences": 3})],
    ids=["packing on", "packing off", "packing on and off", "other packing"],
)
def test_rows_of_another_packing_begin_with_new_masks(phases: tuple[dict, ...], dataset_dir: Path):
    opened = helpers.open_phases(config_of(dataset_dir, *phases, global_batch_size=64))
    read = [sequences_of(phase) for phase in opened]
    sequences = [sequence for of_phase in read for sequence in of_phase]
    assert len(set(sequences)) == len(sequences)
    unmasked = [{ids for ids, _ in of_phase} for of_phase in read]
    assert unmasked[0] & unmasked[1]  # in another epoch
    sizes = [phase.train_loader.sources[0].size for phase in opened]
    assert [first_rows(phase) for phase in opened] == [[number * size] for number, size in enumerate(sizes)]


def test_rows_read_are_counted_by_dataset(dataset_dir: Path, other_dir: Path):
    both = {"data.path": f"{dataset_dir},{other_dir}", "data.weights": (0.75, 0.25)}
    opened = helpers.open_phases(config_of(dataset_dir, both, {}, {**both, "data.weights": (0.5, 0.5)}, both))
    own, others = (np.array([first_rows(phase)[place] for phase in opened if len(first_rows(phase)) > place])
                   for place in (0, 1))  # fmt: skip
    steps, rows = np.diff(own), np.diff(others)
    assert steps[1] == 4 * 16  # alone
    assert steps[0] + rows[0] == steps[2] + rows[1] == 4 * 16
    for phase, after in itertools.pairwise(opened):
        assert phase.train_loader.next_rows(phase.stop)[0] == first_rows(after)[0]


def test_epochs_count_what_all_phases_have_read(dataset_dir: Path, other_dir: Path):
    opened = helpers.open_phases(config_of(dataset_dir, {}, {"data.path": f"{dataset_dir},{other_dir}"}))
    first, second = (phase.train_loader for phase in opened)
    assert second.epochs(STEPS) == [first.epochs(STEPS)[0], 0.0]
    assert second.epochs(2 * STEPS)[0] > first.epochs(STEPS)[0] > 0


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_phases_that_read_the_same_rows_are_one_run(mixed: bool, packing: bool, dataset_dir: Path, other_dir: Path):
    path = f"{dataset_dir},{other_dir}" if mixed else dataset_dir
    settings = {"global_batch_size": 64, "data__packing": packing, "data__path": path}
    two = helpers.open_phases(config_of(dataset_dir, {}, {"optimizer.learning_rate": 1e-3}, **settings))
    (one,) = helpers.open_phases(helpers.small_config(dataset_dir, **settings))
    whole, later = one.train_loader, two[1].train_loader
    for name, entry in whole.batch(2 * STEPS - 1).items():
        np.testing.assert_array_equal(later.batch(2 * STEPS - 1)[name], entry)


# --- Resumed runs -----------------------------------------------------------------------------------------------


def resumable(dataset: Path, other: Path, total_steps: int, **overrides: object) -> PretrainConfig:
    phases = ({"steps": 1}, {"steps": -1, "data.path": f"{dataset},{other}"})
    return helpers.small_config(
        dataset, phases=phases, total_steps=total_steps, optimizer__warmup_steps=1, eval_batches=0, **overrides
    )


@pytest.fixture(scope="module")
def begun(dataset_dir: Path, other_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is in its second phase, at step 2."""
    workdir = tmp_path_factory.mktemp("begun") / "run"
    pretrain(resumable(dataset_dir, other_dir, 2), str(workdir))
    return workdir


def test_run_resumes_where_its_second_phase_stopped(begun: Path, dataset_dir: Path, other_dir: Path):
    claimed = claim_workdir(epath.Path(begun), helpers.open_phases(resumable(dataset_dir, other_dir, 4)))
    assert claimed is not None
    assert claimed.step == 2
    for overrides in ({"data__max_predictions": 9}, {"objective__mask_rate": 0.3}):
        with pytest.raises(InputError, match=r"data\.max_predictions=10\b|objective\.mask_rate=0\.15\b"):
            claim_workdir(epath.Path(begun), helpers.open_phases(resumable(dataset_dir, other_dir, 4, **overrides)))


# --- Logs -------------------------------------------------------------------------------------------------------


def test_log_warns_of_targets_that_max_predictions_drops(dataset_dir: Path, caplog: pytest.LogCaptureFixture):
    def warned(**overrides: object) -> list[str]:
        caplog.clear()
        (phase,) = helpers.open_phases(helpers.small_config(dataset_dir, **overrides))
        log_data(phase, 0)
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    assert not warned(data__max_predictions=-1) + warned(data__max_predictions=20)
    assert not warned(data__max_predictions=3, objective__lm="ltr", objective__nsp=False)
    (line,) = warned(data__max_predictions=3)
    assert re.search(r"data\.max_predictions=3\b.*\b3 .*\b10 ", line)


# --- Batches that `data.skip_steps` leaves out: those around a loss spike ----------------------------------------


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


def test_a_range_may_be_added_before_its_first_step_alone(dataset_dir: Path, tmp_path: Path, caplog):
    """A run that spiked at step 6 ends as one that left the batches out from the start."""
    caplog.set_level("INFO", "bert_jax")

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
    for step in (4, 6):
        keep_until(tmp_path / "run", step)
        run("run", "2:2,6:7")
    assert "data.skip_steps=6:7: leaves out 2 batches, 32 rows, before step 6" in caplog.text
    run("plain", "2:2,6:7")
    assert_same_run(tmp_path / "run", tmp_path / "plain")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"]["skip_steps"] == "2:2,6:7"


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
