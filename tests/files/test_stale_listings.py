"""Listings of folders that are out of date, as those of a network file system with a cache: names are missing."""

import json
import shutil
from pathlib import Path

import pytest
from support import helpers, runs
from support.faults import TRAINING, last_line

SETTINGS = {**TRAINING, "total_steps": 12, "checkpoint.keep": 3}


@pytest.fixture(scope="module")
def plain(dataset_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run, with its steps 4, 8 and 12."""
    workdir = tmp_path_factory.mktemp("plain") / "run"
    done = runs.train(dataset_dir, workdir, **{key.replace(".", "__"): value for key, value in SETTINGS.items()})
    assert done.returncode == 0, done.stderr
    return workdir


@pytest.mark.parametrize("hidden", ["8", "12", "metrics.jsonl", "config.json"])
def test_a_run_resumes_whatever_a_listing_lacks(hidden: str, run, plain: Path, dataset_dir: Path, tmp_path: Path):
    """It starts from an earlier step if it has to, and writes the missing one again."""
    workdir = tmp_path / "run"
    shutil.copytree(plain, workdir)
    if hidden == "8":
        shutil.rmtree(workdir / "checkpoints" / "12")  # so that the newest is hidden
    words = ["pretrain", "--config=bert_tiny", f"--workdir={workdir}",
             *helpers.flags({**SETTINGS, "data.path": dataset_dir})]  # fmt: skip
    last_line(run(words, "list", hidden), 0)
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["12", "4", "8"]
    runs.assert_same_run(workdir, plain)


def test_an_older_step_is_named_by_what_reads_it(run, plain: Path, dataset_dir: Path):
    done = run(["evaluate", "--checkpoint", plain, "--data", dataset_dir, "--json"], "list", "12")
    assert done.returncode == 0, done.stderr
    plain_scores, older = (
        json.loads(run(["evaluate", "--checkpoint", place, "--data", dataset_dir, "--json"]).stdout)
        for place in (plain, plain / "checkpoints" / "8")
    )
    assert json.loads(done.stdout) == older != plain_scores
    assert "step 8" in done.stderr


def test_shards_that_a_listing_lacks_are_read(run, dataset_dir: Path, plain: Path, tmp_path: Path):
    """The names of shards come from dataset.json."""
    (shard,) = dataset_dir.glob("train-*.array_record")
    words = ["pretrain", "--config=bert_tiny", f"--workdir={tmp_path / 'run'}",
             *helpers.flags({**SETTINGS, "data.path": dataset_dir})]  # fmt: skip
    last_line(run(words, "list", shard.name), 0)
    runs.assert_same_run(tmp_path / "run", plain)
