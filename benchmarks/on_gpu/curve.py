"""Pre-training curve of BERT-BASE: as many steps as the time allows, up to those of the recipe, evaluated on the way.

A dataset of 128 tokens may be given; by default it is prepared from the documentation of Python and of packages, as in
launch/quickstart.sh, with the full vocabulary. The number of steps is fixed when the run starts, because the learning
rate ends with it; a run that the deadline stops is saved, and a rerun with the same dataset, code, device and jax
resumes it.
"""

import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from etils import epath
from on_gpu.cases import INTERRUPTED, Cases, OutOfTimeError
from on_gpu.scale import Scale
from on_gpu.steps import Rounds, Setting, Step, largest
from record import REPOSITORY, Record

from bert_jax.config import load_config
from bert_jax.errors import Interrupted
from bert_jax.tracking.metrics import read_metrics
from bert_jax.training.pretrain import pretrain

SEQ_LEN = 128
EVALUATIONS = 12
OVERHEAD = 60
"""Seconds for compilation, evaluations and the last checkpoint."""
PAUSE = 2.0
CASE = "BERT-BASE"
SUMMARY_COLUMNS = {
    "model": "{case}",
    "outcome": "{outcome}",
    "steps": "{steps:,}",
    "sequences per step": "{batch:,}",
    "M tokens": "{million_tokens:.0f}",
    "minutes": "{minutes:.1f}",
    "MFU": "{mfu:.1%}",
    "waiting for input": "{input_wait_share:.1%}",
}
COLUMNS = {
    "step": "{step:,}",
    "M tokens": "{million_tokens:.0f}",
    "minutes": "{minutes:.1f}",
    "MLM loss": "{mlm_loss:.2f}",
    "unigram baseline": "{unigram_loss:.2f}",
    "MLM accuracy": "{mlm_accuracy:.1%}",
    "NSP loss": "{nsp_loss:.2f}",
    "NSP accuracy": "{nsp_accuracy:.1%}",
}


def curve(cases: Cases, record: Record, scale: Scale, work: Path, data: str, minutes: float, deadline: float) -> None:
    """Trains for `minutes`, or until the Unix time `deadline` if that is earlier, and records the evaluations."""

    def train() -> dict[str, Any]:
        dataset = data or prepare(work, scale)
        folder = run_folder(work, cases.key, dataset)
        plan = plan_run(folder, scale, min(minutes * 60, deadline - time.time()))
        overrides = {**scale.curve, **plan, "data.path": dataset, "data.seq_len": SEQ_LEN, "tracking.samples": 0}
        workdir, outcome = folder / "run", {}
        try:
            pretrain(load_config("bert_base", overrides), str(workdir))
        except Interrupted:
            outcome = {"outcome": INTERRUPTED}
        rows = read_metrics(epath.Path(workdir))
        tokens = plan_tokens(scale)
        record.set_table("curve", COLUMNS, evaluations(rows, tokens))
        return {**summary(rows, tokens), **plan, **outcome}

    cases.measure(CASE, train)


def prepare(work: Path, scale: Scale) -> str:
    """Returns the dataset of `scale.text`, prepared if it is missing."""
    text, vocabulary, data = work / "text", work / "tokenizer.json", work / "data"
    cli = [sys.executable, "-m", "bert_jax.cli"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    options = {
        vocabulary: ["vocab", "--size", str(scale.vocab_size), "--output", str(vocabulary)],
        data / "dataset.json": [
            "prepare", "--vocab", str(vocabulary), "--output", str(data), "--seq_len", str(SEQ_LEN),
            "--eval_fraction", "0.05", "--max_line_repeats", "1", "--workers", str(os.cpu_count()),
        ],
    }  # fmt: skip
    if not text.exists():
        script = REPOSITORY / "launch" / "python_docs.py"
        subprocess.run([sys.executable, script, text, *scale.text], check=True)
    for made, words in options.items():
        if not made.exists():
            command = [*cli, words[0], "--input", str(text), *words[1:]]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return str(data)


def run_folder(work: Path, key: Mapping[str, Any], dataset: str) -> Path:
    """Returns the folder of the run on a dataset with the code, device and jax of `key`."""
    text = json.dumps([sorted(key.items()), os.path.realpath(dataset)])
    return work / f"curve_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def plan_run(folder: Path, scale: Scale, seconds: float) -> dict[str, Any]:
    """Returns the number of steps and what follows from it, of the run in `folder` or of a new one of `seconds`."""
    file = folder / "plan.json"
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    began, rows = time.time(), scale.curve["global_batch_size"]
    overrides = tuple((key, str(value)) for key, value in scale.curve.items())
    settings = [
        Setting("bert_base", rows, SEQ_LEN, microbatches=max(1, rows // most), overrides=overrides)
        for most in scale.curve_rows
    ]

    def measure(step: Step) -> tuple[float, int]:
        one_round = Rounds(step, seconds=2 * scale.round_seconds)
        return statistics.median(one_round() for _ in range(3)), step.batch["input_ids"].shape[0]

    step_seconds, microbatches = largest(settings, measure)
    left = seconds - (time.time() - began) - OVERHEAD
    steps = min(scale.curve["total_steps"], int(left / step_seconds))
    if left < scale.least_curve_seconds:
        raise OutOfTimeError(f"{left:.0f} s left for the curve")
    plan = {
        "total_steps": steps, "gradient_accumulation": microbatches,
        "optimizer.warmup_steps": max(1, steps // 10), "eval_every_steps": max(1, steps // EVALUATIONS),
        "checkpoint.every_steps": steps,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(plan) + "\n", encoding="utf-8")
    return plan


def plan_tokens(scale: Scale) -> int:
    """Returns the tokens of a step, padding counted."""
    return int(scale.curve["global_batch_size"]) * SEQ_LEN


def evaluations(rows: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Returns the rows of `COLUMNS`: the evaluations, with the minutes of training since the first row of metrics."""
    return [
        row | {"million_tokens": row["step"] * tokens / 1e6, "minutes": minutes}
        for row, minutes in zip(rows, training_minutes(rows), strict=True) if row.get("split") == "eval"
    ]  # fmt: skip


def training_minutes(rows: list[dict[str, Any]]) -> list[float]:
    """Returns the minutes of training from the first row of metrics to each row.

    Evaluations do not count. Between two rows, more than `PAUSE` times the median time of the steps is a pause or a
    start, and the median counts.
    """
    gaps = [(after["time"] - before["time"], after["step"] - before["step"]) for before, after in pairwise(rows)]
    usual = statistics.median([seconds / steps for seconds, steps in gaps if steps] or [0.0])
    minutes = [0.0]
    for seconds, steps in gaps:
        trained = seconds if seconds <= PAUSE * usual * steps else usual * steps
        minutes.append(minutes[-1] + trained / 60)
    return minutes[: len(rows)]


def summary(rows: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Returns the columns of the run as a whole; `mfu` is None on a device whose peak is unknown."""
    training = [row for row in rows if "tokens_per_second" in row]
    median = lambda key: statistics.median([row[key] for row in training if key in row] or [0.0])  # noqa: E731
    steps = max((row["step"] for row in rows), default=0)
    return {
        "steps": steps,
        "batch": tokens // SEQ_LEN,
        "million_tokens": steps * tokens / 1e6,
        "minutes": max(training_minutes(rows), default=0.0),
        "mfu": median("mfu") or None,
        "input_wait_share": median("input_wait_share"),
    }
