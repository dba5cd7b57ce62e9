"""Pre-training curve of BERT-BASE: as many steps as the time allows, up to those of the recipe, evaluated on the way.

A dataset of 128 tokens may be given; by default it is prepared from the documentation of Python and of packages, as in
launch/quickstart.sh, with the full vocabulary. The number of steps is fixed when the run starts, because the learning
rate ends with it.
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from etils import epath
from on_gpu.cases import Cases, OutOfTimeError
from on_gpu.scale import Scale
from on_gpu.steps import Setting, Step, largest, seconds_per_step
from processes import prepare_dataset
from record import REPOSITORY, Record

from bert_jax.config import load_config
from bert_jax.tracking.metrics import read_metrics
from bert_jax.training.pretrain import pretrain

SEQ_LEN = 128
EVALUATIONS = 12
OVERHEAD = 90
"""Seconds for compilation, evaluations and the last checkpoint."""
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


def curve(cases: Cases, record: Record, scale: Scale, work: Path, data: str) -> None:
    """Trains until shortly before the deadline of the cases, and records the evaluations."""

    def train() -> dict[str, Any]:
        dataset, workdir = data or prepare(work, scale), work / "curve"
        shutil.rmtree(workdir, ignore_errors=True)
        plan = plan_run(scale, cases.deadline)
        overrides = {**scale.curve, **plan, "data.path": dataset, "data.seq_len": SEQ_LEN, "tracking.samples": 0}
        pretrain(load_config("bert_base", overrides), str(workdir))
        rows, batch = read_metrics(epath.Path(workdir)), scale.curve["global_batch_size"]
        began = rows[0]["time"]
        for row in rows:
            row |= {"million_tokens": row["step"] * batch * SEQ_LEN / 1e6, "minutes": (row["time"] - began) / 60}
        record.set_table("curve", COLUMNS, [row for row in rows if row.get("split") == "eval"])
        training = [row for row in rows if "tokens_per_second" in row]
        median = lambda key: statistics.median([row[key] for row in training if key in row] or [0.0])  # noqa: E731
        return {
            **{key: rows[-1][key] for key in ("million_tokens", "minutes")}, "steps": rows[-1]["step"], "batch": batch,
            "mfu": median("mfu") or None, "input_wait_share": median("input_wait_share"), **plan,
        }  # fmt: skip

    cases.measure("BERT-BASE", train)


def prepare(work: Path, scale: Scale) -> str:
    """Returns the dataset of `scale.text`, prepared if it is missing."""
    text = work / "text"
    if not text.exists():
        subprocess.run([sys.executable, REPOSITORY / "launch" / "python_docs.py", text, *scale.text], check=True)
    options = ("--seq_len", SEQ_LEN, "--eval_fraction", 0.05, "--max_line_repeats", 1, "--workers", os.cpu_count())
    return str(prepare_dataset(work, text, ("--input", text, "--size", scale.vocab_size), *options))


def plan_run(scale: Scale, deadline: float) -> dict[str, Any]:
    """Returns the number of steps until the Unix time `deadline`, and what follows from it."""
    rows, overrides = scale.curve["global_batch_size"], tuple((key, str(value)) for key, value in scale.curve.items())
    settings = [
        Setting("bert_base", rows, SEQ_LEN, microbatches=max(1, rows // most), overrides=overrides)
        for most in scale.curve_rows
    ]

    def measure(step: Step) -> tuple[float, int]:
        return seconds_per_step(step, 3, 2 * scale.round_seconds), step.batch["input_ids"].shape[0]

    step_seconds, microbatches = largest(settings, measure)
    left = 0.9 * (deadline - time.time()) - OVERHEAD
    if left < scale.least_curve_seconds:
        raise OutOfTimeError(f"{left:.0f} s left for the curve")
    steps = min(scale.curve["total_steps"], int(left / step_seconds))
    return {
        "total_steps": steps, "gradient_accumulation": microbatches,
        "optimizer.warmup_steps": max(1, steps // 10), "eval_every_steps": max(1, steps // EVALUATIONS),
        "checkpoint.every_steps": steps,
    }  # fmt: skip
