import json
import logging
import time
from pathlib import Path

import pytest
from etils import epath

from bert_jax.tracking.metrics import METRICS_FILE, MetricsFile, finite_json, read_metrics
from bert_jax.tracking.tracker import Trackers


def open_metrics(workdir: epath.Path, resume_step: int) -> Trackers:
    return Trackers([MetricsFile(workdir, resume_step)])


def test_resume_drops_metrics_after_checkpoint(tmp_path):
    folder = epath.Path(tmp_path)
    writer = open_metrics(folder, 0)
    for step in range(1, 6):
        writer.log_scalars(step, {"loss": 1.0 / step})
    writer.log_scalars(4, {"loss": 0.5}, "eval")
    writer.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 6, "lo')  # cut off by a kill
    writer = open_metrics(folder, 4)
    writer.log_scalars(5, {"loss": 7.0})
    writer.close()
    rows = read_metrics(folder)
    assert [(row["step"], row.get("split")) for row in rows] == [
        (1, None), (2, None), (3, None), (4, None), (4, "eval"), (5, None),
    ]  # fmt: skip
    assert rows[-1]["loss"] == 7.0


def test_nonfinite_values_are_null_and_every_line_is_json(tmp_path):
    writer = open_metrics(epath.Path(tmp_path), 0)
    writer.log_scalars(1, {"loss": float("nan"), "grad_norm": float("inf"), "nonfinite_steps": 1})
    writer.close()
    text = (tmp_path / METRICS_FILE).read_text()
    row = json.loads(text, parse_constant=lambda name: 1 / 0)
    assert time.time() - row.pop("time") < 60
    assert len(row.pop("checksum")) == 16
    assert row == {"step": 1, "loss": None, "grad_norm": None, "nonfinite_steps": 1}


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
        open_metrics(folder, 3).close()
        assert [row["step"] for row in read_metrics(folder)] == [1, 3]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == damaged + b"\n"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("metrics.jsonl.damaged" in line for line in warnings)


def test_json_that_is_printed_has_no_nan():
    assert json.loads(finite_json({"a": float("nan"), "b": [float("inf"), 1.5]})) == {"a": None, "b": [None, 1.5]}
