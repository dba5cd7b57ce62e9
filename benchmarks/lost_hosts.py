"""Loses one host of a run of two and of four: killed, frozen, cut off from the network, slow; records what others do.

    python benchmarks/lost_hosts.py [--repeats 3] [--folder runs/lost_hosts] [--faults cut frozen ...] [--jobs 2]

Each process of a run has a network namespace, a host name and an address of its own; the workdir is shared. After
some steps one process, the first or another, has a fault. A trial records after how many seconds each other process
ended, and with which status. Then the fault is lifted: the frozen process is thawed, the link is up again. From the end
of the others on, no file but the lease may change. The same command, run again, has to resume from the newest
checkpoint and to end with every step logged once.

Faults that pass (slow, cut off for ten seconds) must not end the run: SIGTERM ends it with status 75.

Each trial is a line of FOLDER/trials.jsonl. The same command continues; lines of other code are not counted. Ends with
status 1 if a trial is not as promised. Requires Linux, root and iproute2.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from killed.cases import TRAINING
from lost.hosts import Hosts, NotPermitted, connected_hosts, files_of, wait_until_ended
from record import Record, add_json_argument, code_digest

MEASURES = ("bert_jax/runtime", "bert_jax/training/run.py", "bert_jax/training/workdir.py")
FAULTS = {
    "killed": "killed (SIGKILL)",
    "frozen": "frozen (SIGSTOP), and thawed after the others ended",
    "cut": "cut off from the network, for good",
    "cut briefly": "cut off from the network for 10 s",
    "slow": "stopped for 0.4 s of every 0.5 s, for 45 s",
}
PASSING = ("cut briefly", "slow")
COLUMNS = {
    "fault of one process": "{fault}",
    "which": "{which}",
    "processes": "{processes}",
    "trials": "{trials}",
    "the others ended after, s: median": "{median}",
    "longest": "{longest}",
    "statuses of the others": "{others}",
    "status of the faulty one": "{own}",
    "steps lost, at most": "{lost}",
    "written after the others ended": "{written}",
    "not as promised": "{wrong}",
}
LIMIT = 150.0  # seconds for the others to end in
START_LIMIT = 240.0
SAVE_STEPS = 20
LEASE = "lease.json"  # which a process 0 that wakes may renew, until it ends


@dataclass
class Trial:
    """A fault of one process of a run.

    Attributes:
      fault: key of FAULTS.
      victim: number of the process that has it.
      seconds: from the fault to the end of each other process; none if the run continues.
      statuses: exit statuses of the others.
      own_status: that of the victim.
      own_seconds: from the fault, or from its end where the process could not act before, to the victim's end.
      lost_steps: steps after the newest checkpoint.
      written: files that changed after the others had ended.
      wrong: deviations from what is promised.
    """

    fault: str
    victim: int
    processes: int
    repeat: int
    code: str
    seconds: list[float] = field(default_factory=list)
    statuses: list[int | None] = field(default_factory=list)
    own_status: int | None = None
    own_seconds: float = 0.0
    lost_steps: int = 0
    written: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def main() -> int:
    options = _parser().parse_args()
    folder, code = options.folder.resolve(), code_digest(MEASURES)
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / "trials.jsonl"
    done = [trial for trial in _read(journal) if trial["code"] == code]
    known = {(trial["fault"], trial["victim"], trial["processes"], trial["repeat"]) for trial in done}
    wanted = [
        (fault, victim, processes, repeat)
        for repeat in range(options.repeats) for processes in (2, 4)
        for fault in options.faults for victim in ((1,) if fault in PASSING else (1, 0))
    ]  # fmt: skip
    _make_inputs(folder / "inputs")
    record = Record(options.json, MEASURES)

    def run(arguments: tuple[str, int, int, int]) -> None:
        trial = asdict(run_trial(folder, *arguments, code))
        with journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(trial) + "\n")
        done.append(trial)
        print(json.dumps(trial), flush=True)
        _write(record, done)

    try:
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(run, [arguments for arguments in wanted if arguments not in known]))
    except NotPermitted as error:
        print(f"lost_hosts.py: {error}", file=sys.stderr)
        return 1
    _write(record, done)
    print(record.render("faults"))
    return int(any(trial["wrong"] for trial in done))


def run_trial(folder: Path, fault: str, victim: int, processes: int, repeat: int, code: str = "") -> Trial:
    """Runs one trial below `folder`; returns what happened. Raises NotPermitted."""
    trial = Trial(fault, victim, processes, repeat, code)
    place = folder / f"{fault.replace(' ', '_')}-{victim}-of-{processes}-{repeat}"
    shutil.rmtree(place, ignore_errors=True)
    workdir = place / "run"
    workdir.mkdir(parents=True)
    with connected_hosts(processes, place / "hosts") as hosts:
        run = Run(hosts, folder / "inputs", workdir)
        try:
            started = run.start(20_000)
            run.wait_for_step(started, random.Random(f"{fault} {victim} {processes} {repeat}").randint(45, 75))
            if fault in PASSING:
                _pass(trial, run, started)
            else:
                _lose(trial, run, started)
            _resume(trial, run)
        finally:
            run.end()
    if not trial.wrong:
        shutil.rmtree(place)
    return trial


class Run:
    """A run of one process per host, in a workdir that they share."""

    def __init__(self, hosts: Hosts, inputs: Path, workdir: Path):
        self.hosts, self.inputs, self.workdir = hosts, inputs, workdir
        self._port, self._started = 20_000, []

    def start(self, total_steps: int) -> dict[int, subprocess.Popen]:
        """Starts the processes; returns them by number."""
        self._port += 1
        settings = {
            **TRAINING, "model.max_position_embeddings": 32, "data.path": self.inputs / "data", "log_every_steps": 1,
            "eval_every_steps": 0, "eval_batches": 0, "checkpoint.every_steps": SAVE_STEPS, "total_steps": total_steps,
        }  # fmt: skip
        flags = [f"--config.{key}={value}" for key, value in settings.items()]
        words = [sys.executable, "-m", "bert_jax.cli", "pretrain", "--config=bert_tiny", f"--workdir={self.workdir}"]
        common = {
            **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
            "JAX_COMPILATION_CACHE_DIR": str(self.inputs / "compiled"),
            "JAX_COORDINATOR_ADDRESS": f"host0:{self._port}",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_NUM_PROCESSES": str(self.hosts.count),
        }  # fmt: skip
        started = {}
        for number in range(self.hosts.count):
            with (self.workdir.parent / f"log{number}").open("ab") as log:
                started[number] = subprocess.Popen(
                    self.hosts.command(number, [*words, *flags]), stdout=log, stderr=log,
                    env=common | {"JAX_PROCESS_ID": str(number)},
                )  # fmt: skip
        self._started += started.values()
        return started

    def wait_for_step(self, started: dict[int, subprocess.Popen], step: int) -> None:
        """Waits until a step is logged."""
        end = time.monotonic() + START_LIMIT
        while self.last_step() < step:
            if any(process.poll() is not None for process in started.values()) or time.monotonic() > end:
                raise RuntimeError(f"{self.workdir}: the run did not reach step {step}")
            time.sleep(0.02)

    def steps(self) -> list[int]:
        """Returns the logged steps, in the order of the file."""
        path = self.workdir / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [json.loads(line)["step"] for line in lines]

    def last_step(self) -> int:
        """Returns the last logged step, 0 for none."""
        return (self.steps() or [0])[-1]

    def saved_step(self) -> int:
        """Returns the newest checkpoint's step, 0 for none."""
        names = [path.name for path in (self.workdir / "checkpoints").glob("*")]
        return max((int(name) for name in names if name.isdigit()), default=0)

    def log(self, number: int) -> str:
        """Returns what a process has printed."""
        return (self.workdir.parent / f"log{number}").read_text(encoding="utf-8", errors="replace")

    def end(self) -> None:
        """Kills the processes that are left."""
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


def _lose(trial: Trial, run: Run, started: dict[int, subprocess.Popen]) -> None:
    """Applies a fault that has to end the run, and lifts it once the others have ended."""
    victim = started.pop(trial.victim)
    if trial.fault == "cut":
        run.hosts.cut(trial.victim)
    else:
        victim.send_signal(signal.SIGKILL if trial.fault == "killed" else signal.SIGSTOP)
    began = time.monotonic()
    ended = wait_until_ended(started, LIMIT)
    trial.seconds = [round(seconds, 2) for seconds in ended.values()]
    trial.statuses = [process.poll() for process in started.values()]
    if trial.statuses != [1] * len(started):
        trial.wrong.append(f"statuses {trial.statuses}")
    for number in started:
        if "rerun the same command" not in run.log(number):
            trial.wrong.append(f"process {number} did not say what to do")
    trial.lost_steps = run.last_step() - run.saved_step()
    before = files_of(run.workdir)
    if trial.fault == "frozen":
        began = time.monotonic()
        victim.send_signal(signal.SIGCONT)
    elif trial.fault == "cut":
        wait_until_ended({0: victim}, 60)
        if victim.poll() is None:
            trial.wrong.append("the process without a network did not end")
        trial.own_seconds = round(time.monotonic() - began, 2)
        run.hosts.reconnect(trial.victim)
    wait_until_ended({0: victim}, LIMIT)
    trial.own_seconds = trial.own_seconds or round(time.monotonic() - began, 2)
    trial.own_status = victim.poll()
    if trial.own_status != (-signal.SIGKILL if trial.fault == "killed" else 1):
        trial.wrong.append(f"own status {trial.own_status}")
    time.sleep(1)
    after = files_of(run.workdir)
    trial.written = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    if others := [name for name in trial.written if name != LEASE]:
        trial.wrong.append(f"written: {others[:5]}")


def _pass(trial: Trial, run: Run, started: dict[int, subprocess.Popen]) -> None:
    """Applies a fault that passes, checks that the run continues, and ends it with SIGTERM."""
    first = run.last_step()
    if trial.fault == "slow":
        end = time.monotonic() + 45
        while time.monotonic() < end:
            started[trial.victim].send_signal(signal.SIGSTOP)
            time.sleep(0.4)
            started[trial.victim].send_signal(signal.SIGCONT)
            time.sleep(0.1)
    else:
        run.hosts.cut(trial.victim)
        time.sleep(10)
        first = run.last_step()
        run.hosts.reconnect(trial.victim)
    run.wait_for_step(started, first + 5)
    for process in started.values():
        process.send_signal(signal.SIGTERM)
    wait_until_ended(started, LIMIT)
    statuses = [process.poll() for process in started.values()]
    trial.own_status = statuses.pop(trial.victim)
    trial.statuses = statuses
    trial.lost_steps = run.last_step() - run.saved_step()
    if {trial.own_status, *statuses} != {75}:
        trial.wrong.append(f"statuses {statuses}, {trial.own_status}")
    if any("counts as lost" in run.log(number) for number in started):
        trial.wrong.append("a process was declared lost")


def _resume(trial: Trial, run: Run) -> None:
    """Runs the same command again, for a few steps more than the newest checkpoint."""
    total = run.saved_step() + 2
    started = run.start(total)
    wait_until_ended(started, START_LIMIT)
    if (statuses := [process.poll() for process in started.values()]) != [0] * len(started):
        trial.wrong.append(f"resumed with {statuses}")
    elif run.steps() != list(range(1, total + 1)):
        trial.wrong.append("a step of the resumed run is missing or logged twice")


def _write(record: Record, done: list[dict[str, Any]]) -> None:
    rows = []
    for fault in FAULTS:
        for first in (False, True):
            for processes in (2, 4):
                of = [
                    trial for trial in done
                    if (trial["fault"], trial["victim"] == 0, trial["processes"]) == (fault, first, processes)
                ]  # fmt: skip
                if of:
                    rows.append(_row(fault, first, processes, of))
    record.set_values(
        trials=len(done), wrong=sum(bool(trial["wrong"]) for trial in done),
        longest_seconds=max((second for trial in done for second in trial["seconds"]), default=0.0),
        written=sum(name != LEASE for trial in done for name in trial["written"]),
    )  # fmt: skip
    record.set_table("faults", COLUMNS, rows)


def _row(fault: str, first: bool, processes: int, trials: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [second for trial in trials for second in trial["seconds"]]
    row: dict[str, Any] = {"median": "none ended", "longest": "none ended"}
    if seconds:
        row = {"median": f"{statistics.median(seconds):.1f}", "longest": f"{max(seconds):.1f}"}
    return row | {
        "fault": FAULTS[fault], "which": "process 0" if first else "another", "processes": processes,
        "trials": len(trials), "others": _listed(status for trial in trials for status in trial["statuses"]),
        "own": _listed(trial["own_status"] for trial in trials),
        "written": _listed(name.split("/")[0] for trial in trials for name in trial["written"]) or "nothing",
        "lost": max(trial["lost_steps"] for trial in trials), "wrong": sum(bool(trial["wrong"]) for trial in trials),
    }  # fmt: skip


def _listed(statuses: Any) -> str:
    names = {"None": "none", "-9": "SIGKILL"}
    return ", ".join(sorted({names.get(str(status), str(status)) for status in statuses}))


def _make_inputs(folder: Path) -> None:
    """Makes a small dataset from the documentation of Python; does nothing if an earlier campaign has made it."""
    if (folder / "complete").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    text = "pydoc:json,email,http,xml,unittest,asyncio"
    for words in (
        ["vocab", "--input", text, "--output", folder / "vocab.txt", "--size", 1000],
        ["prepare", "--input", text, "--vocab", folder / "vocab.txt", "--output", folder / "data", "--seq_len", 32],
    ):
        command = [sys.executable, "-m", "bert_jax.cli", *map(str, words)]
        subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=True, stdout=subprocess.DEVNULL)
    (folder / "complete").touch()


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/lost_hosts"))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--jobs", type=int, default=1, help="trials at the same time")
    add_json_argument(parser, "lost_hosts")
    return parser


if __name__ == "__main__":
    sys.exit(main())
