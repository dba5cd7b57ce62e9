"""Damaged files end in a refusal or are read: some of each kind here, more in the long test."""

import json
import random
import subprocess
import sys
from pathlib import Path

import fuzz
import pytest
from fuzzed.mutations import mutate
from fuzzed.targets import TARGETS, Target
from support.helpers import REPOSITORY

from bert_jax.errors import BertJaxError


@pytest.mark.parametrize("name", TARGETS)
def test_readers_refuse_or_read_damaged_files(name: str, tmp_path: Path):
    target, rng = TARGETS[name], random.Random(0)
    target.prepare(tmp_path)
    path, seeds = tmp_path / target.name, target.seeds()
    for seed in seeds:
        path.write_bytes(seed)
        target.read(path)
    for _ in range(25):
        path.write_bytes(mutate(rng.choice(seeds), seeds, rng))
        try:
            target.read(path)
        except BertJaxError:
            continue


def test_mutations_change_the_seed_and_repeat():
    seed, others = b'{"text": "a film", "label": 12}', [b"another", b"file"]
    made = [mutate(seed, others, random.Random(number)) for number in range(200)]
    assert made == [mutate(seed, others, random.Random(number)) for number in range(200)]
    assert len({*made}) > 190
    assert made.count(seed) < 5


def test_a_reader_that_raises_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ascii_reader = Target("t.txt", lambda: [b"plain text"], lambda path: path.read_text("ascii"))
    monkeypatch.setitem(TARGETS, "text", ascii_reader)
    row = fuzz.fuzz("text", 0.5, 0, tmp_path)
    assert 0 < row["accepted"] < row["inputs"]
    assert row["findings"] == 1, "one for each place in the code"
    (report,) = tmp_path.glob("*.txt")
    assert "UnicodeDecodeError" in report.read_text()
    with pytest.raises(UnicodeDecodeError):
        report.with_suffix(".input").read_text("ascii")


@pytest.mark.long
@pytest.mark.timeout(1700)
def test_hundred_thousand_damaged_files(tmp_path: Path):
    script, results = str(REPOSITORY / "benchmarks" / "fuzz.py"), tmp_path / "fuzz.json"
    options = ["--seconds=15", f"--folder={tmp_path}", f"--json={results}"]
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(results.read_text())["values"]["inputs"] >= 100_000
