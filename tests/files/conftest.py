"""Faults below the file layer."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import child_processes, helpers
from support.faults import LIMIT


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library for LD_PRELOAD that makes reads and writes fail."""
    if sys.platform != "linux" or shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    target = tmp_path_factory.mktemp("library") / "faulty_disk.so"
    source = Path(helpers.__file__).with_name("faulty_disk.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", target, source, "-ldl"], check=True)
    return target


@pytest.fixture
def run(library: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs a command whose `call` ("read", "write") fails for paths that contain `part`."""

    def run(
        words: list[object], call: str = "", part: object = "", number: int = 0, seconds: int = 0
    ) -> subprocess.CompletedProcess:
        faults = {"LD_PRELOAD": str(library), "FAULT_CALL": call, "FAULT_PATH": str(part)} if call else {}
        faults |= {"FAULT_ERRNO": str(number)} if number else {}
        faults |= {"FAULT_SECONDS": str(seconds)} if seconds else {}
        return child_processes.run(helpers.command(*words), env=helpers.child_environment(**faults), timeout=LIMIT)

    return run
