import json
import logging
from pathlib import Path

import pytest
from etils import epath
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bert_jax.tracking.metrics import METRICS_FILE, MetricsWriter, finite_json, read_metrics


def test_resume_drops_metrics_after_checkpoint(tmp_path):
    folder = epath.Path(tmp_path)
    writer = MetricsWriter(folder, resume_step=0)
    for step in range(1, 6):
        writer.write(step, {"loss": 1.0 / step})
    writer.write(4, {"loss": 0.5}, split="eval")
    writer.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 6, "lo')  # cut off by a kill
    writer = MetricsWriter(folder, resume_step=4)
    writer.write(5, {"loss": 7.0})
    writer.close()
    rows = read_metrics(folder)
    assert [(row["step"], row.get("split")) for row in rows] == [
        (1, None), (2, None), (3, None), (4, None), (4, "eval"), (5, None),
    ]  # fmt: skip
    assert rows[-1]["loss"] == 7.0


def test_nonfinite_values_are_null_and_every_line_is_json(tmp_path):
    writer = MetricsWriter(epath.Path(tmp_path), resume_step=0)
    writer.write(1, {"loss": float("nan"), "grad_norm": float("inf"), "nonfinite_steps": 1})
    writer.close()
    text = (tmp_path / METRICS_FILE).read_text()
    assert json.loads(text, parse_constant=lambda name: 1 / 0) == {
        "step": 1, "loss": None, "grad_norm": None, "nonfinite_steps": 1,
    }  # fmt: skip


def test_tensorboard_gets_the_same_numbers(tmp_path):
    writer = MetricsWriter(epath.Path(tmp_path), resume_step=0)
    writer.write(3, {"loss": 2.5})
    writer.write(3, {"loss": 2.0}, split="eval")
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(3, 2.5)]
    assert [(event.step, event.value) for event in events.Scalars("eval/loss")] == [(3, 2.0)]


def damaged_lines() -> list[bytes]:
    """A flipped bit, no UTF-8, a line that is nested too deep to parse, one that is no row, and an empty one."""
    flipped = bytes([b"{"[0] ^ 1]) + b'"step": 2, "loss": 0.5}'
    return [flipped, b'{"step": 3, "los\xf3": 1}', b"[" * 100_000, b"[1]", b""]


@pytest.mark.parametrize("damaged", damaged_lines(), ids=["flipped", "utf8", "nested", "list", "empty"])
def test_resume_keeps_the_rows_after_a_damaged_line(damaged: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    lines = [b'{"step": 1, "loss": 1.0}', damaged, b'{"step": 3, "loss": 0.3}', b'{"step": 4, "loss": 0.2}']
    (tmp_path / METRICS_FILE).write_bytes(b"\n".join(lines) + b'\n{"step": 5, "lo')
    folder = epath.Path(tmp_path)
    assert [row["step"] for row in read_metrics(folder)] == [1, 3, 4]
    for _ in range(2):
        MetricsWriter(folder, resume_step=3).close()
        assert [row["step"] for row in read_metrics(folder)] == [1, 3]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == damaged + b"\n"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("metrics.jsonl.damaged" in line for line in warnings)


def test_json_that_is_printed_has_no_nan():
    assert json.loads(finite_json({"a": float("nan"), "b": [float("inf"), 1.5]})) == {"a": None, "b": [None, 1.5]}
