"""Kills commands with SIGKILL at random moments, runs them again, and compares what they leave with undisturbed runs.

    python benchmarks/kills.py [--kills 500] [--folder runs/kills] [--cases pretrain prepare ...] [--jobs 2]

A series is one output: its command is killed up to three times, then runs to its end, and the files and arrays must
equal those of an undisturbed run bit by bit. Half of the kills come at a random moment of the command, half while a
file or checkpoint is half written. A kill hits the whole group of processes, as when a machine is lost, or only the
first process (or one of a run of two); the command is run again at once. After each kill what a reader would see is
checked: files and folders are absent or whole, and the newest checkpoint can be restored.

Each series is a line of FOLDER/series.jsonl. The same command continues until `--kills` are done. Lines of earlier code
count, and mark their rows as older than the code. Ends with status 1 if a series differs.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # of this process as well, which reads checkpoints

from killed.cases import CASES, make_inputs
from killed.outcomes import differences, is_partial, is_writing, outcome, unreadable_steps
from record import Record, add_json_argument, code_digest

MEASURES = ("bert_jax",)
COLUMNS = {
    "command": "{case}",
    "kills": "{kills}",
    "of them during a write": "{while_writing}",
    "outputs compared": "{series}",
    "different": "{different}",
    "half-written and readable": "{unsafe}",
    "slowest end after a kill, s": "{longest_end_seconds:.1f}",
}
KILLS_PER_SERIES = 3
LIMIT = 300.0
"""Seconds after which a command hangs."""


@dataclass
class Kill:
    """A kill.

    Attributes:
      seconds: from the start of the command.
      while_writing: something was half written at that moment.
      group: all processes were killed; else one.
      end_seconds: until the last other process of the run had ended.
      unsafe: what a reader would have taken for whole, and was not.
    """

    seconds: float
    while_writing: bool
    group: bool
    end_seconds: float = 0.0
    unsafe: list[str] = field(default_factory=list)


@dataclass
class Series:
    """Kills of one output, and the names of the files and arrays that differ at its end."""

    case: str
    seed: int
    code: str
    kills: list[Kill] = field(default_factory=list)
    different: list[str] = field(default_factory=list)


class Campaign:
    """The commands, what they read, and the undisturbed outcomes."""

    def __init__(self, folder: Path):
        self.folder, self.code = folder, code_digest(MEASURES)
        folder.mkdir(parents=True, exist_ok=True)
        self.environment = {
            **os.environ, "BERT_JAX_CACHE": str(folder / "cache"),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        }  # fmt: skip
        inputs = folder / "inputs"
        if (folder / "code").exists() and (folder / "code").read_text() != self.code:
            shutil.rmtree(inputs, ignore_errors=True)
            shutil.rmtree(folder / "undisturbed", ignore_errors=True)
        (folder / "code").write_text(self.code)
        make_inputs(inputs, self.environment)
        self.inputs = inputs
        self.undisturbed: dict[str, dict[str, str]] = {}
        self.seconds: dict[str, tuple[float, float]] = {}  # until the output appears, and until the end

    def run_undisturbed(self, case: str) -> None:
        """Runs a case without kills, for its outcome and duration, unless an earlier campaign has."""
        output = self.folder / "undisturbed" / folder_name(case)
        kept = output.with_name(output.name + ".json")
        if kept.exists():
            self.undisturbed[case], self.seconds[case] = json.loads(kept.read_text(encoding="utf-8"))
            return
        shutil.rmtree(output, ignore_errors=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        processes = self.start(case, output)
        appeared = 0.0
        while any(process.poll() is None for process in processes):
            if not appeared and (_has_content(output) or is_writing(output)):
                appeared = time.monotonic() - began
            time.sleep(0.02)
        seconds = time.monotonic() - began
        self.expect_success(case, output, processes)
        self.undisturbed[case] = outcome(output)
        self.seconds[case] = (min(appeared or seconds, 0.8 * seconds), seconds)
        kept.write_text(json.dumps([self.undisturbed[case], self.seconds[case]]), encoding="utf-8")
        print(f"{case}: {seconds:.1f} s undisturbed, {len(self.undisturbed[case])} digests", flush=True)

    def start(self, case: str, output: Path, log: Path | None = None, **variables: str) -> list[subprocess.Popen]:
        """Starts the processes of a case, with more environment variables; each leads a group.

        They write to `log`, by default to one file each beside the output.
        """
        count = CASES[case].processes
        if CASES[case].writes_files:
            output.mkdir(exist_ok=True)
        environment = {**self.environment, **variables}
        if count > 1:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                address = f"localhost:{free.getsockname()[1]}"
            environment |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}
        words = [sys.executable, "-m", "bert_jax.cli", *map(str, CASES[case].command(self.inputs, output))]
        started = []
        for number in range(count):
            own = environment | ({"JAX_PROCESS_ID": str(number)} if count > 1 else {})
            with (log or Path(f"{output}.log{number}")).open("ab") as file:
                started.append(subprocess.Popen(words, env=own, stdout=file, stderr=file, start_new_session=True))
        return started

    def run_series(self, case: str, seed: int) -> Series:
        """Kills and reruns one output; returns what happened."""
        rng, series = random.Random(f"{case} {seed}"), Series(case, seed, self.code)
        folder = self.folder / "series" / f"{folder_name(case)}-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        output = folder / folder_name(case)
        for _ in range(rng.randint(1, KILLS_PER_SERIES)):
            kill = self._kill_once(case, output, rng)
            if kill is None:
                break  # it ended first
            series.kills.append(kill)
            if self._is_complete(case, output):
                break  # killed between its last write and its end: another run would refuse to overwrite
        if not self._is_complete(case, output):
            processes = self.start(case, output)
            self.wait(processes)
            self.expect_success(case, output, processes)
        left = {path.name: "left" for path in folder.iterdir() if not path.name.startswith(output.name + ".log")}
        del left[output.name]
        series.different = differences(outcome(output) | left, self.undisturbed[case])
        if not series.different and not any(kill.unsafe for kill in series.kills):
            shutil.rmtree(folder)
        return series

    def _kill_once(self, case: str, output: Path, rng: random.Random) -> Kill | None:
        appears, seconds = self.seconds[case]
        begins = appears if rng.random() < 0.85 else 0.0
        moment, waits_for_write, group = rng.uniform(begins, seconds), rng.random() < 0.5, rng.random() < 0.5
        began = time.monotonic()
        processes = self.start(case, output)
        while (now := time.monotonic() - began) < LIMIT:
            if any(process.poll() is not None for process in processes):
                self.wait(processes)
                self.expect_success(case, output, processes)
                self.seconds[case] = (min(appears, 0.8 * now), now)  # the machine is less busy than it was
                return None
            if waits_for_write and now > min(moment, 0.7 * seconds) and is_writing(output):
                time.sleep(rng.uniform(0, 0.03))
                break
            if not waits_for_write and now > moment:
                break
            time.sleep(0.003)
        kill = Kill(time.monotonic() - began, is_writing(output), group)
        for process in processes if group else [rng.choice(processes)]:
            (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
        killed = time.monotonic()
        self.wait(processes)
        kill.end_seconds = time.monotonic() - killed
        kill.unsafe = self._unsafe(case, output)
        return kill

    def _is_complete(self, case: str, output: Path) -> bool:
        is_resumed = CASES[case].resumes or not output.exists()
        return not is_resumed and not differences(outcome(output), self.undisturbed[case])

    def _unsafe(self, case: str, output: Path) -> list[str]:
        """Returns what looks whole to a reader and is not."""
        if CASES[case].resumes:
            return unreadable_steps(output)
        looks_whole = (output / "dataset.json").exists() if case.startswith("prepare") else output.exists()
        if not looks_whole:
            return []
        found, expected = outcome(output), self.undisturbed[case]
        kept = {name: digest for name, digest in found.items() if not is_partial(Path(name))}
        is_complete = not CASES[case].writes_files
        return differences(kept, expected if is_complete else {name: expected.get(name, "") for name in kept})

    def wait(self, processes: Iterable[subprocess.Popen]) -> None:
        """Waits for the end of all. Raises RuntimeError, and ends it, for one that hangs."""
        deadline = time.monotonic() + LIMIT
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise RuntimeError(f"hangs for {LIMIT:.0f} s: {process.args}") from None

    def expect_success(self, case: str, output: Path, processes: Iterable[subprocess.Popen]) -> None:
        statuses = [process.returncode for process in processes]
        if any(statuses):
            raise RuntimeError(f"{case}: status {statuses}; see {output}.log0")


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    campaign = Campaign(options.folder.absolute())
    journal = options.folder / "series.jsonl"
    done = _read(journal)
    names = [name for name in options.cases if CASES[name].is_possible]
    for name in {*options.cases} - {*names}:
        print(f"{name}: not run, needs {CASES[name].requires}", file=sys.stderr)
    for name in names:
        campaign.run_undisturbed(name)
    lock, record = threading.Lock(), Record(options.json, MEASURES)

    def work() -> None:
        while True:
            with lock:
                total, counts = _count(done)
                if total >= options.kills:
                    return
                few = [one for one in names if counts.get(one, 0) < options.least]
                name = min(
                    few or names, key=lambda one: (counts.get(one, 0) * campaign.seconds[one][1], names.index(one))
                )
                seed = 1 + max((series.get("seed", -1) for series in done if series["case"] == name), default=-1)
                running = {"case": name, "seed": seed, "code": campaign.code, "kills": [{}] * 2, "running": True}
                done.append(running)  # other threads take other cases
            series = asdict(campaign.run_series(name, seed))
            with lock:
                done[next(place for place, one in enumerate(done) if one is running)] = series
                with journal.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(series) + "\n")
                finished = [one for one in done if "running" not in one]
                print(_line(series, _count(finished)[0], options.kills), flush=True)
                record.set_table("kills", COLUMNS, summary(finished, record.stamp))

    with ThreadPoolExecutor(options.jobs) as threads:
        for worker in [threads.submit(work) for _ in range(options.jobs)]:
            worker.result()
    rows = summary(done, record.stamp)
    record.set_values(
        **{name: sum(row[name] for row in rows) for name in ("kills", "while_writing", "series", "different", "unsafe")}
    )
    record.set_table("kills", COLUMNS, rows)
    print(record.render("kills"))
    return int(any(row["different"] or row["unsafe"] for row in rows))


def summary(done: list[dict[str, Any]], stamp: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row per case, of which the code is that of its oldest series."""
    rows = []
    for case in CASES:
        series = [one for one in done if one["case"] == case]
        kills = [kill for one in series for kill in one["kills"]]
        if series:
            rows.append(
                {
                    "case": case, "kills": len(kills), "while_writing": sum(kill["while_writing"] for kill in kills),
                    "series": len(series), "different": sum(bool(one["different"]) for one in series),
                    "unsafe": sum(bool(kill["unsafe"]) for kill in kills),
                    "longest_end_seconds": max((kill["end_seconds"] for kill in kills), default=0.0),
                    **stamp, "code": series[0]["code"],
                }
            )  # fmt: skip
    return rows


def folder_name(case: str) -> str:
    return case.replace(", ", "_").replace(" ", "_")


def _has_content(output: Path) -> bool:
    return output.is_dir() and any(output.iterdir())


def _line(series: dict[str, Any], total: int, wanted: int) -> str:
    verdict = f"DIFFERENT: {series['different'][:5]}" if series["different"] else "identical"
    unsafe = [name for kill in series["kills"] for name in kill["unsafe"]]
    if unsafe:
        verdict += f"; UNSAFE: {unsafe[:5]}"
    moments = ", ".join(f"{kill['seconds']:.1f} s" for kill in series["kills"])
    return f"{total} of {wanted}: {series['case']} {series['seed']}, killed at {moments or 'no moment'}: {verdict}"


def _count(done: Iterable[dict[str, Any]]) -> tuple[int, dict[str, int]]:
    """Returns the kills of all cases, and by case."""
    counts: dict[str, int] = {}
    for series in done:
        counts[series["case"]] = counts.get(series["case"], 0) + len(series["kills"])
    return sum(counts.values()), counts


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--least", type=int, default=20, help="kills of each command; the rest go to the shorter ones")
    parser.add_argument("--folder", type=Path, default=Path("runs/kills"))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--jobs", type=int, default=1, help="series at the same time")
    add_json_argument(parser, "kills")
    return parser


if __name__ == "__main__":
    sys.exit(main())
