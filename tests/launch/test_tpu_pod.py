"""Tests launch/tpu_pod.sh with a `gcloud` that keeps its TPUs in a folder."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import child_processes

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "launch" / "tpu_pod.sh"
BASE = ["--name=bert", "--zone=us-east5-b"]
TPUS = [*BASE, "--accelerator-type=v6e-8", "--spot", "--poll=1"]


class Cloud:
    """A fake cloud in a folder, and the hosts' tools that `setup` calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cloud"
        self.folder.mkdir()
        self.origin = folder / "origin"
        self.programs = folder / "bin"
        self.programs.mkdir()
        self.program(
            "gcloud", f'exec {shlex.quote(sys.executable)} -IS {shlex.quote(str(HERE / "fake_gcloud.py"))} "$@"'
        )
        # `python3 -m pip install uv`, on a host
        self.program("python3", 'mkdir -p "$HOME/.local/bin"; cp "$(dirname "$0")/fake_uv" "$HOME/.local/bin/uv"')
        for name in ("pkill", "pgrep", "ps"):  # of Debian's procps, which not every image has
            self.program(name, f'echo "{name}: command not found" >&2; exit 127')
        self.program("fake_uv", 'echo "$@" >> "$HOME/uv"; [ ! -e "$FAKE_CLOUD/broken" ]')
        git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", self.origin]
        self.origin.mkdir()
        subprocess.run([*git, "init", "--quiet", "--initial-branch=main"], check=True)
        subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message=first"], check=True)

    def program(self, name: str, body: str) -> None:
        path = self.programs / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)

    def fake_clock(self, body: str) -> None:
        """Makes `date +%s` print the output of a line of shell."""
        self.program("date", f'if [ "$1" = +%s ]; then {body}; else exec {shutil.which("date")} "$@"; fi')

    def environment(self) -> dict[str, str]:
        return {
            **os.environ, "FAKE_CLOUD": str(self.folder), "PATH": f"{self.programs}:{os.environ['PATH']}",
            "VIRTUAL_ENV": sys.prefix, "TPU_POD_SECOND_MS": "10",
        }  # fmt: skip

    def run(self, *arguments: str, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess:
        return child_processes.run([SCRIPT, *arguments], env={**self.environment(), **environment}, timeout=timeout)

    def watch(self, script: str, *options: str, **environment: str) -> subprocess.CompletedProcess:
        """Runs `watch` with a shell script, in which $FAKE_CLOUD is the cloud and $count the starts on this host."""
        counted = f"""
            echo start >> "$FAKE_CLOUD/starts-${{HOME##*/}}"; count=$(wc -l < "$FAKE_CLOUD/starts-${{HOME##*/}}")
            echo "start $count"; {script}"""
        return self.run(
            "watch", *TPUS, f"--repo={self.origin}", "--ref=main", "--no-check", *options, "--",
            "bash", "-c", counted, "a 'word'", **environment,
        )  # fmt: skip

    def verbs(self) -> list[str]:
        """Returns the calls on queued resources, without queries of their state and ssh."""
        path = self.folder / "calls"
        calls = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [call[3] for call in calls if call[2:3] == ["queued-resources"] and call[3] not in ("describe", "ssh")]

    def starts(self, host: int = 0) -> int:
        path = self.folder / f"starts-host{host}"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def cloud(tmp_path: Path) -> Cloud:
    return Cloud(tmp_path)


def test_watch_creates_runs_and_deletes_the_tpus(cloud: Cloud):
    (cloud.folder / "states").write_text("CREATING\nWAITING_FOR_RESOURCES\nPROVISIONING\n")
    done = cloud.watch("exit 0", "--node-count=2")
    assert done.returncode == 0, done.stderr
    assert cloud.verbs() == ["create", "delete"]
    assert [cloud.starts(host) for host in range(4)] == [1, 1, 1, 1]
    assert "WAITING_FOR_RESOURCES" in done.stderr


def test_preempted_tpus_are_requested_and_set_up_again(cloud: Cloud):
    first = 'if [ "$count" = 1 ]; then echo SUSPENDED > "$FAKE_CLOUD/state"; exit 75; fi'
    done = cloud.watch(first)
    assert done.returncode == 0, done.stderr
    assert cloud.verbs() == ["create", "delete", "create", "delete"]
    assert cloud.starts() == 2
    assert done.stderr.count("setting up") == 2


def test_preempted_node_is_found_before_its_resource_reports_it(cloud: Cloud):
    done = cloud.watch('if [ "$count" = 1 ]; then echo PREEMPTED > "$FAKE_CLOUD/node_state"; exec sleep 60; fi')
    assert done.returncode == 0, done.stderr
    assert cloud.verbs() == ["create", "delete", "create", "delete"]


def test_saved_run_restarts_on_the_same_tpus_without_limit(cloud: Cloud):
    done = cloud.watch('[ "$count" = 3 ] || exit 75', "--max-failures=1")
    assert done.returncode == 0, done.stderr
    assert cloud.verbs() == ["create", "delete"]
    assert cloud.starts() == 3
    assert done.stderr.count("setting up") == 1


def test_invalid_input_ends_at_once(cloud: Cloud):
    done = cloud.watch("echo no such dataset; exit 2")
    assert done.returncode == 2, done.stderr
    assert cloud.starts() == 1
    assert "no such dataset" in done.stdout  # the log, before the hosts are gone
    assert cloud.verbs() == ["create", "delete"]


def test_kept_tpus_are_reused_and_their_stale_status_is_ignored(cloud: Cloud):
    assert cloud.watch("exit 2", "--keep").returncode == 2
    assert cloud.verbs() == ["create"]
    assert cloud.watch("exit 0").returncode == 0
    assert cloud.verbs() == ["create", "delete"]


@pytest.mark.long
def test_failures_are_retried_max_failures_times(cloud: Cloud):
    done = cloud.watch("exit 1", "--max-failures=1")
    assert done.returncode == 1
    assert cloud.starts() == 2
    assert cloud.verbs() == ["create", "delete"]


def test_a_killed_process_is_a_failure(cloud: Cloud):
    done = cloud.watch('[ "$count" = 2 ] || kill -9 $$', "--max-failures=1")
    assert done.returncode == 0, done.stderr
    assert cloud.starts() == 2
    assert "exited 137" in done.stderr


def test_failing_installation_is_retried_a_limited_number_of_times(cloud: Cloud):
    (cloud.folder / "broken").touch()
    done = cloud.watch("exit 0", "--max-failures=1")
    assert done.returncode == 1
    assert cloud.starts() == 0
    assert done.stderr.count("setting up") == 2
    assert cloud.verbs() == ["create", "delete"]


def test_stop_lets_the_command_save_and_ends_watch(cloud: Cloud):
    saving = """trap 'echo saving; exit 75' TERM; touch "$FAKE_CLOUD/up-${HOME##*/}"; while :; do sleep 0.05; done"""
    command = ["watch", *TPUS, f"--repo={cloud.origin}", "--ref=main", "--", "bash", "-c", saving]
    watching = child_processes.start(
        [SCRIPT, *command], env=cloud.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while len(list(cloud.folder.glob("up-*"))) < 2:
        assert watching.poll() is None, watching.communicate()
        time.sleep(0.02)
    stopped = cloud.run("stop", *BASE)
    assert stopped.stdout.count("told to stop") == 2
    output, _ = watching.communicate(timeout=30)
    assert watching.returncode == 75
    assert "saving" in output
    assert cloud.verbs() == ["create"]
    status = cloud.run("status", *BASE)
    assert status.stdout.split()[0] == "ACTIVE"
    assert status.stdout.count(" stopped") == 2
    assert cloud.run("stop", *BASE).stdout.count("not running") == 2


def test_reused_process_id_is_not_the_command(cloud: Cloud):
    assert cloud.run("create", *TPUS).returncode == 0
    bystander = child_processes.start(["sleep", "60"])
    for host in range(2):
        run = cloud.folder / f"host{host}" / "bert_jax_runs" / "bert"
        run.mkdir(parents=True)
        (run / "ready").write_text("main\n")
        (run / "lock").touch()
        (run / "pid").write_text(f"{bystander.pid}\n")  # as after a host's reboot
    assert cloud.run("status", *BASE).stdout.count(" lost") == 2
    assert cloud.run("stop", *BASE).returncode != 0
    assert bystander.poll() is None


def test_max_hours_saves_and_releases_the_tpus(cloud: Cloud):
    # The time passes once the commands of both hosts handle SIGTERM.
    cloud.fake_clock('[ "$(ls "$FAKE_CLOUD" | grep -c ^saves-)" -ge 2 ] && echo 1000 || echo 0')
    saving = """trap 'echo saving; exit 75' TERM; touch "$FAKE_CLOUD/saves-$$"; while :; do sleep 0.05; done"""
    done = cloud.watch(saving, "--max-hours=0.25")
    assert done.returncode == 75, done.stderr
    assert "--max-hours=0.25" in done.stderr
    assert "saving" in done.stdout
    assert cloud.verbs() == ["create", "delete"]


def test_max_hours_ends_a_watch_that_waits_for_tpus(cloud: Cloud):
    cloud.fake_clock('echo tick >> "$FAKE_CLOUD/ticks"; wc -l < "$FAKE_CLOUD/ticks"')  # a second for each look at it
    (cloud.folder / "states").write_text("WAITING_FOR_RESOURCES\n" * 100)
    done = cloud.watch("exit 0", "--max-hours=0.002")
    assert done.returncode == 75, done.stderr
    assert cloud.starts() == 0
    assert cloud.verbs() == ["create", "delete"]


def test_failing_gcloud_is_polled_with_backoff(cloud: Cloud):
    (cloud.folder / "broken_gcloud").touch()
    sleeps = cloud.folder / "sleeps"
    cloud.program("sleep", 'echo "$1" >> "$FAKE_CLOUD/sleeps"')
    command = ["watch", *TPUS, f"--repo={cloud.origin}", "--ref=main", "--", "true"]
    environment = {**cloud.environment(), "TPU_POD_SECOND_MS": "1000"}
    watching = child_processes.start([SCRIPT, *command], env=environment, stderr=subprocess.DEVNULL)
    while not sleeps.exists() or len(sleeps.read_text().splitlines()) < 11:
        assert watching.poll() is None
        time.sleep(0.02)
    expected = [*(2**n for n in range(1, 10)), 600, 600]
    assert [float(line) for line in sleeps.read_text().splitlines()[:11]] == expected


def test_the_verbs_one_by_one(cloud: Cloud):
    installed = [f"--repo={cloud.origin}", "--ref=main", "--before=touch mounted"]
    assert cloud.run("create", *TPUS).returncode == 0
    assert cloud.run("setup", *BASE, *installed).stdout.count(" ready") == 2
    assert (cloud.folder / "host1" / "mounted").exists()
    assert "pip install --quiet --python .venv/bin/python .[tpu,gcs]" in (cloud.folder / "host1" / "uv").read_text()
    command = ["sh", "-c", 'echo "$1"; echo "$PATH"; pwd; exec sleep 60', "sh", "two  words; $HOME 'quoted'"]
    assert cloud.run("start", *BASE, "--", *command).stdout.count(" started") == 2
    assert cloud.run("start", *BASE, "--", *command).stdout.count(" running") == 2  # not twice
    printed = cloud.run("logs", *BASE).stdout.splitlines()
    home = cloud.folder / "host0"
    assert printed == ["two  words; $HOME 'quoted'", printed[1], f"{home}/bert_jax"]
    assert printed[1].startswith(f"{home}/bert_jax/.venv/bin:")
    assert cloud.run("stop", *BASE).stdout.count("told to stop") == 2
    assert cloud.run("delete", *BASE).returncode == 0
    assert not (cloud.folder / "state").exists()


def test_dry_run_prints_shell_commands_and_calls_nothing(cloud: Cloud):
    options = [*TPUS, "--node-count=4", "--project=p", f"--repo={cloud.origin}", "--ref=main", "--dry-run"]
    command = ["bert-jax", "inspect", "/mnt/a run"]
    done = cloud.run("watch", *options, "--", *command)
    assert done.returncode == 0, done.stderr
    assert not (cloud.folder / "calls").exists()
    calls = [shlex.split(line) for line in done.stdout.splitlines() if not line.startswith("#")]
    assert all(call[0] == "gcloud" for call in calls)
    create = (
        "gcloud compute tpus queued-resources create bert --zone=us-east5-b --project=p --accelerator-type=v6e-8 "
        "--runtime-version=v2-alpha-tpuv6e --node-count=4 --node-prefix=bert --spot --quiet"
    )
    assert done.stdout.splitlines()[1] == create
    start = next(call[-1] for call in calls if "setsid" in call[-1])
    assert "bert-jax inspect '/mnt/a run'" in start
    setup = next(call[-1] for call in calls if "git clone" in call[-1])
    assert git_output(cloud.origin, "rev-parse", "HEAD") in setup  # the commit that main was
    assert calls[-1][3:6] == ["queued-resources", "delete", "bert"]


def git_output(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("verb", ["watch", "create", "setup", "start"])
def test_invalid_settings_are_refused_before_tpus_are_requested(cloud: Cloud, verb: str):
    options = {
        "create": ["--accelerator-type=v6e-999"], "setup": [f"--repo={cloud.origin}", "--ref=nowhere"],
        "start": ["--", "bert-jax", "pretrian"],
        "watch": ["--accelerator-type=v6e-8", f"--repo={cloud.origin}", "--ref=main", "--", "bert-jax", "pretrian"],
    }[verb]  # fmt: skip
    for dry_run in ([], ["--dry-run"]):
        done = cloud.run(verb, *BASE, *dry_run, *options)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("launch/tpu_pod.sh: ")]
        assert next(word for word in ("v6e-999", "--ref=nowhere", "pretrian") if word in line)
    assert not (cloud.folder / "calls").exists()


def test_no_check_requests_tpus_without_checks(cloud: Cloud):
    assert cloud.run("create", *BASE, "--accelerator-type=v6e-999", "--no-check").returncode == 0
    assert cloud.verbs() == ["create"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([], "verb"),
        (["fly", *BASE], "fly"),
        (["create", *TPUS, "--colour=red"], "--colour"),
        (["create", *TPUS, "extra"], "extra"),
        (["create", *BASE], "--accelerator-type"),
        (["create", *BASE, "--accelerator-type=tpu7x-8"], "launch/gke_jobset.sh"),
        (["create", *BASE, "--accelerator-type=tpu7x-8", "--no-check"], "--runtime-version"),
        (["create", *TPUS, "--poll=0"], "--poll=0"),
        (["watch", *TPUS, "--max-hours=long", "--", "x"], "--max-hours=long"),
        (["watch", *TPUS, "--max-hours=0", "--", "x"], "--max-hours=0"),
        (["watch", *TPUS, "--max-hours=1", "--keep", "--", "x"], "--keep"),
        (["create", *TPUS, "--node-count=two"], "--node-count=two"),
        (["create", *TPUS, "--node-count=0"], "--node-count=0"),
        (["start", *BASE], "command"),
        (["stop", "--zone=z"], "--name"),
        (["stop", "--name=n"], "--zone"),
        (["stop", "--name=A;b", "--zone=z"], "--name=A;b"),
        (["stop", "--zone=z", "--name"], "--name=VALUE"),
    ],
)
def test_usage_errors_are_one_line_and_status_2(cloud: Cloud, arguments: list[str], name: str):
    done = cloud.run(*arguments)
    assert done.returncode == 2
    assert name in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (cloud.folder / "calls").exists()


def test_help(cloud: Cloud):
    assert "usage: launch/tpu_pod.sh VERB" in cloud.run("--help").stdout


def test_missing_gcloud_is_refused(cloud: Cloud):
    bare = cloud.folder / "bare"
    bare.mkdir()
    (bare / "bash").symlink_to(shutil.which("bash"))
    done = child_processes.run([SCRIPT, "stop", *BASE], env={"PATH": str(bare)}, timeout=20)
    assert done.returncode == 2
    assert "gcloud" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("gcloud"), reason="gcloud is not installed")
def test_gcloud_parses_every_command(cloud: Cloud, tmp_path: Path):
    options = [
        *TPUS,
        "--project=p",
        "--repo=https://example.org/x.git",
        "--ref=v1",
        "--dry-run",
        "--no-check",
        "--",
        "x",
    ]
    printed = "".join(cloud.run("watch", f"--node-count={nodes}", *options, "--", "x").stdout for nodes in "12")
    calls = [shlex.split(line) for line in printed.splitlines() if not line.startswith("#")]
    calls += [["gcloud", "storage", *words, "--quiet"] for words in (["ls", "gs://b/x"], ["cp", "-", "gs://b/x"])]
    short = {shlex.join("--command=date" if "--command=" in word else word for word in call) for call in calls}
    wrong = "gcloud compute tpus queued-resources delete bert --colour=red"
    (tmp_path / "commands.json").write_text(
        json.dumps([{"id": line, "command_string": line} for line in [*short, wrong]])
    )
    # This parses commands as gcloud does, and calls nothing.
    linted = subprocess.run(
        ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={tmp_path / 'commands.json'}"],
        env={**os.environ, "CLOUDSDK_CONFIG": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    answers = json.loads(linted.stdout)
    assert [answer["success"] for answer in answers] == [True] * len(short) + [False], answers
