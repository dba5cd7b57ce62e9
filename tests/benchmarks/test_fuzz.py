"""Damaged files end in a refusal or are read: some of each kind here, more in the long test."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from fuzzed.mutations import mutate
from fuzzed.targets import TARGETS
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


@pytest.mark.long
@pytest.mark.timeout(1700)
def test_hundred_thousand_damaged_files(tmp_path: Path):
    script, results = str(REPOSITORY / "benchmarks" / "fuzz.py"), tmp_path / "fuzz.json"
    options = ["--seconds=15", f"--folder={tmp_path}", f"--json={results}"]
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(results.read_text())["values"]["inputs"] >= 100_000
