import json
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from etils import epath
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bert_jax.errors import InputError
from bert_jax.tracking import metrics
from bert_jax.tracking.metrics import METRICS_FILE, RunningMeans, finite_json, read_metrics
from bert_jax.tracking.trackers import MetricsFile, TensorBoard, Trackers


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
