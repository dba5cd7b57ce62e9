"""Where a run's numbers go: `metrics.jsonl`, one object a line, and TensorBoard events beside it."""

import json
import math
import time
from collections.abc import Mapping
from typing import Any

from etils import epath
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends rows to `metrics.jsonl` and TensorBoard.

    Rows past `resume_step` are dropped first: a run that goes on from a checkpoint writes them again, and the file ends
    up as that of a run never stopped.
    """

    def __init__(self, workdir: epath.Path, resume_step: int):
        path = workdir / METRICS_FILE
        kept = [row for row in read_metrics(workdir) if row["step"] <= resume_step]
        partial = workdir / (METRICS_FILE + ".partial")
        partial.write_text("".join(_line(row) for row in kept))
        partial.replace(path)
        self._file = path.open("a")
        # Written here and now: the library's SummaryWriter has a thread for it, and waits for ever once that has died
        # of a full disk.
        (workdir / "tensorboard").mkdir(exist_ok=True)
        self._events = EventsWriter(str(workdir / "tensorboard" / "events"))
        purge = SessionLog(status=SessionLog.START)  # the viewer drops what it has from this step on
        self._events.write_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=purge))

    def write(self, step: int, values: Mapping[str, Any], split: str | None = None) -> None:
        """One row. `split` is "eval" for evaluations; training rows carry none."""
        row = {"step": step, **({"split": split} if split else {}), **values}
        self._file.write(_line(row))
        self._file.flush()
        for name, value in values.items():
            if value is None or not math.isfinite(value):
                continue  # TensorBoard has no place for it
            summary = scalar(f"{split or 'train'}/{name}", value)
            self._events.write_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._events.flush()

    def close(self) -> None:
        """Flushes and closes both."""
        self._file.close()
        self._events.close()


class NoWriter:
    """In the place of a `MetricsWriter`, in processes that are not the first."""

    def write(self, step: int, values: Mapping[str, Any], split: str | None = None) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def _line(row: Mapping[str, Any]) -> str:
    # JSON has no NaN: a loss that is not finite is null.
    finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
    return json.dumps(finite) + "\n"


def read_metrics(workdir: epath.Path) -> list[dict[str, Any]]:
    """All rows of a workdir, up to the first line that is not one: a kill may have cut off the last."""
    path = workdir / METRICS_FILE
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().decode("utf-8", "replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            break
        rows.append(row)
    return rows
