"""Training runs in child processes that tests interrupt, resume and compare."""

import json
import signal
import subprocess
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from support import child_processes, helpers

from bert_jax.tracking.metrics import read_metrics
from bert_jax.tracking.throughput import NOT_REPRODUCIBLE
from bert_jax.training.checkpoints import newest_step

SETTINGS = {
    "model.num_hidden_layers": 1, "model.hidden_size": 32, "model.num_attention_heads": 2,
    "model.intermediate_size": 64, "model.max_position_embeddings": 64, "data.max_predictions": 10,
    "model.hidden_dropout_prob": 0.1,
    "total_steps": 120, "global_batch_size": 16, "log_every_steps": 10, "eval_every_steps": 40, "eval_batches": 2,
    "checkpoint.every_steps": 24, "checkpoint.keep": 2, "optimizer.warmup_steps": 12,
    "optimizer.learning_rate": 1e-2,
}  # fmt: skip


def train_command(dataset: Path, workdir: Path, **overrides: object) -> list[str]:
    settings = {**SETTINGS, "data.path": dataset, **{key.replace("__", "."): v for key, v in overrides.items()}}
    return helpers.command("pretrain", "--config=bert_tiny", f"--workdir={workdir}", *helpers.flags(settings))


def train(dataset: Path, workdir: Path, **overrides: object) -> subprocess.CompletedProcess:
    command = train_command(dataset, workdir, **overrides)
    return child_processes.run(command, env=helpers.child_environment(), timeout=240)


def train_until(
    step: int, dataset: Path, workdir: Path, send: signal.Signals, *, saved: int | None = None, delay: float = 0.0,
    **overrides: object,
) -> subprocess.CompletedProcess:  # fmt: skip
    """Starts the run; sends it a signal `delay` seconds after `step` was logged and step `saved` or later complete."""

    def is_time() -> bool:
        is_logged = any(row["step"] >= step for row in read_metrics(epath.Path(workdir)))
        newest = newest_step(epath.Path(workdir))
        return is_logged and (saved is None or (newest is not None and int(newest.name) >= saved))

    process = child_processes.start(
        train_command(dataset, workdir, **overrides), env=helpers.child_environment(), stderr=subprocess.PIPE, text=True
    )
    child_processes.wait_until(is_time, process)
    time.sleep(delay)
    process.send_signal(send)
    _, stderr = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, "", stderr)


def rows_without_times(workdir: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in NOT_REPRODUCIBLE} for row in read_metrics(epath.Path(workdir))]


def assert_same_run(workdir: Path, other: Path) -> None:
    assert rows_without_times(workdir) == rows_without_times(other)
    folders = [newest_step(epath.Path(path)) for path in (workdir, other)]
    assert folders[0].name == folders[1].name
    for item in ("parameters", "optimizer"):
        with ocp.StandardCheckpointer() as checkpointer:
            trees = [checkpointer.restore(folder / item) for folder in folders]
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(trees[0]), jax.tree.leaves(trees[1]), strict=True):
            assert np.array_equal(a, b), jax.tree_util.keystr(path)
    positions = [json.loads((folder / "position" / "metadata").read_text()) for folder in folders]
    milestones = [position.pop("milestones") for position in positions]
    assert milestones[0] == milestones[1] or [] in milestones  # of a run without any
    assert positions[0] == positions[1]
    assert positions[0]["next_batch"] == int(folders[0].name)
