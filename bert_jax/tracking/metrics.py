"""Metrics of a run: `metrics.jsonl`, one JSON object a row.

The row of a pre-training evaluation says what it measured: `split`, `data` (hashes of the datasets) and `sequences`
(evaluated, the first ones of the split). Scores compare only where these are equal.
"""

import json
import time
from collections.abc import Mapping
from typing import Any

from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote

METRICS_FILE = "metrics.jsonl"
SAMPLES = "samples"
"""The `split` of rows that hold text samples and no metrics."""
LAST_VALUE = ("learning_rate", "nonfinite_steps", "nonfinite_streak")
"""Metrics that are logged as their last value; all others are logged as means."""
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


def finite_json(value: Any, **options: Any) -> str:
    """Returns JSON with null for NaN and infinity, which JSON lacks, and of objects their attributes.

    `options` go to `json.dumps`.
    """
    return json.dumps(json.loads(json.dumps(value, default=vars), parse_constant=lambda name: None), **options)


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


class RunningMeans:
    """Accumulates the metrics of steps until a row is logged.

    Each mean has a count of its own, and skips a step whose loss or gradient is not finite. `sums` has the sum and
    count of each metric since the last row. It is saved with a checkpoint, so that the first row of a resumed run is
    that of an uninterrupted run.
    """

    def __init__(self, sums: Mapping[str, list[float]] | None = None):
        self.sums = {name: list(pair) for name, pair in (sums or {}).items()}
        self._last: dict[str, float] = {}

    def add(self, values: Mapping[str, float]) -> None:
        """Adds the metrics of one step, which include `nonfinite_streak`."""
        self._last = dict(values)
        for name, value in values.items():
            if name not in LAST_VALUE and not values["nonfinite_streak"]:
                total, count = self.sums.get(name, (0.0, 0))
                self.sums[name] = [total + value, count + 1]

    def take(self) -> dict[str, float]:
        """Returns the metrics of a row and resets the sums.

        `steps_averaged` is the number of steps in the means. If all were skipped it is 0, and the values are those of
        the last step.
        """
        means = {name: total / count for name, (total, count) in self.sums.items()}
        row = {**self._last, **means, "steps_averaged": int(self.sums.get("loss", (0, 0))[1])}
        self.sums = {}
        return row
