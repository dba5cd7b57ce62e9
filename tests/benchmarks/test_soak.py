"""The verdict of the soak: a slow leak is found below the ups and downs of evaluations."""

import importlib
from types import ModuleType

import pytest
from support.helpers import REPOSITORY


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    return importlib.import_module("soak")


def samples(soak: ModuleType, leak: float) -> list[dict]:
    """Three hours: memory is 100 higher during one sample of three, and handles double while it is."""
    flat = dict.fromkeys(soak.QUANTITIES.values(), 10.0)
    return [
        {**flat, "seconds": 10.0 * number, "memory_mib": 500 + 100 * (number % 3 == 0) + leak * number / 1080,
         "handles": 7 + 20 * (number % 50 == 0), "report_mib": 70 + number / 100}
        for number in range(1080)
    ]  # fmt: skip


@pytest.mark.parametrize(("leak", "is_flat"), [(0.0, True), (10.0, True), (30.0, False)])
def test_memory_that_grows_is_found(leak: float, is_flat: bool, soak: ModuleType):
    rows = {row["quantity"]: row for row in soak.evaluate(samples(soak, leak))}
    assert rows.keys() == soak.QUANTITIES.keys()
    assert rows["memory of the run, MiB"]["is_flat"] == is_flat
    assert all(row["is_flat"] for name, row in rows.items() if name != "memory of the run, MiB")


def test_warm_up_does_not_count(soak: ModuleType):
    found = samples(soak, 0.0)
    for sample in found[:100]:
        sample["memory_mib"] = 100.0
    (memory,) = [row for row in soak.evaluate(found) if row["quantity"] == "memory of the run, MiB"]
    assert memory["lowest"] == 500
