"""Metrics of a run: `metrics.jsonl`, one JSON object per line, each with a checksum.

In a remote workdir, which does not support append, they are in part files: see `object_store_log.py`.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from bert_jax.files import atomic, json_checksums, remote
from bert_jax.tracking.object_store_log import PartRows, read_parts
from bert_jax.tracking.tracker import Sample, Tracker

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
DAMAGED_FILE = "metrics.jsonl.damaged"
METRICS_FOLDER = "metrics"
SAMPLES = "samples"
"""The `split` of rows that hold text samples and no metrics."""


class MetricsFile(Tracker):
    """Appends rows to `metrics.jsonl`, or to part files.

    Drops rows after `resume_step` first: a resumed run writes them again, and the result is that of an uninterrupted
    run. Damaged lines are kept in `metrics.jsonl.damaged`.
    """

    def __init__(self, workdir: epath.Path, resume_step: int):
        rows, damaged = _read(workdir)
        if damaged:
            _keep_damaged(workdir / DAMAGED_FILE, damaged)
        # A run that starts anew also drops the evaluation at step 0 of one that was killed before its first checkpoint.
        kept = "".join(_line(row) for row in rows if row["step"] <= resume_step and resume_step)
        self._rows: _LocalRows | PartRows
        if remote.is_remote(workdir):
            self._rows = PartRows(workdir / METRICS_FOLDER, kept)
        else:
            self._rows = _LocalRows(workdir / METRICS_FILE, kept)

    def log_scalars(self, step: int, values: Mapping[str, Any], *, split: str | None, time: float) -> None:
        self._rows.write(_line({"step": step, **({"split": split} if split else {}), **values, "time": round(time, 3)}))

    def log_samples(self, step: int, samples: Sequence[Sample], *, time: float) -> None:
        self._rows.write(_line({"step": step, "split": SAMPLES, "samples": list(samples), "time": round(time, 3)}))

    def flush(self) -> None:
        self._rows.flush()

    def close(self) -> None:
        self._rows.close()


class _LocalRows:
    """JSON lines in a file, flushed to the system by each `write`."""

    def __init__(self, path: epath.Path, kept: str):
        """Replaces the file at `path` by the lines `kept`, and opens it for append."""
        atomic.write_whole(path, kept.encode())
        self._path = path
        self._file = path.open("a")

    def write(self, line: str) -> None:
        """Appends a line."""
        with atomic.named_errors(self._path):
            self._file.write(line)
            self.flush()

    def flush(self) -> None:
        """Flushes the buffer to the system."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(json_checksums.with_checksum(_finite(row)), allow_nan=False) + "\n"


def finite_json(value: Any, **options: Any) -> str:
    """Returns JSON with null for NaN and infinity, which JSON lacks. `options` go to `json.dumps`."""
    return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
    elif _is_whole(last):
        damaged.append(last)
    return rows, damaged


def _is_whole(line: bytes) -> bool:
    """Returns whether a line has the end of its object: it was damaged, and not cut off."""
    try:
        json.JSONDecoder().raw_decode(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return b'"' + json_checksums.KEY.encode() + b'"' in line and b"}" in line
    return True


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: nested too deep
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int) or not json_checksums.is_intact(row):
        return None
    return {name: value for name, value in row.items() if name != json_checksums.KEY}


def _keep_damaged(path: epath.Path, lines: list[bytes]) -> None:
    before = atomic.read_whole(path) if remote.exists(path) else b""
    atomic.write_whole(path, before + b"".join(line + b"\n" for line in lines))
    log.warning("Damaged lines of metrics are kept in %s", path)
