"""Measures the cost of preemption: a real run that is killed repeatedly, and a simulated run of days.

    benchmarks/restarts.py [--processes 2] [--kills 5] [--every 60]

BERT-Mini trains on the English that Python carries, in `--processes` processes under `launch/local_cluster.sh`. One of
them is killed with SIGKILL, the others detect it, all end, and the same command is rerun. The benchmark measures the
seconds from the kill to the first step of the resumed run, and the part of them spent on compiling the step (from the
second time on, it is in JAX's compilation cache). It also measures the share of useful time: the time that an
undisturbed run needs for all steps, over the time of this run.

The simulation uses the measured seconds of a restart, random kills every 30 minutes on average, and several checkpoint
intervals. A kill costs the restart and the steps since the newest checkpoint. As a check, it first reproduces the real
run.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from record import REPOSITORY, Record, add_json_argument

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "launch" / "local_cluster.sh"
SAVE_EVERY = 10  # steps
MEASURES = ("bert_jax/runtime", "bert_jax/training")
COLUMNS = {
    "checkpoint every": "{save_seconds} s",
    "restart as measured": "{as_measured:.1%}",
    "restart 60 s": "{after_60_s:.1%}",
    "restart 180 s": "{after_180_s:.1%}",
}


@dataclass(frozen=True)
class Measured:
    restarts: list[float]  # seconds from a kill to the next step
    compiling: list[float]  # seconds of `restarts` spent on compilation
    step: float  # seconds, undisturbed
    wall: float  # seconds of the whole run
    steps: int


def prepare(folder: Path) -> Path:
    text, vocabulary, data = folder / "text", folder / "tokenizer.json", folder / "data"
    subprocess.run([sys.executable, REPOSITORY / "launch" / "python_docs.py", text, "python"], check=True)
    cli = [sys.executable, "-m", "bert_jax.cli"]
    subprocess.run([*cli, "vocab", "--input", text, "--output", vocabulary, "--size", "4000"], check=True)
    command = ["prepare", "--input", text, "--vocab", vocabulary, "--output", data, "--seq_len", "128"]
    subprocess.run([*cli, *command], check=True, stdout=subprocess.DEVNULL)
    return data


class Attempt:
    """One attempt of the run; it resumes from the newest checkpoint."""

    def __init__(self, data: Path, workdir: Path, processes: int, steps: int):
        self.compiling: float | None = None
        cache = {"JAX_COMPILATION_CACHE_DIR": str(data.parent / "compiled")}
        self._rows = workdir / "metrics.jsonl"
        settings = {
            "data.path": data, "total_steps": steps, "global_batch_size": 16, "log_every_steps": 1, "eval_batches": 0,
            "checkpoint.every_steps": SAVE_EVERY, "optimizer.warmup_steps": 10,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [str(CLUSTER), str(processes), sys.executable, "-m", "bert_jax.cli", "pretrain", "--config=bert_mini",
             f"--workdir={workdir}", *(f"--config.{key}={value}" for key, value in settings.items())],
            stderr=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu", **cache},
        )  # fmt: skip
        self._log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr:
            self._log.append(line)
            if found := re.search(r"Step \d+: started after ([\d.]+) s\b", line):
                self.compiling = float(found[1])

    def last_step(self) -> int:
        try:
            return json.loads(self._rows.read_text().rstrip("\n").rsplit("\n", 1)[-1])["step"]
        except (FileNotFoundError, ValueError, KeyError):
            return 0

    def wait_for_step(self, step: int) -> bool:
        """Waits for a step; returns False if the run ends first."""
        while self.last_step() < step:
            if self.process.poll() is not None:
                return False
            time.sleep(0.02)
        return True

    def kill_one(self) -> None:
        """Sends SIGKILL to the last process, like a lost machine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)

    def end(self) -> int:
        status = self.process.wait()
        self._reader.join(timeout=5)
        return status


def undisturbed(data: Path, workdir: Path, processes: int) -> float:
    """Returns the seconds per step, including checkpoints."""
    attempt = Attempt(data, workdir, processes, 60)
    attempt.wait_for_step(20)
    began, first = time.monotonic(), attempt.last_step()
    attempt.wait_for_step(60)
    seconds = (time.monotonic() - began) / (60 - first)
    assert attempt.end() == 0
    return seconds


def disturbed(data: Path, workdir: Path, processes: int, kills: int, every: float, step: float) -> Measured:
    steps = round((kills + 0.5) * every / step)
    restarts, compiling = [], []
    attempt = Attempt(data, workdir, processes, steps)
    attempt.wait_for_step(1)
    began = time.monotonic()
    for _ in range(kills):
        time.sleep(every)
        assert attempt.process.poll() is None, "the run ended before it was killed: it was faster than undisturbed"
        killed = time.monotonic()
        attempt.kill_one()
        attempt.end()
        attempt = Attempt(data, workdir, processes, steps)
        # A resumed run drops the rows past its checkpoint; only after that the next row is a new step.
        while attempt.compiling is None and attempt.process.poll() is None:
            time.sleep(0.02)
        newest = attempt.last_step()
        assert attempt.wait_for_step(newest + 1), "the run did not resume"
        restarts.append(time.monotonic() - killed)
        compiling.append(attempt.compiling or 0.0)
        print(
            f"killed and resumed after {restarts[-1]:.1f} s, of which {compiling[-1]:.1f} s were compilation",
            flush=True,
        )
    attempt.wait_for_step(steps)
    wall = time.monotonic() - began
    status = attempt.end()
    assert status == 0, f"the run ended with {status}"
    return Measured(restarts, compiling, step, wall, steps)


def simulate(useful: float, restart: float, between: float, save: float, *, jitter: bool, seed: int = 0) -> float:
    """Simulates a run of `useful` seconds of steps with a checkpoint every `save` seconds; returns its useful share.

    The run is killed after `between` seconds of steps: exactly, or with `jitter` after a random time with that mean.
    """
    rng = random.Random(seed)
    done = saved = wall = 0.0
    while done < useful:
        until_kill = rng.expovariate(1 / between) if jitter else between
        stepping = min(until_kill, useful - done)
        done, wall = done + stepping, wall + stepping
        if done >= useful:
            break
        saved = max(saved, done // save * save)
        done, wall = saved, wall + restart
    return useful / wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--every", type=float, default=60.0, help="seconds of steps between kills")
    add_json_argument(parser, "restarts")
    options = parser.parse_args()
    record = Record(options.json, MEASURES)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = prepare(folder)
        step = undisturbed(data, folder / "undisturbed", options.processes)
        print(f"undisturbed: {step:.3f} s per step", flush=True)
        measured = disturbed(data, folder / "run", options.processes, options.kills, options.every, step)
    restart = statistics.median(measured.restarts)
    compiling = statistics.median(measured.compiling)
    share = measured.steps * measured.step / measured.wall
    again = simulate(
        measured.steps * measured.step, restart, options.every, SAVE_EVERY * measured.step, jitter=False
    )  # fmt: skip
    print(f"\n{len(measured.restarts)} kills, {options.processes} processes, a checkpoint every {SAVE_EVERY} steps")
    print(f"from the kill to the next step, median: {restart:.1f} s, {restart - compiling:.1f} s without compilation")
    print(f"longest: {max(measured.restarts):.1f} s")
    print(f"useful share of {measured.wall:.0f} s: {share:.1%}; simulated with the same numbers: {again:.1%}\n")
    print("Simulated, 30 days of steps with a kill every 30 minutes on average:\n")
    month = 30 * 24 * 3600.0
    restarts = {"as_measured": restart, "after_60_s": 60.0, "after_180_s": 180.0}
    rows = [
        {"save_seconds": save}
        | {name: simulate(month, seconds, 1800, save, jitter=True) for name, seconds in restarts.items()}
        for save in (30, 60, 120, 300, 600)
    ]
    record.set_table("simulated", COLUMNS, rows)
    record.set_values(
        kills=len(measured.restarts), processes=options.processes, step_seconds=step, restart_seconds=restart,
        longest_restart_seconds=max(measured.restarts), compiling_seconds=compiling, wall_seconds=measured.wall,
        useful_share=share, simulated_useful_share=again,
    )  # fmt: skip
    print(record.render("simulated"))


if __name__ == "__main__":
    main()
