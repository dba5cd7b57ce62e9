"""Processes with a network of their own, one of which is cut off or slow."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from support.helpers import REPOSITORY


@pytest.fixture
def lost_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    module = importlib.import_module("lost_hosts")
    try:
        with module.connected_hosts(2, tmp_path / "names"):
            pass
    except module.NotPermitted as error:
        pytest.skip(str(error))
    module._make_inputs(tmp_path / "inputs")
    return module


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_cut_off_ends_the_run_and_writes_nothing(victim: int, lost_hosts: ModuleType, tmp_path: Path):
    trial = lost_hosts.run_trial(tmp_path, "cut", victim, 2, 0)
    assert not trial.wrong
    assert max(trial.seconds) < 60


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", ["slow", "cut briefly"])
def test_a_fault_that_passes_ends_nothing(fault: str, lost_hosts: ModuleType, tmp_path: Path):
    assert not lost_hosts.run_trial(tmp_path, fault, 1, 2, 0).wrong
