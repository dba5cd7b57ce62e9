"""Trackers: TensorBoard, Weights & Biases, one of the caller, and a run that logs to all of them."""

import json
import re
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from etils import epath
from support import helpers
from support.devices import one_device  # noqa: F401
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bert_jax.config import load_config
from bert_jax.errors import InputError, install_hint
from bert_jax.sections import flatten
from bert_jax.tracking.metrics import SAMPLES, finite_json, read_metrics
from bert_jax.tracking.trackers import MetricsFile, TensorBoard, Tracker, Trackers
from bert_jax.training.phases import count_seen
from bert_jax.training.pretrain import pretrain

SAMPLE = {
    "text": "the [MASK] sees </td>.",
    "masks": [{"target": "fox", "probability": 0.25, "fills": [["owl", 0.5], ["fox", 0.25]]}],
}


class Recorder(Tracker):
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Any]] = defaultdict(list)

    def log_config(self, config):
        self.calls["config"].append(config)

    def log(self, row):
        self.calls["rows"].append(row)

    def flush(self):
        self.calls["flush"].append(None)

    def close(self):
        self.calls["close"].append(None)


class Broken(Recorder):
    """Fails at its second row, and when it closes."""

    def log(self, row):
        super().log(row)
        if len(self.calls["rows"]) == 2:
            raise ConnectionError

    def close(self):
        super().close()
        raise ConnectionError


def events_of(workdir: Path) -> EventAccumulator:
    events = EventAccumulator(str(workdir / "tensorboard"))
    events.Reload()
    return events


def test_tensorboard_has_scalars_hyperparameters_and_samples(tmp_path: Path):
    config = dict(flatten(load_config("bert_tiny")))
    with closing(TensorBoard(epath.Path(tmp_path), 0)) as tracker:
        tracker.log_config(config)
        tracker.log({"step": 3, "loss": 2.5, "grad_norm": float("nan"), "mfu": None, "time": 100.0})
        tracker.log({"step": 3, "split": "eval", "loss": 2.0, "time": 101.0})
        tracker.log({"step": 3, "split": "samples", "samples": [SAMPLE], "time": 102.0})
    events = events_of(tmp_path)
    assert [(event.wall_time, event.step, event.value) for event in events.Scalars("train/loss")] == [(100.0, 3, 2.5)]
    assert [(event.step, event.value) for event in events.Scalars("eval/loss")] == [(3, 2.0)]
    assert events.Tags()["scalars"] == ["train/loss", "eval/loss"]
    [sample] = events.Tensors("samples")
    assert (sample.step, sample.wall_time) == (3, 102.0)
    assert b"[MASK]" in sample.tensor_proto.string_val[0]
    assert events.PluginTagToContent("hparams").keys() == {"_hparams_/session_start_info"}
    assert "tensorflow" not in sys.modules


def test_error_of_another_tracker_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    broken, recorder = Broken(), Recorder()
    trackers = Trackers([MetricsFile(epath.Path(tmp_path), 0), broken, recorder])
    for step in (1, 2, 3):
        trackers.log(step, {"loss": 1.0})
    trackers.close()
    assert [row["step"] for row in read_metrics(epath.Path(tmp_path))] == [1, 2, 3]
    assert [row["step"] for row in recorder.calls["rows"]] == [1, 2, 3]
    assert [row["step"] for row in broken.calls["rows"]] == [1, 2]
    assert len(broken.calls["close"]) == len(recorder.calls["close"]) == 1
    assert [record.getMessage().split()[1] for record in caplog.records] == ["Broken", "Broken"]


def test_error_of_a_file_of_the_workdir_ends_the_run():
    broken = Broken()
    broken.is_required = True
    trackers = Trackers([broken])
    trackers.log(1, {})
    with pytest.raises(ConnectionError):
        trackers.log(2, {})
    with pytest.raises(ConnectionError):
        trackers.close()


@pytest.fixture(scope="module")
def logged(dataset_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recorder]:
    """A run of four steps that is resumed for another four, with a tracker of the caller."""
    workdir = tmp_path_factory.mktemp("logged") / "run"
    recorder = Recorder()
    for steps in (4, 8):
        config = helpers.small_config(dataset_dir, total_steps=steps, log_every_steps=2, tracking__samples=2)
        pretrain(config, str(workdir), trackers=[recorder])
    return workdir, recorder


def test_run_logs_time_and_cumulative_counts(logged: tuple[Path, Recorder]):
    rows = [row for row in read_metrics(epath.Path(logged[0])) if row.get("split") != SAMPLES]
    assert [row["step"] for row in rows] == [2, 4, 4, 6, 8, 8]
    assert [row["examples_seen"] for row in rows] == [16 * row["step"] for row in rows]
    assert [row["tokens_seen"] for row in rows] == [64 * 16 * row["step"] for row in rows]
    times = [row["time"] for row in rows]
    assert times == sorted(times)
    assert times[0] > 1.7e9


def test_cumulative_counts_are_sums_over_phases():
    def phase(start: int, stop: int, rows: int, seq_len: int, sequences: float) -> Any:
        return SimpleNamespace(
            start=start, stop=stop, seq_len=seq_len, config=SimpleNamespace(global_batch_size=rows),
            train_loader=SimpleNamespace(sequences_a_row=sequences),
        )  # fmt: skip

    phases = [phase(0, 10, 4, 128, 1.0), phase(10, 12, 2, 512, 2.5)]
    assert count_seen(phases, 3) == {"tokens_seen": 3 * 4 * 128, "examples_seen": 12}
    assert count_seen(phases, 11) == {"tokens_seen": 10 * 4 * 128 + 2 * 512, "examples_seen": 45}
    assert count_seen(phases, 12) == {"tokens_seen": 10 * 4 * 128 + 4 * 512, "examples_seen": 50}


def test_each_evaluation_fills_the_same_masked_texts(logged: tuple[Path, Recorder]):
    rows = [row for row in read_metrics(epath.Path(logged[0])) if row.get("split") == SAMPLES]
    assert [row["step"] for row in rows] == [4, 8]
    first, last = (row["samples"] for row in rows)
    assert len(first) == 2
    vocabulary = set(helpers.make_vocabulary())
    for before, after in zip(first, last, strict=True):
        assert before["text"] == after["text"]
        assert before["text"].count("[MASK]") == len(before["masks"]) > 0
        assert [mask["target"] for mask in before["masks"]] == [mask["target"] for mask in after["masks"]]
        assert [mask["fills"] for mask in before["masks"]] != [mask["fills"] for mask in after["masks"]]
        for mask in after["masks"]:
            probabilities = [probability for _, probability in mask["fills"]]
            assert probabilities == sorted(probabilities, reverse=True)
            assert {word for word, _ in mask["fills"]} <= vocabulary
            assert dict(mask["fills"]).get(mask["target"], mask["probability"]) == pytest.approx(mask["probability"])
            assert mask["probability"] <= probabilities[0] + 1e-6


def test_tracker_of_the_caller_gets_what_the_files_get(logged: tuple[Path, Recorder]):
    workdir, recorder = logged
    assert json.loads(finite_json(recorder.calls["rows"])) == read_metrics(epath.Path(workdir))
    assert [config["total_steps"] for config in recorder.calls["config"]] == [4, 8]
    assert len(recorder.calls["close"]) == 2
    assert recorder.calls["flush"]
    assert [event.step for event in events_of(workdir).Scalars("eval/mlm_loss")] == [4, 8]


def test_wandb_project_without_the_package_is_refused(dataset_dir: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    from bert_jax.tracking.trackers import check_wandb

    check_wandb("")
    with pytest.raises(InputError, match=rf"tracking\.wandb_project=mine\b.*{re.escape(install_hint('wandb'))}"):
        check_wandb("mine")


def wandb_records(path: Path) -> Iterator[Any]:
    """Reads the records of an offline run, a log in LevelDB's format: blocks of 32 KiB after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if (left := -place % 32768) and left < 7:  # no record starts in the last bytes of a block
            place += left
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # full, or the last part
            yield Record.FromString(record)
            record = b""


def test_wandb_gets_the_run_and_a_resumed_run_continues_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = pytest.importorskip("wandb")
    from bert_jax.tracking.trackers import WeightsAndBiases

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    workdir = epath.Path(tmp_path / "run")
    workdir.mkdir()
    for start in (0, 4):
        with closing(WeightsAndBiases("project", workdir)) as tracker:
            tracker.log_config({"optimizer.learning_rate": 0.125})
            tracker.log({"step": start + 2, "loss": 2.5, "time": 100.0})
            tracker.log({"step": start + 2, "split": "eval", "loss": 2.0, "time": 101.0})
            tracker.log({"step": start + 2, "split": SAMPLES, "samples": [SAMPLE], "time": 102.0})
        wandb.teardown()  # as the end of the process does: a resumed run is another process
    identity = (tmp_path / "run" / "wandb_id").read_text()
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    history, configs = [], []
    for record in (record for path in files for record in wandb_records(path)):
        if record.HasField("run"):
            assert (record.run.run_id, record.run.project, record.run.entity) == (identity, "project", "team")
        if record.HasField("config"):
            configs += [json.loads(item.value_json) for item in record.config.update if "learning_rate" in str(item)]
        if record.HasField("history"):
            history.append({
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            })  # fmt: skip
    assert [(row["_step"], row["train/loss"], row["eval/loss"]) for row in history] == [(2, 2.5, 2.0), (6, 2.5, 2.0)]
    assert [row["samples/nrows"] for row in history] == [1, 1]
    assert "train/time" not in history[0]
    assert configs == [0.125, 0.125]
