"""Cases of one part of the GPU benchmark: each is measured once for the same code, device and jax.

A row is recorded as soon as it is measured. It has `case`, `outcome` and the numbers of a measured case. A part that is
stopped continues with the first case that has no final outcome.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from processes import UnsupportedError
from record import Record

MEASURED, OUT_OF_MEMORY, REFUSED, RUNNING, CRASHED = "measured", "out of memory", "not supported", "running", "crashed"
FINAL = (MEASURED, OUT_OF_MEMORY, REFUSED, CRASHED)
"""Outcomes that a rerun would repeat; a case that failed otherwise is measured again."""
UNUSABLE = ("CUDA_ERROR", "INTERNAL")
"""Texts of errors after which a process cannot use its GPU."""
OUT_OF_TIME = 75
"""Exit status of a part that stopped at the deadline; a rerun continues it."""
FRESH_PROCESS = 76
"""Exit status of a part whose next case needs another process."""
TABLE = "cases"


class OutOfTimeError(Exception):
    """Raised by, or before, a case that has no time left before the deadline."""


class FreshProcessError(Exception):
    """Raised after a case whose error has made this process unusable."""


class Cases:
    """Rows of a part's table, in the order of the cases.

    Attributes:
      deadline: Unix time after which no case starts.
      is_complete: no case has failed.
    """

    def __init__(self, record: Record, columns: Mapping[str, str], key: Mapping[str, Any], deadline: float):
        """Reads the earlier rows of `key`: code, device and jax. A case that was running has crashed its process."""
        self.deadline, self.is_complete = deadline, True
        self._record, self._columns = record, dict(columns)
        self._stamp = {"date": record.stamp["date"], "commit": record.stamp["commit"], **key}
        rows = [row for row in record.earlier(TABLE) if all(row.get(name) == value for name, value in key.items())]
        self._rows = {
            row["case"]: row | ({"outcome": CRASHED} if row["outcome"] == RUNNING else {}) for row in rows
        }  # fmt: skip
        self._write()

    def measure(self, case: str, work: Callable[[], Mapping[str, Any]]) -> None:
        """Records the row of a case, unless an earlier one has a final outcome; an exception of `work` is an outcome.

        Raises OutOfTimeError after the deadline, and FreshProcessError if `work` has made this process unusable.
        """
        if case in self._rows and self._rows[case]["outcome"].startswith(FINAL):
            return
        if time.time() >= self.deadline:
            raise OutOfTimeError(case)
        self._set(case, {"outcome": RUNNING})  # what remains if the process dies
        began, is_usable = time.monotonic(), True
        try:
            row = {"outcome": MEASURED, **work()}
        except OutOfTimeError:
            del self._rows[case]
            self._write()
            raise
        except Exception as error:
            is_usable = not any(text in str(error) for text in UNUSABLE)
            outcome = outcome_of(error)
            row = {"outcome": outcome if is_usable or outcome in FINAL else f"{CRASHED}: {outcome}"}
        self._set(case, row | {"case_seconds": round(time.monotonic() - began, 1)})
        self.is_complete &= row["outcome"].startswith(FINAL)
        print(f"  {case}: {row['outcome']}", flush=True)
        if not is_usable:
            raise FreshProcessError

    def _set(self, case: str, row: Mapping[str, Any]) -> None:
        self._rows[case] = {"case": case, **row, **self._stamp}
        self._write()

    def _write(self) -> None:
        self._record.set_table(TABLE, self._columns, self._rows.values())


def outcome_of(error: Exception) -> str:
    """Returns the outcome of a case that raised an error, without paths of this machine."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    if isinstance(error, UnsupportedError):
        return REFUSED
    first = f"{type(error).__name__}: {error}".splitlines()[0]
    return "failed: " + re.sub(r"\S*/\S*/\S*", "...", first)[:160]


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether the device had too little memory."""
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


def drop_running(path: Path) -> None:
    """Drops the case of a part that was killed at the deadline, so that a rerun measures it."""
    if path.exists():
        content = json.loads(path.read_text(encoding="utf-8"))
        for table in content["tables"].values():
            table["rows"] = [row for row in table["rows"] if row.get("outcome") != RUNNING]
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
