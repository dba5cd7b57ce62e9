"""Rows at which phases begin to read datasets that earlier phases have read."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from etils import epath
from support import helpers
from support.devices import all_devices, one_device  # noqa: F401

from bert_jax.config import PretrainConfig
from bert_jax.errors import InputError
from bert_jax.training.phases import Phase, log_data
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


def test_a_batch_of_any_phase_follows_from_config_and_step(dataset_dir: Path, other_dir: Path):
    phases = ({}, {"data.path": f"{dataset_dir},{other_dir}"}, PACKED)
    config = config_of(dataset_dir, *phases)
    whole, resumed = (helpers.open_phases(config) for _ in range(2))
    for one, other in zip(whole, resumed, strict=True):
        loader, again = one.train_loader, other.train_loader
        batches = [loader.batch(step) for step in range(one.start, one.stop)]
        for name, entry in again.batch(one.stop - 1).items():
            np.testing.assert_array_equal(entry, batches[-1][name])


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
