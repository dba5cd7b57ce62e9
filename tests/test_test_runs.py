"""The tests' own machinery: every process that a test starts ends with it, and what is skipped is said."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import child_processes
from support.skip_summary import COMMANDS, PIP, find_command, summarize

HERE = Path(__file__).parent


def run_pytest(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess:
    """Runs pytest on one generated file, with the plugins of these tests."""
    (folder / "test_generated.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  long: minutes\n  slurm: a real Slurm\n")
    environment = {**os.environ, "PYTHONPATH": str(HERE), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "support.child_processes", "-p", "support.skip_summary"]
    command += ["-p", "pytest_timeout", "-p", "no:cacheprovider"]
    return child_processes.run([*command, *options, "test_generated.py"], cwd=folder, env=environment, timeout=60)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


LEAVES_PROCESSES = """
import pathlib, subprocess, time
import pytest
from support import child_processes

SCRIPT = "setsid sleep 300 & echo $! >> pids; sleep 300 & echo $! >> pids; echo $$ >> pids; wait"

PIDS = pathlib.Path("pids")

def start():
    before = len(PIDS.read_text().split()) if PIDS.exists() else 0
    child_processes.start(["bash", "-c", SCRIPT], env={"PATH": "/usr/bin:/bin"})
    while not PIDS.exists() or len(PIDS.read_text().split()) < before + 3:
        time.sleep(0.01)

def test_fails():
    start()
    assert False

@pytest.mark.timeout(1)
def test_times_out():
    start()
    time.sleep(300)

def test_leaves():
    start()
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_what_a_test_starts_ends_with_it(tmp_path: Path):
    done = run_pytest(tmp_path, LEAVES_PROCESSES)
    assert "2 failed, 1 passed" in done.stdout, done.stdout
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    try:
        assert len(pids) == 9
        assert not [pid for pid in pids if is_running(pid)]
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)


def test_hanging_command_is_killed_with_its_children():
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        child_processes.run(["bash", "-c", "setsid sleep 300 & wait"], timeout=0.5)
    assert time.monotonic() - began < 10


def test_tests_start_processes_through_the_support_module():
    allowed = {"child_processes.py", "slurm_cluster.py"}  # the latter ends its own
    found = [path for path in HERE.rglob("*.py") if re.search(r"\bPopen\((?!\))", path.read_text())]
    assert {path.name for path in found} == allowed


SKIPS = """
import os, pytest

@pytest.fixture
def data():
    pytest.skip("needs real data: set BERT_JAX_DATA to its folder")

def test_passes(): pass
def test_data(data): pass
def test_other_data(data): pass
def test_torch(): pytest.importorskip("no_torch", reason="needs the parity extra: torch and transformers")
def test_beam(): pytest.skip("could not import 'apache_beam': No module named 'apache_beam'")
def test_libtpu(): pytest.importorskip("no_libtpu", reason="needs the tpu-aot extra")
def test_machine(): pytest.skip("a small disk cannot be mounted here")

@pytest.mark.long
@pytest.mark.parametrize("number", range(3))
def test_long(number): pass

@pytest.mark.slurm
def test_slurm(): pass
"""
NOT_RUN = {
    "2  needs real data: set BERT_JAX_DATA to its folder: BERT_JAX_DATA=FOLDER make test",
    f"1  needs the parity extra: torch and transformers: {PIP} '.[parity]'",
    f"1  could not import 'apache_beam': No module named 'apache_beam': {PIP} '.[beam]'",
    f"1  needs the tpu-aot extra: {PIP} '.[tpu-aot]'",
    "1  a small disk cannot be mounted here",
    "3  marked long: make test-long",
    "1  marked slurm: make test-slurm",
}


def test_summary_lists_skipped_tests_and_the_commands_that_run_them(tmp_path: Path):
    done = run_pytest(tmp_path, SKIPS, "-m", "not long and not slurm")
    assert done.returncode == 0, done.stdout
    lines = {line.strip() for line in done.stdout.splitlines()}
    assert lines >= NOT_RUN, done.stdout


def test_module_skipped_by_every_worker_counts_once():
    report = SimpleNamespace(nodeid="tests/test_x.py", longrepr=("test_x.py", 3, "Skipped: needs the tpu-aot extra"))
    other = SimpleNamespace(nodeid="tests/test_y.py::test_a", longrepr=["test_y.py", 3, "Skipped: needs libtpu"])
    assert summarize([report, report, other]) == [f"    2  needs libtpu; needs the tpu-aot extra: {PIP} '.[tpu-aot]'"]


def test_a_run_that_skips_nothing_says_nothing(tmp_path: Path):
    assert "not run" not in run_pytest(tmp_path, "def test_passes(): pass\n").stdout


def test_every_skip_reason_names_the_machine_or_a_command():
    machine = {
        "a disk cannot be mounted here", "a small disk cannot be mounted here", "gcc is not installed", "needs /proc",
        "needs glibc", "requires prlimit",
    }  # fmt: skip
    reasons = set()
    for path in HERE.rglob("test_*.py"):
        if path == Path(__file__):
            continue
        text = path.read_text()
        reasons |= set(re.findall(r'(?:(?<!or)skip\(|reason=)"([^"]+)"', text))
        reasons |= {f"could not import {name!r}" for name in re.findall(r'importorskip\("(\w+)[\w.]*"\)', text)}
    assert reasons
    assert {reason for reason in reasons if not find_command(reason)} <= machine
    extras = re.findall(r'^        "([\w-]+)": \[', (HERE.parent / "setup.py").read_text(), flags=re.MULTILINE)
    assert {name for _, command in COMMANDS for name in re.findall(r"'\.\[([\w-]+)\]'", command)} <= set(extras)
