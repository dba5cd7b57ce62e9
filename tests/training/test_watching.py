"""Monitoring of a run: step times, input wait, stalls, traces, and failed saves."""

import gzip
import json
import logging
import threading
import time
from pathlib import Path

import pytest
from etils import epath
from support import helpers
from support.devices import all_devices, one_device  # noqa: F401

from bert_jax.errors import InputError
from bert_jax.runtime.watchdog import StallWatch
from bert_jax.tracking.metrics import read_metrics
from bert_jax.tracking.profiling import parse_steps
from bert_jax.training import phase_data
from bert_jax.training.checkpointing import checkpoints
from bert_jax.training.pretrain import pretrain

UNDISTURBED = {"eval_every_steps": 0, "eval_batches": 0, "checkpoint__every_steps": 1_000}


def slow_batches(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    make = phase_data.TrainLoader.batch

    def batch(loader, step, rows):
        time.sleep(seconds)
        return make(loader, step, rows)

    monkeypatch.setattr(phase_data.TrainLoader, "batch", batch)


def test_rows_have_step_times_and_the_share_of_waiting(dataset_dir: Path, tmp_path: Path, monkeypatch):
    slow_batches(monkeypatch, 0.4)  # some are made while the step compiles
    config = helpers.small_config(dataset_dir, total_steps=16, log_every_steps=16, **UNDISTURBED)
    pretrain(config, str(tmp_path))
    (row,) = read_metrics(epath.Path(tmp_path))
    assert 0.3 < row["step_seconds_p50"] <= row["step_seconds_p90"] <= row["step_seconds_p99"] < 5
    assert 0.3 < row["input_wait_share"] <= 1
    assert 16 / 1.0 < row["examples_per_second"] < 16 / 0.2


def test_fast_input_has_little_wait_and_traces_are_in_the_workdir(dataset_dir: Path, tmp_path: Path, caplog):
    caplog.set_level(logging.INFO, "bert_jax")
    config = helpers.small_config(dataset_dir, total_steps=16, log_every_steps=16, profile__steps="3:4", **UNDISTURBED)
    pretrain(config, str(tmp_path))
    (trace,) = (tmp_path / "profile").rglob("*.trace.json.gz")
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    traced = {event["args"]["step_num"] for event in events if event.get("name") == "train"}
    assert traced == {"3", "4"}
    assert "tensorboard --logdir" in caplog.text
    (row,) = read_metrics(epath.Path(tmp_path))
    assert row["input_wait_share"] < 0.5


@pytest.mark.parametrize("steps", ["3", "4:3", "0:3", "a:b", "3:", "-1:3"])
def test_invalid_profile_steps_are_refused(steps: str, dataset_dir: Path, tmp_path: Path):
    with pytest.raises(InputError, match=rf"profile\.steps='{steps}': "):
        pretrain(helpers.small_config(dataset_dir, profile__steps=steps), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    assert parse_steps("") == range(0)
    assert list(parse_steps("10:12")) == [10, 11, 12]


def test_a_stall_is_reported_once_with_every_thread(dataset_dir: Path, tmp_path: Path, monkeypatch, caplog):
    make = phase_data.TrainLoader.batch

    def reports() -> list[str]:
        return [path.read_text() for path in (tmp_path / "stalls").glob("*")]

    def holds_up_the_run() -> None:
        deadline = time.monotonic() + 120
        while not any("holds_up_the_run" in report for report in reports()) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(2.5)  # more than the limit: another report could come

    def batch(loader, step, rows):
        if step == 4:
            holds_up_the_run()
        return make(loader, step, rows)

    monkeypatch.setattr(phase_data.TrainLoader, "batch", batch)
    # Compilation takes longer than the limit on a busy machine, and is a stall as well then.
    config = helpers.small_config(dataset_dir, stall_minutes=2 / 60)
    pretrain(config, str(tmp_path))
    (report,) = [report for report in reports() if "holds_up_the_run" in report]
    assert "thread MainThread:" in report
    assert "thread prefetch:" in report
    assert caplog.text.count("thread MainThread:") == len(reports())


def test_a_run_that_stalls_for_too_long_ends(tmp_path: Path):
    left, gone = [], threading.Event()

    def leave(status: int) -> None:
        left.append(status)
        gone.set()

    watch = StallWatch(epath.Path(tmp_path), 0, minutes=0, exit_minutes=0.5 / 60, leave=leave)
    for step in range(8):
        watch.beat(step)
        time.sleep(0.1)
    assert not left
    assert gone.wait(5)
    watch.close()
    assert left[0] == 1
    assert not (tmp_path / "stalls").exists()


def test_a_save_that_fails_in_the_background_ends_the_run_at_once(dataset_dir: Path, tmp_path: Path, monkeypatch):
    """Simulates a disk that fills up during a save: the arrays are copied, the files are not."""
    rename = checkpoints.epath.Path.rename
    failing = threading.Event()

    def fail(path, target):
        if threading.current_thread() is not threading.main_thread() and "orbax-checkpoint-tmp" in str(path):
            failing.set()
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr("etils.epath.gpath.PosixGPath.rename", fail)
    config = helpers.small_config(dataset_dir, total_steps=200, checkpoint__every_steps=50, eval_every_steps=0)
    slow_batches(monkeypatch, 0.04)
    with pytest.raises(Exception, match="No space left on device"):
        pretrain(config, str(tmp_path))
    assert failing.is_set()
    assert 50 <= read_metrics(epath.Path(tmp_path))[-1]["step"] < 90  # and not at the next save, of step 100
