"""A round of the fuzz campaign: one reader gets damaged files for some seconds, from one of two engines.

The engine "random" changes valid files at random. The engine "coverage" is atheris (libFuzzer): it keeps inputs that
reach new lines of bert_jax and changes those further, from round to round.
"""

import argparse
import hashlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from fuzzed.mutations import mutate
from fuzzed.targets import TARGETS, Target

ENGINES = ("random", "coverage")
MAX_LENGTH = 1 << 18
"""Bytes of the longest input of the engine "coverage"."""


class TooSlow(BaseException):
    """An input took too long; no `except Exception` of a reader catches it."""


class Round:
    """Counts what a reader did with its inputs, and keeps findings.

    Attributes:
      row: the sums so far, as JSON keeps them.
    """

    def __init__(self, name: str, folder: Path, options: argparse.Namespace, **fields: Any):
        self.target: Target = TARGETS[name]
        self.row = {"target": name, "inputs": 0, "accepted": 0, "findings": 0, "slowest_ms": 0.0, "memory_mib": 0.0}
        self.row |= fields
        self.options, self._path, self._findings = options, folder / self.target.name, options.folder / "findings"
        self._peak = self._began = 0.0

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self._began >= self.options.seconds

    def start(self, seed: bytes) -> None:
        """Reads a valid file, with all imports that it takes; memory and time count from its end."""
        self.target.prepare(self._path.parent)
        self._path.write_bytes(seed)
        self.target.read(self._path)
        signal.signal(signal.SIGALRM, _raise_too_slow)
        self._peak, self._began = _peak_mib(), time.monotonic()

    def check(self, content: bytes) -> None:
        """Has one input read, and counts it."""
        from bert_jax.errors import BertJaxError

        self._path.write_bytes(content)
        started = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, self.options.limit)
        try:
            self.target.read(self._path)
            self.row["accepted"] += 1
        except BertJaxError:
            pass
        except (Exception, TooSlow) as error:
            self._keep(content, error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.row["inputs"] += 1
        self.row["slowest_ms"] = max(self.row["slowest_ms"], 1000 * (time.monotonic() - started))
        grown = _peak_mib() - self._peak
        if grown > self.options.memory and grown > 1.1 * self.row["memory_mib"]:
            self._keep(content, MemoryError(f"{grown:.0f} MiB beyond the start"))
        self.row["memory_mib"] = max(self.row["memory_mib"], grown)

    def result(self) -> dict[str, Any]:
        return self.row | {"seconds": time.monotonic() - self._began}

    def _keep(self, content: bytes, error: BaseException) -> None:
        """Counts and writes a finding, unless there is one of the same place in the code."""
        frames = traceback.extract_tb(error.__traceback__)
        frame = next(
            (frame for frame in reversed(frames) if "bert_jax" in frame.filename), frames[-1] if frames else None
        )
        place = f"{self.row['target']} {type(error).__name__}" + (f" {frame.filename}:{frame.lineno}" if frame else "")
        path = self._findings / hashlib.sha256(place.encode()).hexdigest()[:16]
        if path.with_suffix(".txt").exists():
            return
        self.row["findings"] += 1
        path.with_suffix(".input").write_bytes(content)
        text = "".join(traceback.format_exception(error))
        path.with_suffix(".txt").write_text(f"{place}\n{text}", encoding="utf-8", errors="backslashreplace")


def run_round(name: str, engine: str, number: int, options: argparse.Namespace, pipe: Any) -> None:
    """Runs a round of one target in this process, sends its row, and ends the process."""
    logging.disable(logging.CRITICAL)
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_memory_folder()))
    try:
        current = Round(name, folder, options, engine=engine)
        if engine == "coverage":
            _run_guided(current, number, folder, pipe)
        else:
            _run_random(current, number)
            pipe.send(current.result())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_random(current: Round, number: int) -> None:
    seeds, rng = current.target.seeds(), random.Random(f"{current.row['target']} {number}")
    current.start(seeds[0])
    while not current.is_over:
        current.check(mutate(rng.choice(seeds), seeds, rng))


def _run_guided(current: Round, number: int, folder: Path, pipe: Any) -> None:
    """Does not return: libFuzzer ends the process itself, so that the row is sent by the last input."""
    import atheris

    digest = hashlib.sha256(current.row["target"].encode()).hexdigest()[:16]
    corpus = current.options.folder / "corpus" / digest
    corpus.mkdir(parents=True, exist_ok=True)
    os.dup2(os.open(current.options.folder / "coverage.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    with atheris.instrument_imports(include=["bert_jax"]):
        seeds = current.target.seeds()
        current.start(seeds[0])
    for place, seed in enumerate(seeds):
        (corpus / f"seed{place}").write_bytes(seed)

    def check(content: bytes) -> None:
        current.check(content)
        if current.is_over:
            pipe.send(current.result())
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)

    def change(content: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            return atheris.Mutate(content, max_size)
        return mutate(content, seeds, rng)[:max_size]

    flags = [f"-seed={number + 1}", f"-max_len={MAX_LENGTH}", "-timeout=0", "-rss_limit_mb=0", "-verbosity=0",
             "-len_control=0", f"-artifact_prefix={folder}/"]  # fmt: skip
    atheris.Setup(["fuzz", *flags, str(corpus)], check, custom_mutator=change)
    atheris.Fuzz()


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of the rounds in a journal, or none."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _raise_too_slow(*_: object) -> None:
    raise TooSlow("took too long")
