"""Monitoring of a run: step times, input wait, stalls, traces, and failed saves."""

import gzip
import json
import logging
import sys
import threading
import time
from pathlib import Path

import pytest
from support import child_processes, helpers
from support.devices import all_devices, one_device  # noqa: F401

from bert_jax.config import load_config
from bert_jax.errors import InputError
from bert_jax.training import checkpoints, phases
from bert_jax.training.pretrain import pretrain

UNDISTURBED = {"eval_every_steps": 0, "eval_batches": 0, "checkpoint__every_steps": 1_000}


def slow_batches(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    make = phases.TrainLoader.batch

    def batch(loader, step, rows):
        time.sleep(seconds)
        return make(loader, step, rows)

    monkeypatch.setattr(phases.TrainLoader, "batch", batch)


def test_rows_have_step_times_and_the_share_of_waiting(dataset_dir: Path, tmp_path: Path, monkeypatch):
    slow_batches(monkeypatch, 0.4)  # some are made while the step compiles
    config = helpers.small_config(dataset_dir, total_steps=16, log_every_steps=16, **UNDISTURBED)
    pretrain(config, str(tmp_path))
    (row,) = helpers.rows(tmp_path)
    assert 0.3 < row["step_seconds"] < 5
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
    (row,) = helpers.rows(tmp_path)
    assert row["input_wait_share"] < 0.5


@pytest.mark.parametrize("steps", ["3", "4:3", "0:3", "a:b", "3:", "-1:3"])
def test_invalid_profile_steps_are_refused(steps: str):
    with pytest.raises(InputError, match=rf"profile\.steps={steps}: must be .*10:15"):
        load_config("bert_tiny", {"profile.steps": steps})


@pytest.mark.parametrize("ends", [False, True])
def test_a_stall_shows_every_thread_and_ends_the_run_if_asked(ends: bool):
    script = f"""
import threading, time
from bert_jax.runtime.interpreter import StallWatch
watch = StallWatch(0.5 / 60, ends={ends})
for _ in range(8):
    watch.beat()
    time.sleep(0.1)
def holds_up_the_run():
    time.sleep(2)
thread = threading.Thread(target=holds_up_the_run)
thread.start()
thread.join()
watch.close()
"""
    done = child_processes.run([sys.executable, "-c", script], timeout=60, env=helpers.child_environment())
    assert done.returncode == int(ends), done.stderr
    assert "holds_up_the_run" in done.stderr
    assert "most recent call first" in done.stderr


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
    assert 50 <= helpers.rows(tmp_path)[-1]["step"] < 90  # and not at the next save, of step 100
