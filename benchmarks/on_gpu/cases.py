"""Cases of one part of the GPU benchmark: each is measured once for the same code, device and jax.

A row is recorded as soon as it is measured. It has `case`, `outcome` and the numbers of a measured case. A part that is
stopped continues with the first case that has no final outcome. A failed case is repeated by the next call of the
benchmark, and not by a further process of the same call.
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
FAILED = "failed: "
"""Start of the outcome of a case that raised another error."""
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


def is_same(row: Mapping[str, Any], key: Mapping[str, Any]) -> bool:
    """Returns whether a row was measured with the code, device and jax of `key`."""
    return all(row.get(name) == value for name, value in key.items())


class Cases:
    """Rows of a part's table, in the order of the cases."""

    def __init__(self, record: Record, columns: Mapping[str, str], key: Mapping[str, Any], deadline: float, call: str):
        """Reads the earlier rows of `key`.

        `deadline` is the Unix time after which no case starts. `call` names the call of the benchmark, which tries each
        case once.
        """
        self._record, self._columns, self._deadline = record, dict(columns), deadline
        self.key, self._call = dict(key), call
        stamp = {"date": record.stamp["date"], "commit": record.stamp["commit"]}
        self._stamp = {**stamp, **self.key, "call": call}
        self._rows = {row["case"]: row for row in record.earlier(TABLE) if is_same(row, key)}
        record.content["tables"][TABLE] = {"columns": self._columns, "rows": list(self._rows.values())}

    def measure(self, case: str, work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the row of a case: the earlier one if its outcome is final, else that of `work`.

        An exception of `work` is an outcome. Raises OutOfTimeError after the deadline, and FreshProcessError if `work`
        has made this process unusable.
        """
        earlier = self._rows.get(case)
        if earlier and (earlier["outcome"] in FINAL or (is_failed(earlier) and earlier.get("call") == self._call)):
            return earlier
        if time.time() >= self._deadline:
            raise OutOfTimeError(case)
        self._set(case, {"outcome": RUNNING})  # what remains if the process dies
        began, is_usable = time.monotonic(), True
        try:
            row = {"outcome": MEASURED, **work()}
        except OutOfTimeError:
            self._set(case, {"outcome": INTERRUPTED})
            raise
        except Exception as error:
            row = {"outcome": outcome_of(error)}
            is_usable = not any(text in str(error) for text in UNUSABLE)
        row["case_seconds"] = round(time.monotonic() - began, 1)
        self._set(case, row)
        shown = ", ".join(f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float))
        print(f"  {case}: {row['outcome']}; {shown}", flush=True)
        if not is_usable:
            raise FreshProcessError(case)
        return self._rows[case]

    def _set(self, case: str, row: Mapping[str, Any]) -> None:
        self._rows[case] = {"case": case, **row, **self._stamp}
        self._record.set_table(TABLE, self._columns, self._rows.values())


def is_failed(row: Mapping[str, Any]) -> bool:
    """Returns whether the case of a row raised an error that a later call may not meet."""
    return row["outcome"].startswith(FAILED)


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether the device had too little memory."""
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


def outcome_of(error: Exception) -> str:
    """Returns the outcome of a case that raised, in one line without paths."""
    text = f"{type(error).__name__}: {error}"
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    if isinstance(error, UnsupportedError):
        return REFUSED
    return FAILED + re.sub(r"\S*/\S*/\S*", "...", text.strip().split("\n")[0])[:160]


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
