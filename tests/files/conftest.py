"""Faults below the file layer, and the outputs that commands under faults read."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import child_processes, helpers
from support.faults import LIMIT, TRAINING

from bert_jax.cli import main


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


@pytest.fixture(scope="module")
def made(dataset_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, its export, a classifier and lines of text."""
    folder = tmp_path_factory.mktemp("made")
    flags = helpers.flags({**TRAINING, "data.path": dataset_dir})
    assert main(["pretrain", "--config=bert_tiny", f"--workdir={folder / 'run'}", *flags]) == 0
    assert main(["export", "--checkpoint", str(folder / "run"), "--output", str(folder / "hf")]) == 0
    (folder / "task.csv").write_text("text,label\n" + "the ship sees the storm .,a\nthe fox finds the tree .,b\n" * 8)
    (folder / "lines.txt").write_text("the ship sees the storm .\nthe fox .\n")
    task = helpers.flags({
        "init": folder / "run", "data.path": folder, "task.train": "task.csv", "task.dev": "task.csv",
        "task.max_seq_len": 16, "num_epochs": 1, "global_batch_size": 8,
    })  # fmt: skip
    assert main(["finetune", "--config=finetune/text", f"--workdir={folder / 'classifier'}", *task]) == 0
    return folder
