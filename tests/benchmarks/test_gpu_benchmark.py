"""The GPU benchmark: what it resumes, what it records of failures, when it stops; and a rehearsal of all parts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu
import numpy as np
import pytest
import record
from on_gpu import cases, steps
from support.helpers import REPOSITORY

from bert_jax.batch import pretraining_shapes

BENCHMARKS = REPOSITORY / "benchmarks"
KEY = {"device": "NVIDIA H200", "jax": "0.12.0", "code": "0123"}
COLUMNS = {"case": "{case}", "outcome": "{outcome}", "speed": "{speed:.1f}"}
OUT_OF_MEMORY = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")


def measure(folder: Path, results: dict[str, object], key: dict = KEY, deadline: float = float("inf")) -> list[str]:
    """Measures cases with these results in a process of its own, as it were; returns those that ran."""
    opened = cases.Cases(record.Record(folder / "gpu_speed.json", [], device=key["device"]), COLUMNS, key, deadline)
    runs = []

    def work(case: str) -> dict:
        runs.append(case)
        if isinstance(results[case], Exception):
            raise results[case]
        return {"speed": results[case]}

    for case in results:
        opened.measure(case, lambda case=case: work(case))
    return runs


def rows(folder: Path) -> dict[str, dict]:
    content = json.loads((folder / "gpu_speed.json").read_text())
    return {row["case"]: row for row in content["tables"]["cases"]["rows"]}


def test_final_outcomes_are_not_measured_again(tmp_path: Path):
    results = {
        "fits": 2.0, "large": OUT_OF_MEMORY, "refused": cases.UnsupportedError("attention=cudnn: needs a GPU"),
        "broken": OSError("/secret/place/file: gone"),
    }  # fmt: skip
    assert measure(tmp_path, results) == list(results)
    found = rows(tmp_path)
    assert found["broken"]["outcome"].startswith("failed: OSError")
    assert "secret" not in found["broken"]["outcome"]
    outcomes = [found[case]["outcome"] for case in ("fits", "large", "refused")]
    assert outcomes == ["measured", "out of memory", "not supported"]
    assert all(row.items() >= KEY.items() and row["date"] for row in found.values())
    assert measure(tmp_path, results) == ["broken"]
    assert rows(tmp_path)["fits"]["speed"] == 2.0
    assert measure(tmp_path, results, {**KEY, "device": "NVIDIA A100"}) == list(results)


@pytest.mark.parametrize("seq_len", [128, 512])
@pytest.mark.parametrize("packed", [False, True])
def test_batches_look_like_the_loaders(seq_len: int, packed: bool):
    batch, sequences = steps.make_batch(steps.Setting("bert_large", 16, seq_len, packed))
    slots = batch["masked_positions"].shape[1]
    per_row = steps.MAX_SEQUENCES if packed else 1
    assert {name: (array.shape, array.dtype.type) for name, array in batch.items()} == pretraining_shapes(
        16, seq_len, slots, per_row
    )
    assert packed or slots == {128: 20, 512: 76}[seq_len]
    assert sequences == batch["next_sentence_weights"].sum() == np.sort(batch["sequence_ids"]).max(axis=1).sum()
    row, slot = np.nonzero(batch["masked_weights"])
    places = list(zip(row, batch["masked_positions"][row, slot], strict=True))
    assert len(set(places)) == len(places)
    assert all(batch["sequence_ids"][place] for place in places)
    assert len(places) == pytest.approx(0.15 * (batch["sequence_ids"] > 0).sum(), rel=0.05)


@pytest.mark.long
def test_rehearsal_measures_every_part_and_a_rerun_none(tmp_path: Path):
    command = ["bash", BENCHMARKS / "gpu.sh", "--rehearse", "--work", tmp_path, "--minutes", "25"]
    environment = {**os.environ, "PYTHON": sys.executable}
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    results = {path.stem: path for path in (tmp_path / "rehearsal").glob("gpu_*.json")}
    assert set(results) == {f"gpu_{part}" for part in gpu.PARTS}
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
    written = {path: json.loads(path.read_text())["tables"] for path in results.values()}
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    assert {path: json.loads(path.read_text())["tables"] for path in results.values()} == written
