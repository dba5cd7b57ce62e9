"""launch/slurm.sbatch under a real Slurm of one node; `make test-slurm` runs this, as root."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import helpers, runs, slurm_cluster

SCRIPT = helpers.REPOSITORY / "launch" / "slurm.sbatch"
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_cluster.Cluster]:
    reason = slurm_cluster.missing()
    if reason:
        pytest.fail(reason, pytrace=False)
    with slurm_cluster.one_node_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


class Job:
    """A submitted job and its log."""

    def __init__(self, cluster: slurm_cluster.Cluster, folder: Path, *command: str, **options: str) -> None:
        self.cluster, self.folder = cluster, folder
        environment = {**helpers.child_environment(), "MAX_FAILURES": "1"}
        chosen = {"ntasks-per-node": "2", "gpus-per-node": "2", "cpus-per-task": "1", "time": "30", **options}
        cluster.environment.update({key: value for key, value in environment.items() if key != "PATH"})
        self.number = cluster.run(
            "sbatch", "--parsable", f"--chdir={folder}", *(f"--{name}={value}" for name, value in chosen.items()),
            SCRIPT, *command,
        )  # fmt: skip

    @property
    def log(self) -> str:
        path = self.folder / f"bert-jax-{self.number}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_log(self, pattern: str, seconds: float = 150) -> None:
        self.cluster.wait(lambda: re.search(pattern, self.log), seconds, lambda: f"no {pattern!r} in:\n{self.log}")

    def wait_for_state(self, *states: str, seconds: float = 150) -> dict[str, str]:
        self.cluster.wait(
            lambda: self.cluster.job(self.number)["JobState"] in states, seconds,
            lambda: f"{self.cluster.job(self.number)}\n{self.log}",
        )  # fmt: skip
        return self.cluster.job(self.number)


def pretrain(dataset: Path, workdir: Path, **overrides: object) -> list[str]:
    return runs.train_command(dataset, workdir, **overrides)


def logged_steps(workdir: Path) -> list[int]:
    return [row["step"] for row in helpers.train_rows(workdir)]


def test_two_stopped_processes_save_and_resume_to_the_end(cluster, dataset_dir, tmp_path: Path):
    workdir = tmp_path / "run"
    job = Job(cluster, tmp_path, *pretrain(dataset_dir, workdir, total_steps=150, eval_every_steps=150))
    cluster.wait(lambda: workdir.exists() and logged_steps(workdir), 150, lambda: job.log)
    cluster.run("scancel", "--batch", "--signal=TERM", job.number)  # as at the time limit: to the script alone
    job.wait_for_log("exit status 75")
    job.wait_for_log(rf"requeued job {job.number}\b")
    stopped_at = logged_steps(workdir)[-1]
    assert stopped_at < 150
    state = job.wait_for_state("COMPLETED")
    assert state["ExitCode"] == "0:0"
    assert state["Restarts"] == "1"
    assert re.search(r"process 0 of 2", job.log)
    assert re.search(r"resum\w+ from step \d+", job.log, re.I)
    assert logged_steps(workdir) == list(range(10, 151, 10))
    assert not list(tmp_path.glob("*.failures"))


def test_time_limit_saves_and_requeues(cluster, dataset_dir, tmp_path: Path):
    # Slurm rounds limits to minutes, and may send the signal up to a minute early.
    workdir = tmp_path / "run"
    command = pretrain(dataset_dir, workdir, total_steps=1_000_000, eval_every_steps=1_000_000)
    job = Job(cluster, tmp_path, *command, time="3", signal="B:TERM@100")
    job.wait_for_log("slurm.sbatch: .*SIGTERM")
    job.wait_for_log("exit status 75")
    job.wait_for_log(rf"requeued job {job.number}\b")
    job.wait_for_log("start 2")
    cluster.run("scancel", job.number)
    assert job.wait_for_state("CANCELLED")["Restarts"] == "1"


def test_preempted_job_saves_waits_and_resumes(cluster, dataset_dir, tmp_path: Path):
    workdir = tmp_path / "run"
    job = Job(cluster, tmp_path, *pretrain(dataset_dir, workdir, total_steps=150, eval_every_steps=150))
    cluster.wait(lambda: workdir.exists() and logged_steps(workdir), 150, lambda: job.log)
    wanted = ["--partition=urgent", "--exclusive", f"--output={tmp_path / 'urgent.log'}", "--wrap=echo urgent"]
    cluster.run("sbatch", *wanted)
    job.wait_for_log(r"0: .*SIGTERM: saved step \d+")
    state = job.wait_for_state("COMPLETED")
    assert state["Restarts"] == "1"
    assert (tmp_path / "urgent.log").read_text() == "urgent\n"
    assert logged_steps(workdir) == list(range(10, 151, 10))


def test_cancelled_job_is_not_requeued(cluster, dataset_dir, tmp_path: Path):
    workdir = tmp_path / "run"
    job = Job(cluster, tmp_path, *pretrain(dataset_dir, workdir, total_steps=1_000_000, eval_every_steps=1_000_000))
    cluster.wait(lambda: workdir.exists() and logged_steps(workdir), 150, lambda: job.log)
    cluster.run("scancel", job.number)
    job.wait_for_log(r"0: .*SIGTERM: saved step \d+")
    job.wait_for_log("not requeued: ")
    assert job.wait_for_state("CANCELLED")["Restarts"] == "0"


def test_invalid_input_fails_once(cluster, tmp_path: Path):
    job = Job(cluster, tmp_path, *pretrain(tmp_path / "nothing", tmp_path / "run"))
    state = job.wait_for_state("FAILED")
    assert state["ExitCode"] == "2:0"
    assert state["Restarts"] == "0"
    assert "nothing" in job.log
    assert "requeued job" not in job.log


def test_failure_is_retried_max_failures_times(cluster, tmp_path: Path):
    job = Job(cluster, tmp_path, "sh", "-c", "exit 1")  # MAX_FAILURES=1
    state = job.wait_for_state("FAILED")
    assert state["ExitCode"] == "1:0"
    assert state["Restarts"] == "1"
    assert len((tmp_path / f"bert-jax-{job.number}.failures").read_text().splitlines()) == 2
