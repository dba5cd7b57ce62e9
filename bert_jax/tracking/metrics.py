"""Metrics of a run: `metrics.jsonl`, one JSON object a row.

The row of a pre-training evaluation says what it measured: `split`, `data` (hashes of the datasets) and `sequences`
(evaluated, the first ones of the split). Scores compare only where these are equal.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.tracking.tracker import Sample, Tracker

METRICS_FILE = "metrics.jsonl"
SAMPLES = "samples"
"""The `split` of rows that hold text samples and no metrics."""
OLD = "old_"
"""Prefix of scores on the dataset in `eval_old_data`; other scores are those of `data.path`."""
UPLOAD_SECONDS = 30.0
"""Seconds between uploads of a growing file to an object store."""


class GrowingFile:
    """A file that is written row by row: each `write` is in the file, whatever ends the process.

    An object store cannot append. There the file is kept in memory and uploaded whole at `flush`, and by a `write` at
    least `UPLOAD_SECONDS` after the last upload: a kill loses no more than that.
    """

    def __init__(self, path: epath.Path, content: bytes = b""):
        """Replaces the file at `path` by `content`."""
        self._path, self._content, self._uploaded = path, bytearray(content), time.monotonic()
        atomic.write_whole(path, content)
        self._file = None if remote.is_remote(path) else path.open("ab")

    def write(self, content: bytes) -> None:
        """Appends `content`."""
        if self._file:
            with remote.store_errors(self._path):
                self._file.write(content)
                self._file.flush()
            return
        self._content += content
        if time.monotonic() - self._uploaded >= UPLOAD_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Uploads what an object store lacks."""
        if not self._file:
            atomic.write_whole(self._path, bytes(self._content))
            self._uploaded = time.monotonic()

    def close(self) -> None:
        """Flushes and closes the file."""
        self.flush()
        if self._file:
            self._file.close()


class MetricsFile(Tracker):
    """Appends rows to `metrics.jsonl`.

    Drops rows after `resume_step` first: a resumed run writes them again, and the result is that of an uninterrupted
    run.
    """

    def __init__(self, workdir: epath.Path, resume_step: int):
        # A run that starts anew also drops the evaluation at step 0 of one that was killed before its first checkpoint.
        kept = [_line(row) for row in read_metrics(workdir) if row["step"] <= resume_step and resume_step]
        self._file = GrowingFile(workdir / METRICS_FILE, b"".join(kept))

    def log_scalars(self, step: int, values: Mapping[str, Any], *, split: str | None, time: float) -> None:
        row = {"step": step, **({"split": split} if split else {}), **values, "time": round(time, 3)}
        self._file.write(_line(row))

    def log_samples(self, step: int, samples: Sequence[Sample], *, time: float) -> None:
        self._file.write(_line({"step": step, "split": SAMPLES, "samples": list(samples), "time": round(time, 3)}))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _line(row: Mapping[str, Any]) -> bytes:
    return finite_json(row).encode() + b"\n"


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
    """Returns all rows of a workdir; [] without any. An unterminated last line, which a kill has cut off, is skipped.

    Raises InputError for any other line that is not a row, with its number.
    """
    path = workdir / METRICS_FILE
    *lines, last = (atomic.read_whole(path) if remote.exists(path) else b"").split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if row := _row(line):
            rows.append(row)
        elif line.strip():
            raise InputError(
                f"{path}:{number}: expected a JSON object with a step, got {line[:60]!r}; delete this line"
            )
    return rows + ([row] if (row := _row(last)) else [])


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: nested too deep
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
