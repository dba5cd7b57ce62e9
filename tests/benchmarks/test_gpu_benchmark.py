"""The GPU benchmark: what it resumes, what it records of failures, when it stops; and a rehearsal of all parts."""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from support.helpers import REPOSITORY

from bert_jax.batch import pretraining_shapes

BENCHMARKS = REPOSITORY / "benchmarks"
KEY = {"device": "NVIDIA H200", "jax": "0.12.0", "code": "0123"}
COLUMNS = {"case": "{case}", "outcome": "{outcome}", "speed": "{speed:.1f}"}


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def modules() -> SimpleNamespace:
    names = ("on_gpu.cases", "on_gpu.steps", "on_gpu.curve", "gpu", "record")
    return SimpleNamespace(**{name.rpartition(".")[2]: importlib.import_module(name) for name in names})


class Work:
    """Cases that count how often they run."""

    def __init__(self, **results: object):
        self.results, self.runs = results, []

    def measure(self, cases) -> None:
        for case in self.results:
            cases.measure(case, lambda case=case: self._run(case))

    def _run(self, case: str) -> dict:
        self.runs.append(case)
        result = self.results[case]
        if isinstance(result, Exception):
            raise result
        return result


def open_cases(modules: SimpleNamespace, folder: Path, key: dict = KEY, deadline: float = float("inf")):
    record = modules.record.Record(folder / "gpu_speed.json", ["benchmarks/record.py"], device=key["device"])
    return modules.cases.Cases(record, COLUMNS, key, deadline)


def rows(folder: Path) -> dict[str, dict]:
    content = json.loads((folder / "gpu_speed.json").read_text())
    return {row["case"]: row for row in content["tables"]["cases"]["rows"]}


def test_final_outcomes_are_not_measured_again(modules: SimpleNamespace, tmp_path: Path):
    work = Work(
        fits={"speed": 2.0},
        large=RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes"),
        refused=modules.cases.UnsupportedError("attention=cudnn: does not support dropout"),
        broken=OSError("/secret/place/file: gone"),
    )
    work.measure(open_cases(modules, tmp_path))
    found = rows(tmp_path)
    outcomes = {case: row["outcome"] for case, row in found.items()}
    assert outcomes.pop("broken").startswith("failed: OSError")
    assert "secret" not in found["broken"]["outcome"]
    assert outcomes == {"fits": "measured", "large": "out of memory", "refused": "not supported"}
    assert all(row.items() >= KEY.items() and row["date"] for row in found.values())
    work.runs.clear()
    work.measure(open_cases(modules, tmp_path))
    assert work.runs == ["broken"]
    assert rows(tmp_path)["fits"]["speed"] == 2.0
    work.runs.clear()
    work.measure(open_cases(modules, tmp_path, {**KEY, "device": "NVIDIA A100"}))
    assert work.runs == list(work.results)


def test_no_case_starts_after_the_deadline(modules: SimpleNamespace, tmp_path: Path):
    Work(first={"speed": 2.0}).measure(open_cases(modules, tmp_path))
    late = Work(first={"speed": 3.0}, second={"speed": 4.0})
    with pytest.raises(modules.cases.OutOfTimeError):
        late.measure(open_cases(modules, tmp_path, deadline=time.time() - 1))
    assert not late.runs
    assert {case: row["speed"] for case, row in rows(tmp_path).items()} == {"first": 2.0}


PART = """
import json, os, signal, sys, time
sys.path.insert(0, {benchmarks!r})
from pathlib import Path
from on_gpu.cases import Cases
from record import Record
options = dict(zip(sys.argv[3::2], sys.argv[4::2]))
key = json.loads(options["--key"])
record = Record(Path(options["--json-folder"]) / "gpu_speed.json", ["benchmarks/record.py"])
cases = Cases(record, {columns!r}, key, float(options["--deadline"]))
cases.measure("good", lambda: {{"speed": 1.0}})
cases.measure("bad", lambda: {bad})
cases.measure("last", lambda: {{"speed": 3.0}})
record.content["complete"] = key
record.write()
"""


def run_fake_part(modules: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch, bad: str, seconds: float):
    """Runs a part whose second case is `bad`; returns its outcome."""
    script = folder / "part.py"
    script.write_text(PART.format(benchmarks=str(BENCHMARKS), columns=COLUMNS, bad=bad))
    monkeypatch.setattr(modules.gpu, "SCRIPT", script)
    options = argparse.Namespace(
        json_folder=folder, work=folder, data="", curve_minutes=1.0, rehearse=False, minutes=10.0
    )
    part = modules.gpu.Part("speed", (), 5.0)
    return modules.gpu._run(part, options, KEY, time.time() + seconds, dict(os.environ))


def test_a_crashed_case_is_recorded_and_the_next_one_follows(
    modules: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert run_fake_part(modules, tmp_path, monkeypatch, "os.kill(os.getpid(), signal.SIGSEGV)", 60) == "complete"
    outcomes = {case: row["outcome"] for case, row in rows(tmp_path).items()}
    assert outcomes == {"good": "measured", "bad": "crashed", "last": "measured"}
    written = (tmp_path / "gpu_speed.json").stat().st_mtime_ns
    assert run_fake_part(modules, tmp_path, monkeypatch, "1 / 0", 60) == "complete"
    assert (tmp_path / "gpu_speed.json").stat().st_mtime_ns == written
    assert not modules.gpu.is_complete(tmp_path / "gpu_speed.json", {**KEY, "code": "4567"})


def test_a_part_is_stopped_at_the_deadline_and_continued(
    modules: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hang = "Path('pid').write_text(str(os.getpid())) and time.sleep(600)"
    monkeypatch.chdir(tmp_path)
    began = time.time()
    assert run_fake_part(modules, tmp_path, monkeypatch, hang, 5) == modules.cases.INTERRUPTED
    assert time.time() - began < 60
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    outcomes = {case: row["outcome"] for case, row in rows(tmp_path).items()}
    assert outcomes == {"good": "measured", "bad": modules.cases.INTERRUPTED}
    assert run_fake_part(modules, tmp_path, monkeypatch, "{'speed': 2.0}", 60) == "complete"
    assert {case: row["speed"] for case, row in rows(tmp_path).items()} == {"good": 1.0, "bad": 2.0, "last": 3.0}


def test_a_part_that_fails_outside_of_its_cases_ends(
    modules: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert run_fake_part(modules, tmp_path, monkeypatch, "](", 60).startswith("failed with status")


def test_a_machine_without_a_gpu_is_refused(tmp_path: Path):
    command = [sys.executable, BENCHMARKS / "gpu.py", "all", "--json-folder", tmp_path, "--work", tmp_path]
    done = subprocess.run(
        command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "jax[cuda13]" in done.stdout
    assert not list(tmp_path.glob("gpu_*.json"))


@pytest.mark.parametrize("seq_len", [128, 512])
@pytest.mark.parametrize("packed", [False, True])
def test_batches_look_like_the_loaders(modules: SimpleNamespace, seq_len: int, packed: bool):
    steps = modules.steps
    batch, sequences = steps.make_batch(steps.Setting("bert_large", 16, seq_len, packed))
    slots = batch["masked_positions"].shape[1]
    per_row = steps.MAX_SEQUENCES if packed else 1
    assert {name: (array.shape, array.dtype.type) for name, array in batch.items()} == pretraining_shapes(
        16, seq_len, slots, per_row
    )
    assert packed or slots == {128: 20, 512: 76}[seq_len]
    assert sequences == batch["next_sentence_weights"].sum() == np.sort(batch["sequence_ids"]).max(axis=1).sum()
    assert (sequences > 24) if packed and seq_len == 512 else sequences >= 16
    row, slot = np.nonzero(batch["masked_weights"])
    places = list(zip(row, batch["masked_positions"][row, slot], strict=True))
    assert len(set(places)) == len(places)
    assert all(batch["sequence_ids"][place] for place in places)
    assert len(places) == pytest.approx(0.15 * (batch["sequence_ids"] > 0).sum(), rel=0.05)


def test_a_step_is_compiled_and_timed(modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    steps = modules.steps
    monkeypatch.setattr(steps, "VOCAB_SIZE", 1100)
    setting = steps.Setting("bert:L1_H64", 4, 128, packed=True, microbatches=2, overrides=(("dtype", "float32"),))
    step = steps.Step(setting)
    row = steps.rates(step, steps.seconds_per_step(step, rounds=2, seconds=0.0))
    assert row["rows"] == 4
    assert row["mfu"] is None  # a CPU has no known peak
    assert row["sequences_per_second"] * row["step_ms"] == pytest.approx(1000 * step.sequences)
    state, metrics = step(step.spec.make())
    assert float(metrics["mlm_loss"]) == pytest.approx(np.log(1100), rel=0.05)
    assert int(state.step) == 1


@pytest.mark.parametrize("module", ["agreement", "beside_torch", "curve", "speed"])
def test_parts_can_be_imported(module: str):
    assert importlib.import_module(f"on_gpu.{module}")


def test_the_largest_batch_that_fits_is_found_with_few_compilations(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    compiled = []

    class Step:
        def __init__(self, setting):
            compiled.append(setting.rows)
            self.setting, self.peak_gib = setting, 4 + 0.25 * setting.rows

    steps = modules.steps
    monkeypatch.setattr(steps, "Step", Step)
    monkeypatch.setattr(steps, "bytes_limit", lambda device: 40.0)
    settings = [steps.Setting("bert_large", rows, 128) for rows in (512, 256, 192, 128, 64)]
    assert steps.largest(settings).setting.rows == 128
    assert compiled == [512, 128]
    monkeypatch.setattr(steps, "bytes_limit", lambda device: 4.0)
    with pytest.raises(MemoryError) as error:
        steps.largest(settings)
    assert modules.cases.outcome_of(error.value) == "out of memory"


def test_the_curve_has_the_steps_that_the_time_allows(
    modules: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    curve = modules.curve
    batch = {"input_ids": np.zeros((4, 256, 128))}
    monkeypatch.setattr(curve, "largest", lambda settings: SimpleNamespace(batch=batch))
    monkeypatch.setattr(curve, "Rounds", lambda step, seconds: lambda: 0.5)
    scale = importlib.import_module("on_gpu.scale").FULL
    with pytest.raises(modules.cases.OutOfTimeError):
        curve.plan_run(tmp_path, scale, "data", 100.0)
    plan = curve.plan_run(tmp_path, scale, "data", 560.0)
    assert 990 <= plan["total_steps"] <= 1000
    assert plan["gradient_accumulation"] == 4
    assert curve.plan_run(tmp_path, scale, "data", 10.0) == plan  # resumed: the learning rate ends with the steps
    assert curve.plan_run(tmp_path, scale, "other", 1e6)["total_steps"] == 4000


def section(monkeypatch: pytest.MonkeyPatch, folder: Path, record: ModuleType) -> str:
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs"))
    monkeypatch.setattr(record, "RESULTS", folder)
    return importlib.import_module("generators.result_pages").gpu_section()


def test_the_page_shows_results_or_says_that_there_are_none(
    modules: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert section(monkeypatch, tmp_path, modules.record).startswith("No run on a GPU")
    Work(fits={"speed": 2.0}, broken=ValueError("bad")).measure(open_cases(modules, tmp_path))
    shown = section(monkeypatch, tmp_path, modules.record)
    assert "| fits | measured | 2.0 |" in shown
    assert "| broken | failed: ValueError: bad |  |" in shown
    assert "NVIDIA H200" in shown


@pytest.mark.long
def test_rehearsal_measures_every_part_and_a_rerun_none(modules: SimpleNamespace, tmp_path: Path):
    command = ["bash", BENCHMARKS / "gpu.sh", "--rehearse", "--work", tmp_path, "--minutes", "25"]
    environment = {**os.environ, "PYTHON": sys.executable}
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    results = {path.stem: path for path in (tmp_path / "rehearsal").glob("*.json")}
    assert set(results) == {f"gpu_{part.name}" for part in modules.gpu.PARTS}
    for path in results.values():
        content = json.loads(path.read_text())
        measured = [row["outcome"] == "measured" for row in content["tables"]["cases"]["rows"]]
        assert all(measured) or path.stem in ("gpu_parity", "gpu_attention")  # cuDNN needs a GPU
        assert any(measured)
    parity = json.loads(results["gpu_parity"].read_text())["tables"]["cases"]["rows"][0]
    assert max(parity["first_loss"], parity["last_loss"], parity["grad_norm"], parity["update"]) < 1e-5
    determinism = json.loads(results["gpu_determinism"].read_text())["tables"]["cases"]["rows"][0]
    assert determinism["same_process"] == determinism["other_process"] == "bit-identical"
    curve = json.loads(results["gpu_curve"].read_text())["tables"]["curve"]["rows"]
    assert curve[-1]["mlm_loss"] < curve[0]["mlm_loss"]
    written = {path: path.stat().st_mtime_ns for path in results.values()}
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in results.values()} == written
