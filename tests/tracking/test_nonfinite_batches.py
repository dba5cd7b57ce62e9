"""Batches of non-finite steps, kept in the workdir."""

from pathlib import Path

import numpy as np
import pytest
from etils import epath

from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.loading.loader import TrainLoader, TrainRows
from bert_jax.data.loading.masking import Masking
from bert_jax.tracking.nonfinite_batches import FOLDER, MAX_FILES, NonfiniteBatches

NAN = {"loss": float("nan"), "grad_norm": float("inf")}


def batches_of(folder: Path, loader: TrainLoader, rows: np.ndarray) -> NonfiniteBatches:
    return NonfiniteBatches(
        epath.Path(folder), rows, lambda step: loader.batch(step, rows), lambda step: loader.instances(step, rows)
    )


@pytest.fixture(scope="module")
def loader(dataset_dir: Path) -> TrainLoader:
    rows = TrainRows(PreparedDataset(str(dataset_dir)), seed=1, masking=Masking(10, 0.15), max_sequences=4)
    return TrainLoader([rows], seed=1, global_batch_size=8)


def test_the_file_has_the_batch_and_its_instances(loader: TrainLoader, tmp_path: Path, caplog):
    rows = np.array([0, 1, 4, 5])
    batches_of(tmp_path, loader, rows).add(7, {**NAN, "nonfinite_streak": 1})
    with np.load(tmp_path / FOLDER / "step-7-process-0.npz") as kept:
        assert kept["step"] == 7
        assert np.array_equal(kept["rows"], rows)
        for name, array in loader.batch(6, rows).items():
            assert np.array_equal(kept[name], array), name
        instances, epochs = loader.sources[0].instances(loader.row_numbers(6)[1][rows])
        assert np.array_equal(kept["instances"], instances)
        assert np.array_equal(kept["epoch"], epochs)
        assert kept["source"].tolist() == [0] * 4
        # The instances are those of the rows: their tokens are in the row, except for masks.
        dataset = loader.sources[0].dataset
        first = dataset.instances("train", kept["instances"][:, 0])
        same = first["input_ids"] == kept["input_ids"]
        assert same[first["sequence_ids"] > 0].mean() > 0.8
    assert "step-7-process-0.npz" in caplog.text


def test_only_the_first_step_of_a_streak_is_kept_and_the_newest_files(loader: TrainLoader, tmp_path: Path):
    batches = batches_of(tmp_path, loader, np.arange(2))
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "step-1-process-1.npz").touch()
    for start in range(10, 10 * (MAX_FILES + 3), 10):
        batches.add(start, {**NAN, "nonfinite_streak": 0})
        batches.add(start + 1, {**NAN, "nonfinite_streak": 1})
        batches.add(start + 2, {**NAN, "nonfinite_streak": 2})
    steps = {int(path.name.split("-")[1]) for path in (tmp_path / FOLDER).iterdir()}
    assert steps == {1, *(10 * number + 1 for number in range(3, MAX_FILES + 3))}


def test_a_folder_that_cannot_be_written_does_not_end_the_run(loader: TrainLoader, tmp_path: Path, caplog):
    (tmp_path / FOLDER).write_text("a file")
    batches_of(tmp_path, loader, np.arange(2)).add(3, {**NAN, "nonfinite_streak": 1})
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
