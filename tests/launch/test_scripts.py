"""Tests common properties of all scripts, and launch/slurm.sbatch with fakes of Slurm's programs."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import child_processes, helpers

REPOSITORY = helpers.REPOSITORY
SBATCH = REPOSITORY / "launch" / "slurm.sbatch"


class Slurm:
    """A fake Slurm: srun runs the command once, and calls of other programs are recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        self.state = "RUNNING"
        programs = folder / "bin"
        programs.mkdir()
        failing = f'if [ -s "{folder}/failing" ]; then truncate --size=-1 "{folder}/failing"; exit 1; fi'
        bodies = {
            "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
            "squeue": f'{failing}; cat "{folder}/state"',
            "sleep": "",
            "scontrol": f'echo scontrol "$@" >> "{self.calls}"',
            # A real one signals the processes and leaves srun alone; here they are one.
            "scancel": f'echo scancel "$@" >> "{self.calls}"; kill -TERM "$(cat "{folder}/pid")"',
        }
        for name, body in bodies.items():
            (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
            (programs / name).chmod(0o755)
        self.path = f"{programs}:{os.environ['PATH']}"

    def start(self, *command: str, **environment: str) -> subprocess.Popen:
        (self.folder / "state").write_text(self.state)
        obey = ["env", "--default-signal=INT,HUP"]  # a shell cannot trap a signal that its parent ignored
        return child_processes.start(
            [*obey, "bash", SBATCH, *command], cwd=self.folder, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": self.path, "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8", **environment},
        )  # fmt: skip

    def finish(self, process: subprocess.Popen) -> tuple[int, str, list[str]]:
        """Returns the exit status, the output and the calls of Slurm's programs."""
        written, _ = process.communicate(timeout=30)
        return process.returncode, written, self.calls.read_text().splitlines() if self.calls.exists() else []

    def run(self, *command: str, **environment: str) -> tuple[int, str, list[str]]:
        return self.finish(self.start(*command, **environment))


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


@pytest.mark.parametrize(("status", "calls"), [(0, []), (2, []), (75, ["scontrol requeue 7"])])
def test_saved_job_is_requeued(slurm: Slurm, status: int, calls: list[str]):
    assert slurm.run("sh", "-c", f"exit {status}")[::2] == (status, calls)
    assert not list(slurm.folder.glob("*.failures"))


@pytest.mark.parametrize("failures", [1, 5, 1000])
def test_saved_job_is_requeued_although_squeue_fails(slurm: Slurm, failures: int):
    (slurm.folder / "failing").write_bytes(bytes(failures))
    assert slurm.run("sh", "-c", "exit 75")[::2] == (75, ["scontrol requeue 7"])


@pytest.mark.parametrize("failures", [0, 5])
def test_cancelled_job_is_not_requeued(slurm: Slurm, failures: int):
    slurm.state = "COMPLETING"
    (slurm.folder / "failing").write_bytes(bytes(failures))
    status, written, calls = slurm.run("sh", "-c", "exit 75")
    assert (status, calls) == (75, [])
    assert "COMPLETING" in written


def test_failures_are_counted_across_starts_and_a_save_is_none(slurm: Slurm):
    for failed in ("1", "75", "137", "127"):
        assert slurm.run("sh", "-c", f"exit {failed}", MAX_FAILURES="2")[0] == int(failed)
    assert slurm.calls.read_text().splitlines() == ["scontrol requeue 7"] * 3
    assert len((slurm.folder / "bert-jax-7.failures").read_text().splitlines()) == 3
    assert slurm.run("true")[0] == 0
    assert not (slurm.folder / "bert-jax-7.failures").exists()


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@pytest.mark.parametrize(("sent", "failures"), [*((sent, 0) for sent in SIGNALS), (signal.SIGTERM, 1000)])
def test_signal_is_forwarded_and_the_job_waits_for_the_save(sent: signal.Signals, failures: int, slurm: Slurm):
    (slurm.folder / "failing").write_bytes(bytes(failures))
    saving = f"""echo $$ > {slurm.folder}/pid
        trap '/bin/sleep 0.3; exit 75' TERM; touch {slurm.folder}/up; while :; do /bin/sleep 0.05; done"""
    process = slurm.start("bash", "-c", saving)
    while not (slurm.folder / "up").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(sent)
    status, _, calls = slurm.finish(process)
    assert (status, calls) == (75, ["scancel --signal=TERM 7", "scontrol requeue 7"])


def test_dry_run_of_a_job_prints_its_commands(slurm: Slurm):
    status, written, calls = slurm.run("bert-jax", "pretrain", "--workdir=a run", DRY_RUN="1", XLA_FLAGS="--mine=1")
    assert (status, calls) == (0, [])
    lines = written.splitlines()
    assert shlex.split(lines[0])[1].endswith(" --mine=1")
    assert shlex.split(lines[1])[-3:] == ["bert-jax", "pretrain", "--workdir=a run"]
    assert "--cpus-per-task=8" in lines[1]


@pytest.mark.parametrize(
    ("arguments", "environment", "name"),
    [
        ([], {}, "usage: sbatch"),
        (["--nodes=2", "x"], {}, "--nodes=2"),
        (["x"], {"MAX_FAILURES": "few"}, "MAX_FAILURES=few"),
        (["x"], {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID"),
    ],
)
def test_usage_errors_of_a_job_are_one_line_and_status_2(slurm: Slurm, arguments, environment, name: str):
    status, written, calls = slurm.run(*arguments, **environment)
    assert (status, calls) == (2, [])
    assert name in written
    assert len(written.splitlines()) == 1


def test_signal_reaches_the_script_in_time():
    lines = re.findall(r"^#SBATCH (\S+)$", SBATCH.read_text(), flags=re.MULTILINE)
    options = dict(line.removeprefix("--").partition("=")[::2] for line in lines)
    assert "requeue" in options
    assert options["signal"].startswith("B:TERM@")
    # one process a GPU, each of which sees all
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert not {"gpus-per-task", "gpu-bind"} & options.keys()


LOCAL = REPOSITORY / "launch" / "local_cluster.sh"
TALKS = "import sys; [print(number, 'of many lines', file=sys.stderr) for number in range(20_000)]; sys.exit(75)"


def test_processes_of_a_local_cluster_end_when_nobody_reads_their_output():
    process = child_processes.start([LOCAL, "2", sys.executable, "-c", TALKS], stderr=subprocess.PIPE)
    process.stderr.close()
    assert process.wait(timeout=60) == 75


def test_unknown_command_of_a_local_cluster_is_one_line():
    done = subprocess.run([LOCAL, "2", "no-such-command"], capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "no-such-command" in done.stderr
