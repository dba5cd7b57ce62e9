"""Metrics of a run: `metrics.jsonl`, one JSON object per line, and TensorBoard events.

In a remote workdir, which does not support append, both are in part files: see `object_store_log.py`.
"""

import json
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from etils import epath

from bert_jax.files import atomic, remote
from bert_jax.tracking.object_store_log import PartEvents, PartRows, read_parts
from bert_jax.tracking.tensorboard import Event, EventFile, SessionLog, event_file_name, scalar

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
DAMAGED_FILE = "metrics.jsonl.damaged"
METRICS_FOLDER = "metrics"
TENSORBOARD_FOLDER = "tensorboard"


class MetricsWriter:
    """Appends rows to `metrics.jsonl`, or to part files, and to TensorBoard.

    Drops rows after `resume_step` first: a resumed run writes them again, and the result is that of an uninterrupted
    run. Damaged lines are kept in `metrics.jsonl.damaged`.
    """

    def __init__(self, workdir: epath.Path, resume_step: int):
        rows, damaged = _read(workdir)
        if damaged:
            _keep_damaged(workdir / DAMAGED_FILE, damaged)
        kept = "".join(_line(row) for row in rows if row["step"] <= resume_step)
        self._rows: _LocalRows | PartRows
        self._events: EventFile | PartEvents
        if remote.is_remote(workdir):
            self._rows = PartRows(workdir / METRICS_FOLDER, kept)
            self._events = PartEvents(workdir / TENSORBOARD_FOLDER)
        else:
            self._rows = _LocalRows(workdir / METRICS_FILE, kept)
            (workdir / TENSORBOARD_FOLDER).mkdir(exist_ok=True)
            self._events = EventFile(workdir / TENSORBOARD_FOLDER / event_file_name())
        purge = SessionLog(status=SessionLog.START)  # TensorBoard drops its events from this step on
        self._events.write_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=purge))

    def write(self, step: int, values: Mapping[str, Any], split: str | None = None) -> None:
        """Writes one row. `split` is "eval" for evaluations and None for training."""
        row = {"step": step, **({"split": split} if split else {}), **values}
        self._rows.write(_line(row))
        for name, value in values.items():
            if value is None or not math.isfinite(value):
                continue  # TensorBoard does not support it
            summary = scalar(f"{split or 'train'}/{name}", value)
            self._events.write_event(Event(wall_time=time.time(), step=step, summary=summary))
        if isinstance(self._events, EventFile):
            self._events.flush()

    def flush(self) -> None:
        """Writes every row to where it survives a kill."""
        self._rows.flush()
        self._events.flush()

    def close(self) -> None:
        """Flushes and closes rows and events."""
        try:
            self._rows.close()
        finally:
            self._events.close()


class _LocalRows:
    """JSON lines in a file, flushed to the system by each `write`."""

    def __init__(self, path: epath.Path, kept: str):
        """Replaces the file at `path` by the lines `kept`, and opens it for append."""
        atomic.write_whole(path, kept.encode())
        self._file = path.open("a")

    def write(self, line: str) -> None:
        """Appends a line."""
        self._file.write(line)
        self.flush()

    def flush(self) -> None:
        """Flushes the buffer to the system."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class NoWriter:
    """Writer that does nothing, for processes other than process 0."""

    def flush(self) -> None:
        """Does nothing."""

    def write(self, step: int, values: Mapping[str, Any], split: str | None = None) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def _line(row: Mapping[str, Any]) -> str:
    return finite_json(row) + "\n"


def finite_json(value: Any, **options: Any) -> str:
    """Returns JSON with null for NaN and infinity, which JSON lacks. `options` go to `json.dumps`."""

    def finite(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: finite(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [finite(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value), allow_nan=False, **options)


def read_metrics(workdir: epath.Path) -> list[dict[str, Any]]:
    """Returns all rows of a workdir. Damaged lines are skipped with a warning.

    An unterminated last line that is not a row is skipped silently: a kill has cut it off. For a workdir that was
    copied from a disk to a store or back, the rows are those written at its current place, if any.
    """
    return _read(workdir)[0]


def _read(workdir: epath.Path) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Returns the rows and the damaged lines, and logs the latter."""
    sources = (_parts, _file) if remote.is_remote(workdir) else (_file, _parts)
    for read in sources:
        path, content = read(workdir)
        rows, damaged = _parse(content)
        if damaged:
            log.warning(
                "Metrics in %s: %d of %d lines are damaged and skipped", path, len(damaged), len(rows) + len(damaged)
            )
        if rows or damaged:
            return rows, damaged
    return [], []


def _file(workdir: epath.Path) -> tuple[epath.Path, bytes]:
    path = workdir / METRICS_FILE
    return path, atomic.read_whole(path) if remote.exists(path) else b""


def _parts(workdir: epath.Path) -> tuple[epath.Path, bytes]:
    folder = workdir / METRICS_FOLDER
    return folder, b"".join(read_parts(folder))


def _parse(content: bytes) -> tuple[list[dict[str, Any]], list[bytes]]:
    rows: list[dict[str, Any]] = []
    damaged = []
    *lines, last = content.split(b"\n")
    for line in lines:
        row = _row(line)
        if row is None:
            damaged.append(line)
        else:
            rows.append(row)
    if (row := _row(last)) is not None:
        rows.append(row)
    return rows, damaged


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: nested too deep
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _keep_damaged(path: epath.Path, lines: list[bytes]) -> None:
    before = atomic.read_whole(path) if remote.exists(path) else b""
    atomic.write_whole(path, before + b"".join(line + b"\n" for line in lines))
    log.warning("Damaged lines of metrics are kept in %s", path)
