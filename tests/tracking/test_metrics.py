import json
import re
import struct
import sys
import time
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
from bert_jax.tracking import metrics
from bert_jax.tracking.metrics import METRICS_FILE, SAMPLES, RunningMeans, finite_json, read_metrics
from bert_jax.tracking.trackers import MetricsFile, TensorBoard, Tracker, Trackers
from bert_jax.training.phases import count_seen
from bert_jax.training.pretrain import pretrain


def open_metrics(workdir: epath.Path, resume_step: int) -> Trackers:
    return Trackers([MetricsFile(workdir, resume_step)])


def test_resume_drops_metrics_after_checkpoint(tmp_path):
    folder = epath.Path(tmp_path)
    writer = open_metrics(folder, 0)
    for step in range(1, 6):
        writer.log(step, {"loss": 1.0 / step})
    writer.log(4, {"loss": 0.5}, "eval")
    writer.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 6, "lo')  # cut off by a kill
    writer = open_metrics(folder, 4)
    writer.log(5, {"loss": 7.0})
    writer.close()
    rows = read_metrics(folder)
    assert [(row["step"], row.get("split")) for row in rows] == [
        (1, None), (2, None), (3, None), (4, None), (4, "eval"), (5, None),
    ]  # fmt: skip
    assert rows[-1]["loss"] == 7.0


def test_nonfinite_values_are_null_and_every_line_is_json(tmp_path):
    writer = open_metrics(epath.Path(tmp_path), 0)
    writer.log(1, {"loss": float("nan"), "grad_norm": float("inf"), "nonfinite_steps": 1})
    writer.close()
    text = (tmp_path / METRICS_FILE).read_text()
    row = json.loads(text, parse_constant=lambda name: 1 / 0)
    assert time.time() - row.pop("time") < 60
    assert row == {"step": 1, "loss": None, "grad_norm": None, "nonfinite_steps": 1}


@pytest.mark.parametrize(
    "line",
    [b'z"step": 2}', b'{"step": 3, "los\xf3": 1}', b"[" * 100_000, b"[1]"],
    ids=["flipped", "utf8", "nested", "list"],
)
def test_a_line_that_is_no_row_is_refused_with_its_number(line: bytes, tmp_path: Path):
    content = b"\n".join([b'{"step": 1}', b"", line, b'{"step": 4}'])
    (tmp_path / METRICS_FILE).write_bytes(content)
    with pytest.raises(InputError, match=r"metrics\.jsonl:3: "):
        open_metrics(epath.Path(tmp_path), 3)
    assert (tmp_path / METRICS_FILE).read_bytes() == content


def test_rows_edited_by_hand_are_read(tmp_path: Path):
    (tmp_path / METRICS_FILE).write_text('{"step": 1, "loss": 3}\n\n{"loss": 2.5, "step": 2}')
    assert read_metrics(epath.Path(tmp_path)) == [{"step": 1, "loss": 3}, {"step": 2, "loss": 2.5}]


def test_json_that_is_printed_has_no_nan():
    assert json.loads(finite_json({"a": float("nan"), "b": [float("inf"), 1.5]})) == {"a": None, "b": [None, 1.5]}


def test_each_mean_has_a_count_of_its_own():
    means = RunningMeans()
    for values in ({"loss": 1.0, "nsp_loss": 0.5}, {"loss": 2.0}, {"loss": 6.0}):
        means.add({**values, "nonfinite_streak": 0})
    assert means.take().items() >= {"loss": 3.0, "nsp_loss": 0.5, "steps_averaged": 3}.items()


REMOTE = epath.Path("gs://bucket/run")


def remote_steps() -> list[int]:
    return [row["step"] for row in read_metrics(REMOTE)]


def test_a_store_gets_one_object_periodically_and_on_flush(store, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now[0]))
    writer = open_metrics(REMOTE, 0)
    writer.log(1, {"loss": 1.0})
    assert remote_steps() == []
    now[0] = metrics.UPLOAD_SECONDS
    writer.log(2, {"loss": 0.5})
    assert remote_steps() == [1, 2]
    writer.log(3, {"loss": 0.25})
    assert remote_steps() == [1, 2]
    writer.flush()
    assert remote_steps() == [1, 2, 3]
    writer.log(4, {"loss": 0.2})
    writer.close()
    assert remote_steps() == [1, 2, 3, 4]
    assert store.names("run/") == ["run/metrics.jsonl"]
    open_metrics(REMOTE, 2)
    assert remote_steps() == [1, 2]
    open_metrics(REMOTE, 0)
    assert remote_steps() == []


def test_a_workdir_copied_from_a_store_keeps_its_rows(store, tmp_path: Path):
    with closing(open_metrics(epath.Path(tmp_path), 0).trackers[0]) as writer:
        writer.log({"step": 1, "loss": 1.0, "time": 1.0})
    store.put("run/metrics.jsonl", (tmp_path / METRICS_FILE).read_bytes())
    assert read_metrics(REMOTE) == read_metrics(epath.Path(tmp_path))


def test_tensorboard_reads_the_event_files_of_a_store(store, tmp_path: Path):
    for start in (0, 2):
        with closing(TensorBoard(REMOTE, start)) as tracker:
            for step in (start + 1, start + 2, start + 3):
                tracker.log({"step": step, "loss": 1.0 / step, "time": 1.0})
                tracker.flush()
    names = store.names("run/tensorboard/")
    assert len(names) == 2
    for name in names:
        (tmp_path / name.rpartition("/")[2]).write_bytes(store.read(name))
    viewer = EventAccumulator(str(tmp_path))
    viewer.Reload()
    assert [event.step for event in viewer.Scalars("train/loss")] == [1, 2, 3, 4, 5]


# --- Trackers ----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("resumed", "kept"), [(0, []), (4, [0, 4])])
def test_tensorboard_drops_what_the_start_before_wrote_after_the_checkpoint(
    tmp_path: Path, resumed: int, kept: list[int]
):
    for start, loss in ((0, 1.0), (resumed, 2.0)):
        with closing(TensorBoard(epath.Path(tmp_path), start)) as tracker:
            for step in (0, 4, 8):
                if start == 0 or step > start:
                    tracker.log({"step": step, "split": "eval", "loss": loss, "time": 1.0})
    found = [(event.step, event.value) for event in events_of(tmp_path).Scalars("eval/loss")]
    assert found == [(step, 1.0 if step in kept else 2.0) for step in (0, 4, 8)]


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
    assert [row["step"] for row in helpers.rows(tmp_path)] == [1, 2, 3]
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
    rows = [row for row in helpers.rows(logged[0]) if row.get("split") != SAMPLES]
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
    rows = [row for row in helpers.rows(logged[0]) if row.get("split") == SAMPLES]
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
    assert json.loads(finite_json(recorder.calls["rows"])) == helpers.rows(workdir)
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
