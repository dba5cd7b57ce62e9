"""Every process that a test starts ends with it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import child_processes

HERE = Path(__file__).parent


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
    (tmp_path / "test_generated.py").write_text(LEAVES_PROCESSES)
    (tmp_path / "pytest.ini").touch()
    environment = {**os.environ, "PYTHONPATH": str(HERE), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "support.child_processes", "-p", "pytest_timeout"]
    done = child_processes.run([*command, "test_generated.py"], cwd=tmp_path, env=environment, timeout=60)
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
