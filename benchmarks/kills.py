"""Kills commands with SIGKILL at random moments, runs them again, and compares what they leave with undisturbed runs.

    python benchmarks/kills.py [--series 10] [--jobs 2] [--seed 0] [--folder runs/kills] [--cases pretrain prepare ...]

A series is one output: its command is killed up to three times, then runs to its end, and the files and arrays must
equal those of an undisturbed run bit by bit. Half of the kills come at a random moment of the command, half while a
file or checkpoint is half written. A kill hits the whole group of processes, as when a machine is lost, or only the
first process (or one of a run of two); the command is run again at once. After each kill what a reader would see is
checked: files and folders are absent or whole, and the newest checkpoint can be restored.

FOLDER has to be new; the outputs of series that differ stay in it. Ends with status 1 if there are any.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # of this process as well, which reads checkpoints

from killed.cases import CASES, make_inputs
from killed.outcomes import differences, is_partial, is_writing, outcome, unreadable_steps
from processes import BERT_JAX
from record import Record, make_parser

MEASURES = ("bert_jax", "benchmarks/killed")
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


class Killer:
    """Runs a case undisturbed, and then in series of kills.

    Attributes:
      row: the sums of the series so far.
    """

    def __init__(self, case: str, folder: Path):
        self.name, self.case, self.inputs = case, CASES[case], folder / "inputs"
        self.folder = folder / case.replace(", ", "_").replace(" ", "_")
        self.folder.mkdir()
        self.row = {"case": case} | dict.fromkeys(("kills", "while_writing", "series", "different", "unsafe"), 0)
        self.row["longest_end_seconds"] = 0.0
        output, began, self.appears = self._output("undisturbed"), time.monotonic(), 0.0
        processes = self.start(output)
        while any(process.poll() is None for process in processes):
            if not self.appears and ((output.is_dir() and any(output.iterdir())) or is_writing(output)):
                self.appears = time.monotonic() - began
            time.sleep(0.02)
        self.seconds = time.monotonic() - began
        self.appears = min(self.appears or self.seconds, 0.8 * self.seconds)
        self.finish(processes)
        self.expected = outcome(output)

    def _output(self, series: str) -> Path:
        """Returns the output of a series, alone in its folder and always of the same name, which outputs contain."""
        output = self.folder / series / "output"
        output.parent.mkdir()
        return output

    def start(self, output: Path) -> list[subprocess.Popen]:
        """Starts the processes of the command; each leads a group."""
        if self.case.writes_files:
            output.mkdir(exist_ok=True)
        environment, several = dict(os.environ), self.case.processes > 1
        if several:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                environment["JAX_COORDINATOR_ADDRESS"] = f"localhost:{free.getsockname()[1]}"
            environment["JAX_NUM_PROCESSES"] = str(self.case.processes)
        words = [*BERT_JAX, *map(str, self.case.command(self.inputs, output))]
        with Path(f"{output.parent}.log").open("ab") as log:
            return [
                subprocess.Popen(
                    words, env=environment | ({"JAX_PROCESS_ID": str(number)} if several else {}), stdout=log,
                    stderr=log, start_new_session=True,
                ) for number in range(self.case.processes)
            ]  # fmt: skip

    def finish(self, processes: Sequence[subprocess.Popen]) -> None:
        """Waits for the end. Raises RuntimeError if a process failed."""
        wait(processes)
        if any(process.returncode for process in processes):
            raise RuntimeError(
                f"{self.name}: status {[process.returncode for process in processes]}; see {self.folder}"
            )

    def run_series(self, number: int, seed: int) -> None:
        """Kills and reruns one output, and adds what happened to `row`."""
        rng, output = random.Random(f"{self.name} {seed} {number}"), self._output(str(number))
        unsafe = []
        for _ in range(rng.randint(1, KILLS_PER_SERIES)):
            if not self._kill_once(output, rng):
                break
            unsafe += self._unsafe(output)
            if self._is_complete(output):  # killed between its last write and its end
                break
        if not self._is_complete(output):
            self.finish(self.start(output))
        left = {path.name: "left" for path in output.parent.iterdir() if path != output}
        different = differences(outcome(output) | left, self.expected)
        self.row["series"] += 1
        self.row["different"] += bool(different)
        self.row["unsafe"] += len(unsafe)
        print(f"{self.name} {number}: different: {different[:5]}, unsafe: {unsafe[:5]}", flush=True)
        if not different and not unsafe:
            shutil.rmtree(output.parent)

    def _kill_once(self, output: Path, rng: random.Random) -> bool:
        """Returns False if the command ended first."""
        moment = rng.uniform(self.appears if rng.random() < 0.85 else 0.0, self.seconds)
        waits_for_write, group = rng.random() < 0.5, rng.random() < 0.5
        began, processes = time.monotonic(), self.start(output)
        while (now := time.monotonic() - began) < LIMIT:
            if any(process.poll() is not None for process in processes):
                self.finish(processes)
                self.seconds = now  # the machine is less busy than it was
                self.appears = min(self.appears, 0.8 * now)
                return False
            if waits_for_write and now > min(moment, 0.7 * self.seconds) and is_writing(output):
                time.sleep(rng.uniform(0, 0.03))
                break
            if not waits_for_write and now > moment:
                break
            time.sleep(0.003)
        self.row["kills"] += 1
        self.row["while_writing"] += is_writing(output)
        for process in processes if group else [rng.choice(processes)]:
            (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
        killed = time.monotonic()
        wait(processes)
        self.row["longest_end_seconds"] = max(self.row["longest_end_seconds"], time.monotonic() - killed)
        return True

    def _is_complete(self, output: Path) -> bool:
        can_compare = self.case.resumes or not output.exists()
        return not can_compare and not differences(outcome(output), self.expected)

    def _unsafe(self, output: Path) -> list[str]:
        """Returns what looks whole to a reader and is not."""
        if self.case.resumes:
            return unreadable_steps(output)
        if not output.exists():
            return []
        found = {name: digest for name, digest in outcome(output).items() if not is_partial(Path(name))}
        names = found if self.case.writes_files else self.expected
        return differences(found, {name: self.expected.get(name, "") for name in names})


def wait(processes: Iterable[subprocess.Popen]) -> None:
    """Waits for the end of all. Raises RuntimeError, and ends it, for one that hangs."""
    deadline = time.monotonic() + LIMIT
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise RuntimeError(f"hangs for {LIMIT:.0f} s: {process.args}") from None


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__, "kills")
    parser.add_argument("--series", type=int, default=10, help="outputs of each command")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/kills"))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    options = parser.parse_args(arguments)
    folder, record = options.folder.absolute(), Record(options.json, MEASURES)
    folder.mkdir(parents=True)
    os.environ |= {"BERT_JAX_CACHE": f"{folder}/cache", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    make_inputs(folder / "inputs")

    def run(case: str) -> dict[str, Any]:
        killer = Killer(case, folder)
        for number in range(options.series):
            killer.run_series(number, options.seed)
        return killer.row

    with ThreadPoolExecutor(options.jobs) as threads:
        rows = list(threads.map(run, (case for case in options.cases if CASES[case].is_possible)))
    record.set_values(
        **{name: sum(row[name] for row in rows) for name in ("kills", "while_writing", "series", "different", "unsafe")}
    )
    record.set_table("kills", COLUMNS, rows)
    print(record.render("kills"))
    return int(any(row["different"] or row["unsafe"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
