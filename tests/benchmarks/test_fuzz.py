"""Damaged files end in a refusal or are read: some of each kind here, more in the long test, most in the campaign."""

import importlib
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.helpers import REPOSITORY

from bert_jax.errors import BertJaxError

INPUTS = 25


@pytest.fixture
def fuzzed(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    return importlib.import_module("fuzzed.targets"), importlib.import_module("fuzzed.mutations")


def names() -> list[str]:
    sys.path.insert(0, str(REPOSITORY / "benchmarks"))
    try:
        return list(importlib.import_module("fuzzed.targets").TARGETS)
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize("name", names())
def test_readers_refuse_or_read_damaged_files(name: str, fuzzed, tmp_path: Path):
    targets, mutations = fuzzed
    target, rng = targets.TARGETS[name], random.Random(0)
    target.prepare(tmp_path)
    path, seeds = tmp_path / target.name, target.seeds()
    for seed in seeds:
        path.write_bytes(seed)
        target.read(path)
    for _ in range(INPUTS):
        path.write_bytes(mutations.mutate(rng.choice(seeds), seeds, rng))
        try:
            target.read(path)
        except BertJaxError:
            continue


def test_mutations_change_the_seed_and_repeat(fuzzed):
    _, mutations = fuzzed
    seed, others = b'{"text": "a film", "label": 12}', [b"another", b"file"]
    made = [mutations.mutate(seed, others, random.Random(number)) for number in range(200)]
    assert made == [mutations.mutate(seed, others, random.Random(number)) for number in range(200)]
    assert len({*made}) > 190
    assert made.count(seed) < 5


@pytest.mark.parametrize("engine", ["random", "coverage"])
def test_a_reader_that_raises_is_a_finding(engine: str, tmp_path: Path):
    """A round of a reader that cannot decode what it reads."""
    if engine == "coverage":
        pytest.importorskip("atheris", reason="needs the dev extra: atheris")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from fuzzed import rounds\n"
        "from fuzzed.targets import TARGETS, Target\n"
        "TARGETS.clear(); TARGETS['text'] = Target('t.txt', lambda: [b'plain text'] , lambda p: p.read_text('ascii'))\n"
        "from argparse import Namespace; from pathlib import Path\n"
        "class Pipe:\n"
        "    def send(self, row): print(row['inputs'], row['accepted'], row['findings'], flush=True)\n"
        "folder = Path(sys.argv[2]); (folder / 'findings').mkdir()\n"
        "options = Namespace(seconds=0.5, limit=5.0, memory=512.0, folder=folder)\n"
        "rounds.run_round('text', sys.argv[3], 0, options, Pipe())\n"
    )
    command = [sys.executable, "-c", script, str(REPOSITORY / "benchmarks"), str(tmp_path), engine]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    inputs, accepted, findings = map(int, done.stdout.splitlines()[-1].split())
    assert 0 < accepted < inputs
    assert findings == 1, "one for each place in the code"
    (report,) = (tmp_path / "findings").glob("*.txt")
    assert "UnicodeDecodeError" in report.read_text()
    with pytest.raises(UnicodeDecodeError):
        report.with_suffix(".input").read_text("ascii")


def test_inputs_that_reach_new_lines_are_kept(tmp_path: Path):
    """A later round of the engine "coverage" starts from them."""
    pytest.importorskip("atheris", reason="needs the dev extra: atheris")
    script, results = str(REPOSITORY / "benchmarks" / "fuzz.py"), tmp_path / "fuzz.json"
    options = ["--engines=coverage", "--targets=task: CoNLL", "--inputs=200", "--least=1", "--seconds=2", "--jobs=1"]
    command = [sys.executable, script, *options, f"--folder={tmp_path}", f"--json={results}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (row,) = json.loads(results.read_text())["tables"]["readers"]["rows"]
    assert row["guided"] == row["inputs"] >= 200
    assert len([path for path in (tmp_path / "corpus").rglob("*") if path.is_file()]) > 5, "one for each new line"


@pytest.mark.long
@pytest.mark.timeout(1700)
def test_a_hundred_thousand_damaged_files(tmp_path: Path):
    script, results = str(REPOSITORY / "benchmarks" / "fuzz.py"), tmp_path / "fuzz.json"
    options = ["--inputs=100000", "--least=200", "--seconds=3", f"--folder={tmp_path}", f"--json={results}"]
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(results.read_text())["values"]["inputs"] >= 100_000
