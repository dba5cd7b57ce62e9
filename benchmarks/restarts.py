"""Measures the cost of preemption: a real run that is killed repeatedly, and a simulated run of days.

    python benchmarks/restarts.py [--kills 5] [--every 60]

BERT-Mini trains on the English that Python carries, in two processes under `launch/local_cluster.sh`. One of
them is killed with SIGKILL, the others detect it, all end, and the same command is rerun. The benchmark measures the
seconds from the kill to the first step of the resumed run, and the part of them spent on compiling the step (from the
second time on, it is in JAX's compilation cache). It also measures the share of useful time: the time that an
undisturbed run needs for all steps, over the time of this run.

The simulation uses the measured seconds of a restart, random kills every 30 minutes on average, and several checkpoint
intervals. A kill costs the restart and the steps since the newest checkpoint. As a check, it first reproduces the real
run.
"""

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from processes import BERT_JAX, prepare_dataset
from record import REPOSITORY, Record, make_parser

PROCESSES = 2
SAVE_EVERY = 10  # steps
MEASURES = ("bert_jax/runtime", "bert_jax/training")
COLUMNS = {
    "checkpoint every": "{save_seconds} s",
    "restart as measured": "{as_measured:.1%}",
    "restart 60 s": "{after_60_s:.1%}",
    "restart 180 s": "{after_180_s:.1%}",
}


def prepare(folder: Path) -> Path:
    text = folder / "text"
    subprocess.run([sys.executable, REPOSITORY / "launch" / "python_docs.py", text, "python"], check=True)
    return prepare_dataset(folder, text, ("--input", text, "--size", 4000), "--seq_len", 128)


class Attempt:
    """One attempt of the run; it resumes from the newest checkpoint."""

    def __init__(self, data: Path, workdir: Path, steps: int):
        cache = str(data.parent / "compiled")
        self._rows, self._log = workdir / "metrics.jsonl", Path(f"{workdir}.log")
        settings = {
            "data.path": data, "total_steps": steps, "global_batch_size": 16, "log_every_steps": 1, "eval_batches": 0,
            "checkpoint.every_steps": SAVE_EVERY, "optimizer.warmup_steps": 10,
        }  # fmt: skip
        command = [
            REPOSITORY / "launch" / "local_cluster.sh", str(PROCESSES), *BERT_JAX, "pretrain", "--config=bert_mini",
            f"--workdir={workdir}", *(f"--config.{key}={value}" for key, value in settings.items()),
        ]  # fmt: skip
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": cache}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, env=environment)

    @property
    def compiling(self) -> float | None:
        """Seconds of compilation, once the first step has started."""
        found = re.search(r"Step \d+: started after ([\d.]+) s\b", self._log.read_text())
        return float(found[1]) if found else None

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

    def finish(self) -> None:
        """Waits for the end of a run that is not killed."""
        if status := self.process.wait():
            raise RuntimeError(f"the run ended with status {status}:\n{self._log.read_text()[-2000:]}")


def undisturbed(data: Path, workdir: Path) -> float:
    """Returns the seconds per step, including checkpoints."""
    attempt = Attempt(data, workdir, 60)
    attempt.wait_for_step(20)
    began, first = time.monotonic(), attempt.last_step()
    attempt.wait_for_step(60)
    seconds = (time.monotonic() - began) / (60 - first)
    attempt.finish()
    return seconds


def disturbed(
    data: Path, workdir: Path, kills: int, every: float, steps: int
) -> tuple[list[float], list[float], float]:
    """Kills a run `kills` times after `every` seconds.

    Returns the seconds from each kill to the next step, those of them that were compilation, and those of the run.
    """
    restarts, compiling = [], []
    attempt = Attempt(data, workdir, steps)
    attempt.wait_for_step(1)
    began = time.monotonic()
    for _ in range(kills):
        time.sleep(every)
        assert attempt.process.poll() is None, "the run ended before it was killed: it was faster than undisturbed"
        killed = time.monotonic()
        attempt.kill_one()
        attempt.process.wait()
        attempt = Attempt(data, workdir, steps)
        # A resumed run drops the rows past its checkpoint; only after that the next row is a new step.
        while attempt.compiling is None and attempt.process.poll() is None:
            time.sleep(0.02)
        assert attempt.wait_for_step(attempt.last_step() + 1), "the run did not resume"
        restarts.append(time.monotonic() - killed)
        compiling.append(attempt.compiling or 0.0)
        print(f"resumed after {restarts[-1]:.1f} s, of which {compiling[-1]:.1f} s were compilation", flush=True)
    attempt.wait_for_step(steps)
    wall = time.monotonic() - began
    attempt.finish()
    return restarts, compiling, wall


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
    parser = make_parser(__doc__, "restarts")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--every", type=float, default=60.0, help="seconds of steps between kills")
    options = parser.parse_args()
    record = Record(options.json, MEASURES)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = prepare(folder)
        step = undisturbed(data, folder / "undisturbed")
        print(f"undisturbed: {step:.3f} s per step", flush=True)
        if options.every <= SAVE_EVERY * step:  # such a run never ends, nor does its simulation
            raise SystemExit(f"--every={options.every:g}: must be above the {SAVE_EVERY * step:.1f} s of a checkpoint")
        steps = round((options.kills + 0.5) * options.every / step)
        restarts, compiling, wall = disturbed(data, folder / "run", options.kills, options.every, steps)
    restart, useful = statistics.median(restarts), steps * step
    again = simulate(useful, restart, options.every, SAVE_EVERY * step, jitter=False)
    month = 30 * 24 * 3600.0
    seconds = {"as_measured": restart, "after_60_s": 60.0, "after_180_s": 180.0}
    rows = [
        {"save_seconds": save} | {name: simulate(month, one, 1800, save, jitter=True) for name, one in seconds.items()}
        for save in (30, 60, 120, 300, 600)
    ]
    record.set_table("simulated", COLUMNS, rows)
    record.set_values(
        kills=options.kills, processes=PROCESSES, step_seconds=step, restart_seconds=restart,
        longest_restart_seconds=max(restarts), compiling_seconds=statistics.median(compiling), wall_seconds=wall,
        useful_share=useful / wall, simulated_useful_share=again,
    )  # fmt: skip
    print(json.dumps(record.content["values"], indent=1), record.render("simulated"), sep="\n\n")


if __name__ == "__main__":
    main()
