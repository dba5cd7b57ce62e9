"""Feeds damaged files to every reader of bert_jax, and keeps those that end in anything but a refusal of one line.

    python benchmarks/fuzz.py [--seconds 120] [--jobs 2] [--seed 0] [--folder runs/fuzz] [--targets "task: CSV" ...]

An input is a valid small file with a few random changes: flipped bits, lost and repeated pieces, pieces of other files,
tokens of the formats, numbers that are too large, brackets nested 3,000 deep. A reader may accept it or refuse it with
BertJaxError. Findings are other exceptions, inputs that take longer than 10 seconds, and readers that need more than
512 MiB beyond their start. FOLDER/findings has each with its traceback, one per place in the code.

Each reader gets inputs for `--seconds`, in a process of its own. Ends with status 1 if there are findings.
"""

import argparse
import hashlib
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from fuzzed.mutations import mutate
from fuzzed.targets import TARGETS
from processes import call
from record import Record, make_parser

from bert_jax.errors import BertJaxError

MEASURES = ("bert_jax", "benchmarks/fuzzed")
LIMIT_SECONDS = 10.0
"""Of an input."""
LIMIT_MIB = 512.0
"""Memory of a reader beyond that after a valid file."""
COLUMNS = {
    "reader": "{target}",
    "inputs": "{inputs:,}",
    "accepted": "{accepted_share:.0%}",
    "findings": "{findings}",
    "slowest, ms": "{slowest_ms:,.0f}",
    "memory, MiB": "{memory_mib:,.0f}",
}


class TooSlowError(BaseException):
    """An input took too long; no `except Exception` of a reader catches it."""


def fuzz(name: str, seconds: float, seed: int, findings: str) -> dict[str, Any]:
    """Has a reader read damaged files in this process; returns its row."""
    logging.disable(logging.CRITICAL)
    target, rng = TARGETS[name], random.Random(f"{name} {seed}")
    seeds = target.seeds()
    row = {"target": name, "inputs": 0, "accepted": 0, "findings": 0, "slowest_ms": 0.0, "memory_mib": 0.0}

    def keep(content: bytes, error: BaseException) -> None:
        """Counts and writes a finding, unless there is one of the same place in the code."""
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((frame for frame in reversed(frames) if "bert_jax" in frame.filename), None)
        place = f"{name} {type(error).__name__}" + (f" {frame.filename}:{frame.lineno}" if frame else "")
        path = Path(findings) / hashlib.sha256(place.encode()).hexdigest()[:16]
        if not path.with_suffix(".txt").exists():
            row["findings"] += 1
            path.with_suffix(".input").write_bytes(content)
            text = "".join(traceback.format_exception(error))
            path.with_suffix(".txt").write_text(f"{place}\n{text}", encoding="utf-8", errors="backslashreplace")

    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        path = Path(folder) / target.name
        target.prepare(path.parent)
        path.write_bytes(seeds[0])
        target.read(path)  # with all imports that it takes; memory and time count from here
        signal.signal(signal.SIGALRM, _raise_too_slow)
        peak, began = _peak_mib(), time.monotonic()
        while (started := time.monotonic()) - began < seconds:
            content = mutate(rng.choice(seeds), seeds, rng)
            path.write_bytes(content)
            signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
            try:
                target.read(path)
                row["accepted"] += 1
            except BertJaxError:
                pass
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                keep(content, error)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            row["inputs"] += 1
            row["slowest_ms"] = max(row["slowest_ms"], 1000 * (time.monotonic() - started))
            grown = _peak_mib() - peak
            if grown > LIMIT_MIB and grown > 1.1 * row["memory_mib"]:
                keep(content, MemoryError(f"{grown:.0f} MiB beyond the start"))
            row["memory_mib"] = max(row["memory_mib"], grown)
    return row | {"accepted_share": row["accepted"] / max(1, row["inputs"])}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _raise_too_slow(*_: object) -> None:
    raise TooSlowError


def fuzz_in_child(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the row of a reader in a process of its own; the end of the process by a signal is a finding."""
    died = {"target": name, "inputs": 0, "findings": 1, "slowest_ms": 0.0, "memory_mib": 0.0, "accepted_share": 0.0}
    try:
        row = call(fuzz, name, options.seconds, options.seed, options.folder / "findings")
    except subprocess.CalledProcessError as error:
        if error.returncode > 0:
            raise RuntimeError(f"{name}: its process failed; the error is above") from error
        row = died | {"signal": -error.returncode}
    print(row, flush=True)
    return row


def main() -> int:
    parser = make_parser(__doc__, "fuzz")
    parser.add_argument("--seconds", type=float, default=120, help="of each reader")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/fuzz"))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="TARGET")
    options = parser.parse_args()
    (options.folder / "findings").mkdir(parents=True, exist_ok=True)
    record = Record(options.json, MEASURES)
    with ThreadPoolExecutor(options.jobs) as threads:
        rows = list(threads.map(lambda name: fuzz_in_child(name, options), options.targets))
    record.set_values(**{key: sum(row[key] for row in rows) for key in ("inputs", "findings")})
    record.set_table("readers", COLUMNS, rows)
    print(record.render("readers"))
    return int(any(row["findings"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
