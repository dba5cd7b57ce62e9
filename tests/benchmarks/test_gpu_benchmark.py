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
from typing import ClassVar

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


def open_cases(
    modules: SimpleNamespace, folder: Path, key: dict = KEY, deadline: float = float("inf"), call: str = "first"
):
    record = modules.record.Record(folder / "gpu_speed.json", ["benchmarks/record.py"], device=key["device"])
    return modules.cases.Cases(record, COLUMNS, key, deadline, call)


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
    assert not work.runs
    work.measure(open_cases(modules, tmp_path, call="second"))
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
from gpu import run_cases
from on_gpu.cases import Cases
from record import Record
options = dict(zip(sys.argv[3::2], sys.argv[4::2]))
key = json.loads(options["--key"])
record = Record(Path(options["--json-folder"]) / "gpu_speed.json", ["benchmarks/record.py"])
cases = Cases(record, {columns!r}, key, float(options["--deadline"]), options["--call"])

def fail(text):
    with open("failures", "a") as file:
        file.write(text[0])
    raise RuntimeError(text)

def measure():
    cases.measure("good", lambda: {{"speed": 1.0, "process": os.getpid()}})
    cases.measure("bad", lambda: {bad})
    cases.measure("last", lambda: {{"speed": 3.0, "process": os.getpid()}})

sys.exit(run_cases(record, key, measure))
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


@pytest.mark.parametrize("error", ["ValueError", "INTERNAL: launch failed", "CUDA_ERROR_ILLEGAL_ADDRESS"])
def test_a_failed_case_is_tried_once_per_call(
    modules: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
):
    monkeypatch.chdir(tmp_path)
    for call in (1, 2):
        assert run_fake_part(modules, tmp_path, monkeypatch, f"fail({error!r})", 60) == "failed in some cases"
        assert (tmp_path / "failures").read_text() == call * error[0]
        found = rows(tmp_path)
        assert found["bad"]["outcome"] == f"failed: RuntimeError: {error}"
        assert found["last"]["speed"] == 3.0
        assert (found["good"]["process"] == found["last"]["process"]) == (error == "ValueError")
    assert run_fake_part(modules, tmp_path, monkeypatch, "{'speed': 2.0}", 60) == "complete"
    assert {case: row["speed"] for case, row in rows(tmp_path).items()} == {"good": 1.0, "bad": 2.0, "last": 3.0}


def test_a_part_is_complete_after_an_unusable_process_in_its_last_case(modules: SimpleNamespace, tmp_path: Path):
    work = Work(fits={"speed": 2.0}, last=RuntimeError("RESOURCE_EXHAUSTED: CUDA_ERROR_OUT_OF_MEMORY"))

    def process() -> int:
        cases = open_cases(modules, tmp_path)
        return modules.gpu.run_cases(cases._record, KEY, lambda: work.measure(cases))

    assert [process(), process()] == [modules.cases.FRESH_PROCESS, 0]
    assert work.runs == list(work.results)
    assert modules.gpu.is_complete(tmp_path / "gpu_speed.json", KEY)
    assert rows(tmp_path)["last"]["outcome"] == "out of memory"


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


def test_compilations_do_not_read_a_cache(modules: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    options = argparse.Namespace(work=tmp_path, rehearse=False)
    assert "JAX_COMPILATION_CACHE_DIR" not in modules.gpu._environment(options)


def test_the_curve_needs_the_packages_of_its_text(modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(modules.gpu.importlib.util, "find_spec", lambda name: None)
    curve = next(part for part in modules.gpu.PARTS if part.name == "curve")
    absent = curve.missing(argparse.Namespace(data="", rehearse=False))
    assert {"tokenizers", "matplotlib"} <= set(absent)
    absent = curve.missing(argparse.Namespace(data="dataset", rehearse=False))
    assert "tokenizers" in absent
    assert "matplotlib" not in absent


def test_the_clone_is_measured_where_another_bert_jax_is_installed(tmp_path: Path):
    installed = tmp_path / "packages" / "bert_jax"
    (installed / "configs").mkdir(parents=True)
    for folder in (installed, installed / "configs"):
        (folder / "__init__.py").write_text("")
    python = tmp_path / "python"
    code = "import bert_jax, bert_jax.configs.bert_large as config; print(bert_jax.__file__, config.__file__)"
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then exec {sys.executable} "$@"; fi\nexec {sys.executable} -c "{code}"\n'
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", BENCHMARKS / "gpu.sh"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True,
        env={**os.environ, "PYTHON": str(python), "PYTHONPATH": str(installed.parent)},
    )  # fmt: skip
    package, config = done.stdout.split()
    assert str(tmp_path) not in package
    assert config.endswith("bert_jax/configs/bert_large.py")


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


@pytest.mark.parametrize("module", ["agreement", "beside_torch", "curve", "first_check", "speed"])
def test_parts_can_be_imported(module: str):
    assert importlib.import_module(f"on_gpu.{module}")


class FakeStep:
    """Compiled step whose memory grows with the rows of a microbatch."""

    compiled: ClassVar[list[float]] = []

    def __init__(self, setting):
        self.setting, self.rows = setting, setting.rows / setting.microbatches
        self.peak_gib = 4.4 + 0.8e-3 * self.rows * setting.seq_len
        self.batch = {"input_ids": np.zeros((setting.microbatches, int(self.rows), 1))}
        self.compiled.append(self.rows)


@pytest.fixture
def compiled(modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Rows of the steps that are compiled."""
    monkeypatch.setattr(FakeStep, "compiled", [])
    monkeypatch.setattr(modules.steps, "Step", FakeStep)
    monkeypatch.setattr(modules.steps, "bytes_limit", lambda device: 70.0)
    return FakeStep.compiled


@pytest.mark.parametrize(
    ("seq_len", "limit", "rows"),
    [(128, 70, 512), (128, 123, 1024), (128, 165, 1536), (512, 70, 128), (512, 123, 256), (512, 165, 384)],
)
def test_the_largest_batch_that_fits_is_found_with_few_compilations(
    modules: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    compiled: list[float],
    seq_len: int,
    limit: int,
    rows: int,
):
    steps, scale = modules.steps, importlib.import_module("on_gpu.scale").FULL
    monkeypatch.setattr(steps, "bytes_limit", lambda device: float(limit))
    settings = [steps.Setting("bert_large", candidate, seq_len) for candidate in scale.batches[seq_len]]
    assert steps.largest(settings, lambda step: step.rows) == rows
    assert len(compiled) <= 2
    assert all(4.4 + 0.8e-3 * rows * seq_len < 1.3 * limit for rows in compiled)
    monkeypatch.setattr(steps, "bytes_limit", lambda device: 4.0)
    with pytest.raises(MemoryError) as error:
        steps.largest(settings, lambda step: step.rows)
    assert modules.cases.outcome_of(error.value) == "out of memory"


def test_a_batch_that_runs_out_of_memory_is_followed_by_a_smaller_one(
    modules: SimpleNamespace, compiled: list[float], monkeypatch: pytest.MonkeyPatch
):
    steps = modules.steps
    settings = [steps.Setting("bert_large", rows, 128) for rows in (384, 256, 128)]
    compile_ = FakeStep.__init__

    def fail(rows: float, most: int) -> None:
        if rows > most:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")

    def compile_at_most_256(step: FakeStep, setting) -> None:
        compile_(step, setting)
        fail(step.rows, 256)

    def measure(step: FakeStep) -> float:
        fail(step.rows, 128)
        return step.rows

    monkeypatch.setattr(FakeStep, "__init__", compile_at_most_256)
    assert steps.largest(settings, measure) == 128
    assert compiled == [384, 256, 128]
    with pytest.raises(ZeroDivisionError):
        steps.largest(settings, lambda step: 1 / 0)


def test_the_curve_has_the_steps_that_the_time_allows(
    modules: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[float]
):
    curve = modules.curve

    def rounds(step: FakeStep, seconds: float):
        if step.rows > 256:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return lambda: 0.5

    monkeypatch.setattr(curve, "Rounds", rounds)
    scale = importlib.import_module("on_gpu.scale").FULL
    with pytest.raises(modules.cases.OutOfTimeError):
        curve.plan_run(tmp_path / "first", scale, 100.0)
    plan = curve.plan_run(tmp_path / "first", scale, 560.0)
    assert 990 <= plan["total_steps"] <= 1000
    assert plan["gradient_accumulation"] == 4
    assert curve.plan_run(tmp_path / "first", scale, 10.0) == plan  # resumed: the learning rate ends with the steps
    assert curve.plan_run(tmp_path / "second", scale, 1e6)["total_steps"] == 4000


def test_only_the_same_key_and_dataset_resume_the_curve(
    modules: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    workdirs: list[str] = []
    monkeypatch.setattr(modules.curve, "plan_run", lambda *_: {"total_steps": 1})
    monkeypatch.setattr(modules.curve, "pretrain", lambda config, workdir: workdirs.append(workdir))
    scale = importlib.import_module("on_gpu.scale").FULL
    others = [{**KEY, name: "other"} for name in KEY]
    for index, (key, data) in enumerate([(KEY, "a"), (KEY, "a"), (KEY, "b"), *((key, "a") for key in others)]):
        cases = open_cases(modules, tmp_path / str(index), key)
        modules.curve.curve(cases, cases._record, scale, tmp_path, data, 1.0, float("inf"))
        assert [row["outcome"] for row in rows(tmp_path / str(index)).values()] == ["measured"]
    assert workdirs[0] == workdirs[1]
    assert len(set(workdirs)) == len(workdirs) - 1 == 5


def test_minutes_of_the_curve_are_those_of_training(modules: SimpleNamespace):
    times = {20: 100, 40: 160, 60: 220, 80: 7500, 100: 7560}  # steps at 3 s, with a pause before step 80
    metrics = [{"step": step, "time": float(time), "tokens_per_second": 1.0} for step, time in times.items()]
    metrics.insert(3, {"step": 60, "time": 250.0, "split": "eval"})
    metrics.append({"step": 100, "time": 7600.0, "split": "eval"})
    assert [row["minutes"] for row in modules.curve.evaluations(metrics, 128)] == pytest.approx([2.0, 4.0])
    assert modules.curve.summary(metrics, 128)["minutes"] == pytest.approx(4.0)
    assert modules.curve.summary([], 128)["minutes"] == 0.0


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
    results = {path.stem: path for path in (tmp_path / "rehearsal").glob("gpu_*.json")}
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
