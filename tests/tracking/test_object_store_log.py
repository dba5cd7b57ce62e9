"""Logs in an object store, which does not support append."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from etils import epath
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bert_jax.files import atomic
from bert_jax.tracking import object_store_log
from bert_jax.tracking.metrics import MetricsFile, read_metrics
from bert_jax.tracking.tensorboard_tracker import TensorBoard
from bert_jax.tracking.tracker import Trackers

WORKDIR = epath.Path("gs://bucket/run")


def steps() -> list[int]:
    return [row["step"] for row in read_metrics(WORKDIR)]


def open_trackers(workdir: epath.Path, resume_step: int) -> Trackers:
    return Trackers([MetricsFile(workdir, resume_step), TensorBoard(workdir, resume_step)])


def write(writer: Trackers, *numbers: int, flush: bool = True) -> None:
    for number in numbers:
        writer.log_scalars(number, {"loss": 1.0 / number})
        if flush:
            writer.flush()


@pytest.fixture
def few(monkeypatch) -> None:
    monkeypatch.setattr(object_store_log, "MERGED", 4)


def test_rows_are_written_periodically_and_on_flush(store, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(object_store_log, "time", SimpleNamespace(monotonic=lambda: now[0], time_ns=time.time_ns))
    writer = open_trackers(WORKDIR, 0)
    write(writer, 1, 2, flush=False)
    assert steps() == []
    now[0] = object_store_log.ROWS_SECONDS
    write(writer, 3, flush=False)
    assert steps() == [1, 2, 3]
    write(writer, 4, flush=False)
    writer.flush()
    assert steps() == [1, 2, 3, 4]
    write(writer, 5, flush=False)
    writer.close()
    assert read_metrics(WORKDIR)[-1].items() >= {"step": 5, "loss": 0.2}.items()
    assert len(store.names("run/metrics/")) == 3


def test_parts_are_merged_and_no_row_is_put_more_than_twice(few, store):
    writer = open_trackers(WORKDIR, 0)
    for number in range(1, 19):
        write(writer, number)
        assert steps() == list(range(1, number + 1))
    assert len(store.names("run/metrics/")) == 4 + 2
    assert store.count("POST", "metrics") == 18 + 4


def test_kill_between_merge_and_deletion_duplicates_no_row(few, store, monkeypatch):
    writer = open_trackers(WORKDIR, 0)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(object_store_log.PartRows, "_delete", killed)
        with pytest.raises(KeyboardInterrupt):
            write(writer, *range(1, 9))
    assert len(store.names("run/metrics/")) == 5
    assert steps() == [1, 2, 3, 4]
    with monkeypatch.context() as patch:  # and once more in the start of the run that goes on
        patch.setattr(object_store_log.PartRows, "_delete", killed)
        with pytest.raises(KeyboardInterrupt):
            open_trackers(WORKDIR, 3)
    assert steps() == [1, 2, 3]
    writer = open_trackers(WORKDIR, 3)
    write(writer, 4, 5)
    assert steps() == [1, 2, 3, 4, 5]
    assert len(store.names("run/metrics/")) == 3


def test_resume_drops_metrics_after_checkpoint(store):
    writer = open_trackers(WORKDIR, 0)
    write(writer, 1, 2, 3, flush=False)
    writer.close()
    writer = open_trackers(WORKDIR, 2)
    assert steps() == [1, 2]
    write(writer, 3, 4)
    assert steps() == [1, 2, 3, 4]
    open_trackers(WORKDIR, 0)
    assert steps() == []


def test_resume_keeps_the_rows_after_a_damaged_line_in_a_part(store):
    writer = open_trackers(WORKDIR, 0)
    write(writer, 1, 2, 3)
    name = store.names("run/metrics/")[1]
    store.put(name, b"\x00" + store.read(name)[1:])
    assert steps() == [1, 3]
    open_trackers(WORKDIR, 3)
    assert steps() == [1, 3]
    assert store.read("run/metrics.jsonl.damaged").startswith(b"\x00")


def test_part_deleted_during_a_read_is_found_in_its_merged_part(few, store, monkeypatch):
    writer = open_trackers(WORKDIR, 0)
    write(writer, 1, 2, 3)
    real, calls = atomic.read_whole, []

    def reading(path):
        if not calls:
            calls.append(path)
            write(writer, 4)  # which merges
        return real(path)

    monkeypatch.setattr(object_store_log.atomic, "read_whole", reading)
    assert steps() == [1, 2, 3, 4]


def test_copied_workdir_keeps_its_rows(store, tmp_path: Path):
    local = epath.Path(tmp_path)
    writer = open_trackers(local, 0)
    write(writer, 1, 2)
    writer.close()
    store.put("run/metrics.jsonl", (tmp_path / "metrics.jsonl").read_bytes())
    assert steps() == [1, 2]
    write(open_trackers(WORKDIR, 1), 2, 3)
    assert steps() == [1, 2, 3]
    (tmp_path / "back" / "metrics").mkdir(parents=True)
    for name in store.names("run/metrics/"):
        (tmp_path / "back" / name.removeprefix("run/")).write_bytes(store.read(name))
    back = epath.Path(tmp_path / "back")
    assert [row["step"] for row in read_metrics(back)] == [1, 2, 3]
    open_trackers(back, 2).close()
    lines = (tmp_path / "back" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_events_are_put_in_files_that_the_viewer_reads(store, tmp_path: Path):
    writer = open_trackers(WORKDIR, 0)
    write(writer, 1, 2)
    write(writer, 3, flush=False)
    writer.close()
    writer = open_trackers(WORKDIR, 2)
    write(writer, 3, 4)
    writer.close()
    names = store.names("run/tensorboard/")
    assert len(names) == 5
    for name in names:
        (tmp_path / name.rpartition("/")[2]).write_bytes(store.read(name))
    viewer = EventAccumulator(str(tmp_path))
    viewer.Reload()
    assert [event.step for event in viewer.Scalars("train/loss")] == [1, 2, 3, 4]
