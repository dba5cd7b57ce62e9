"""Cases of one part of the GPU benchmark: each is measured once for the same code, device and jax.

A row is recorded as soon as it is measured. It has `case`, `outcome` and the numbers of a measured case. A part that is
stopped continues with the first case that has no final outcome.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from record import Record
from sides import UnsupportedError

MEASURED, OUT_OF_MEMORY, REFUSED, RUNNING = "measured", "out of memory", "not supported", "running"
CRASHED, INTERRUPTED = "crashed", "interrupted at the deadline"
FINAL = (MEASURED, OUT_OF_MEMORY, REFUSED, CRASHED)
"""Outcomes that a rerun would repeat."""
OUT_OF_TIME = 75
"""Exit status of a part that stopped at the deadline; a rerun continues it."""
TABLE = "cases"


class OutOfTimeError(Exception):
    """Raised by, or before, a case that has no time left before the deadline."""


def is_same(row: Mapping[str, Any], key: Mapping[str, Any]) -> bool:
    """Returns whether a row was measured with the code, device and jax of `key`."""
    return all(row.get(name) == value for name, value in key.items())


class Cases:
    """Rows of a part's table, in the order of the cases."""

    def __init__(self, record: Record, columns: Mapping[str, str], key: Mapping[str, Any], deadline: float):
        """Reads the earlier rows of `key`; `deadline` is the Unix time after which no case starts."""
        self._record, self._columns, self._deadline = record, dict(columns), deadline
        self._key = dict(key)
        self._stamp = {"date": record.stamp["date"], "commit": record.stamp["commit"], **self._key}
        self._rows = {row["case"]: row for row in record.earlier(TABLE) if is_same(row, key)}

    def measure(self, case: str, work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the row of a case: the earlier one if its outcome is final, else that of `work`.

        An exception of `work` is an outcome. Raises OutOfTimeError after the deadline.
        """
        earlier = self._rows.get(case, {})
        if earlier.get("outcome") in FINAL:
            return earlier
        if time.time() >= self._deadline:
            raise OutOfTimeError(case)
        self._set(case, {"outcome": RUNNING})  # what remains if the process dies
        began = time.monotonic()
        try:
            row = {"outcome": MEASURED, **work()}
        except OutOfTimeError:
            self._set(case, {"outcome": INTERRUPTED})
            raise
        except Exception as error:
            row = {"outcome": outcome_of(error)}
        row["case_seconds"] = round(time.monotonic() - began, 1)
        self._set(case, row)
        shown = ", ".join(f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float))
        print(f"  {case}: {row['outcome']}; {shown}", flush=True)
        return self._rows[case]

    def _set(self, case: str, row: Mapping[str, Any]) -> None:
        self._rows[case] = {"case": case, **row, **self._stamp}
        self._record.set_table(TABLE, self._columns, self._rows.values())


def outcome_of(error: Exception) -> str:
    """Returns the outcome of a case that raised, in one line without paths."""
    text = f"{type(error).__name__}: {error}"
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return OUT_OF_MEMORY
    if isinstance(error, UnsupportedError):
        return REFUSED
    return "failed: " + re.sub(r"\S*/\S*/\S*", "...", text.strip().split("\n")[0])[:160]


def end_running(path: Path, outcome: str) -> str | None:
    """Gives the case that a dead process was running an outcome, and returns its name; None without such a case."""
    import json

    if not path.exists():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    rows: Iterable[dict] = content["tables"].get(TABLE, {}).get("rows", [])
    running = [row for row in rows if row["outcome"] == RUNNING]
    for row in running:
        row["outcome"] = outcome
    if running:
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return running[0]["case"] if running else None
