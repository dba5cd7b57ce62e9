"""The campaign of kills: it finds what differs, and commands that are killed leave nothing half-written."""

import shutil
from pathlib import Path

import kills
import numpy as np
import orbax.checkpoint as ocp
import pytest
from killed import outcomes


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """A workdir as a run leaves it, with one checkpoint."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "mlm_loss": 2.5, "tokens_per_second": 10.0, "time": 1.0}\n')
    (folder / "config.json").write_text("{}")
    save(folder / "checkpoints" / "10", np.arange(4.0))
    return folder


def save(step: Path, weights: np.ndarray) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(step / "parameters", {"weights": weights}, force=True)


@pytest.fixture
def other(workdir: Path) -> Path:
    return Path(shutil.copytree(workdir, workdir.with_name("other")))


def test_equal_runs_differ_in_times_alone(workdir: Path, other: Path):
    rows = (other / "metrics.jsonl").read_text().replace("10.0", "20.0").replace('"time": 1.0', '"time": 2.0')
    (other / "metrics.jsonl").write_text(rows)
    (other / "provenance.json").write_text("{}")
    assert outcomes.differences(outcomes.outcome(other), outcomes.outcome(workdir)) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda run: (run / "metrics.jsonl").write_text('{"step": 1, "mlm_loss": 2.6}\n'), "metrics.jsonl"),
        (lambda run: (run / "config.json").unlink(), "config.json"),
        (lambda run: (run / "tokenizer.json.partial").touch(), "tokenizer.json.partial"),
        (
            lambda run: save(run / "checkpoints" / "10", np.array([0, 1, 2, 4.0])),
            "checkpoints/10/parameters['weights']",
        ),
    ],
    ids=["metric", "lost file", "left file", "parameter"],
)
def test_a_difference_is_named(change, name: str, workdir: Path, other: Path):
    change(other)
    assert outcomes.differences(outcomes.outcome(other), outcomes.outcome(workdir)) == [name]


@pytest.mark.long
@pytest.mark.timeout(1700)
def test_kills_lose_nothing(tmp_path: Path):
    options = ["--series", "1", "--folder", str(tmp_path / "kills"), "--json", str(tmp_path / "kills.json")]
    assert kills.main(options) == 0
