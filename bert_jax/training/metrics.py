"""Where a run's numbers go: `metrics.jsonl`, one object a line, and TensorBoard events beside it.

In a remote workdir, where nothing can be appended to, both are in parts: see `part_files.py`.
"""

import json
import math
import time
from collections.abc import Mapping
from typing import Any

from etils import epath

from bert_jax import remote, whole_files
from bert_jax.training.event_file import Event, EventFile, SessionLog, event_file_name, scalar
from bert_jax.training.part_files import PartEvents, PartRows, read_parts

METRICS_FILE = "metrics.jsonl"
METRICS_FOLDER = "metrics"
TENSORBOARD_FOLDER = "tensorboard"


class MetricsWriter:
    """Appends rows to `metrics.jsonl`, or to parts, and TensorBoard.

    Rows past `resume_step` are dropped first: a run that goes on from a checkpoint writes them again, and all end up as
    those of a run never stopped.
    """

    def __init__(self, workdir: epath.Path, resume_step: int):
        kept = "".join(_line(row) for row in read_metrics(workdir) if row["step"] <= resume_step)
        self._rows: _LocalRows | PartRows
        self._events: EventFile | PartEvents
        if remote.is_remote(workdir):
            self._rows = PartRows(workdir / METRICS_FOLDER, kept)
            self._events = PartEvents(workdir / TENSORBOARD_FOLDER)
        else:
            self._rows = _LocalRows(workdir / METRICS_FILE, kept)
            (workdir / TENSORBOARD_FOLDER).mkdir(exist_ok=True)
            self._events = EventFile(workdir / TENSORBOARD_FOLDER / event_file_name())
        purge = SessionLog(status=SessionLog.START)  # the viewer drops what it has from this step on
        self._events.write_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=purge))

    def write(self, step: int, values: Mapping[str, Any], split: str | None = None) -> None:
        """One row. `split` is "eval" for evaluations; training rows carry none."""
        row = {"step": step, **({"split": split} if split else {}), **values}
        self._rows.write(_line(row))
        for name, value in values.items():
            if value is None or not math.isfinite(value):
                continue  # TensorBoard has no place for it
            summary = scalar(f"{split or 'train'}/{name}", value)
            self._events.write_event(Event(wall_time=time.time(), step=step, summary=summary))
        if isinstance(self._events, EventFile):
            self._events.flush()

    def flush(self) -> None:
        """Returns when every row is where a kill does not reach it."""
        self._rows.flush()
        self._events.flush()

    def close(self) -> None:
        """Flushes and closes both."""
        try:
            self._rows.close()
        finally:
            self._events.close()


class _LocalRows:
    """Lines of JSON in a file, each on disk when `write` returns."""

    def __init__(self, path: epath.Path, kept: str):
        """What there is at `path` is replaced by the lines `kept`."""
        whole_files.write_whole(path, kept.encode())
        self._file = path.open("a")

    def write(self, line: str) -> None:
        """Appends a line."""
        self._file.write(line)
        self.flush()

    def flush(self) -> None:
        """Hands what is buffered to the system."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class NoWriter:
    """In the place of a `MetricsWriter`, in processes that are not the first."""

    def flush(self) -> None:
        """Nothing."""

    def write(self, step: int, values: Mapping[str, Any], split: str | None = None) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def _line(row: Mapping[str, Any]) -> str:
    # JSON has no NaN: a loss that is not finite is null.
    finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
    return json.dumps(finite) + "\n"


def read_metrics(workdir: epath.Path) -> list[dict[str, Any]]:
    """All rows of a workdir, up to the first line that is not one: a kill may have cut off the last.

    Of a workdir that was copied from a disk to a store or back, the rows that were written where it is now, if any.
    """
    sources = (_rows_of_parts, _rows_of_file) if remote.is_remote(workdir) else (_rows_of_file, _rows_of_parts)
    return sources[0](workdir) or sources[1](workdir)


def _rows_of_file(workdir: epath.Path) -> list[dict[str, Any]]:
    path = workdir / METRICS_FILE
    return _parse(whole_files.read_whole(path)) if remote.exists(path) else []


def _rows_of_parts(workdir: epath.Path) -> list[dict[str, Any]]:
    return _parse(b"".join(read_parts(workdir / METRICS_FOLDER)))


def _parse(content: bytes) -> list[dict[str, Any]]:
    rows = []
    for line in content.decode("utf-8", "replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            break
        rows.append(row)
    return rows
