"""A local workdir of several processes: one folder for all, or none."""

import subprocess
import threading
from pathlib import Path

import pytest
from etils import epath
from support import child_processes, helpers

from bert_jax.runtime import shared_workdir


def start(dataset: Path, folders: list[Path]) -> list[subprocess.Popen]:
    """A run of one process in each of `folders`, which are all told the same workdir."""
    together = {"JAX_COORDINATOR_ADDRESS": helpers.free_address(), "JAX_NUM_PROCESSES": str(len(folders))}
    flags = helpers.flags({"data.path": dataset, "total_steps": 1000, "model.max_position_embeddings": 64})
    return [
        child_processes.start(
            helpers.command("pretrain", "--config=bert_tiny", "--workdir=run", *flags), cwd=folder,
            stderr=subprocess.PIPE, text=True,
            env=helpers.child_environment(2, **together, JAX_PROCESS_ID=str(number)),
        )
        for number, folder in enumerate(folders)
    ]  # fmt: skip


def test_a_file_that_shows_late_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_workdir, "WAIT_SECONDS", 0.3)
    assert not shared_workdir._appears(epath.Path(tmp_path / "run" / "never"))
    monkeypatch.setattr(shared_workdir, "WAIT_SECONDS", 30.0)
    threading.Timer(0.3, lambda: (tmp_path / "run").mkdir() or (tmp_path / "run" / "late").touch()).start()
    assert shared_workdir._appears(epath.Path(tmp_path / "run" / "late"))


@pytest.mark.long
def test_workdir_that_is_not_shared_is_refused_by_all_processes(dataset_dir, tmp_path: Path):
    """Simulates two hosts that get the same path, each on a disk of its own."""
    hosts = [tmp_path / "a", tmp_path / "b"]
    for host in hosts:
        host.mkdir()
    for process, host in zip(start(dataset_dir, hosts), hosts, strict=True):
        written = process.communicate(timeout=200)[1]
        assert process.returncode == 2, written
        (line,) = (line for line in written.splitlines() if line.startswith("bert-jax pretrain:"))
        assert f"--workdir={host / 'run'}: " in line
        assert "gs://" in line
        assert "Traceback" not in written
    assert [path.name for path in tmp_path.rglob("*")].count("run") == 1
    assert not list((hosts[0] / "run").iterdir())
