"""Fine-tuning in two real processes is fine-tuning in one."""

import json
from pathlib import Path

import pytest
from etils import epath
from support import helpers
from support.several import finish, start_commands

from bert_jax.tracking.metrics import read_metrics


@pytest.mark.long
def test_a_search_in_two_processes_is_one_in_one(checkpoint: Path, tmp_path: Path):
    for name, count in (("train.csv", 30), ("dev.csv", 7)):  # neither divides by batches or devices
        rows = ["the ship .,sea", "the owl near the moon .,night", "a lamp,town"]
        (tmp_path / name).write_text("\n".join(["text,label", *(rows[i % 3] for i in range(count))]) + "\n")
    settings = {
        "init": checkpoint, "data.path": tmp_path, "task.train": "train.csv", "task.dev": "dev.csv",
        "task.max_seq_len": 16, "num_epochs": 2, "global_batch_size": 8, "eval_batch_size": 4, "log_every_steps": 1,
        "optimizer.learning_rate": 1e-2, "search.seeds": "(0,1)",
    }  # fmt: skip
    for processes in (1, 2):
        command = helpers.command(
            "finetune", "--config=finetune/text", f"--workdir={tmp_path / str(processes)}", *helpers.flags(settings)
        )
        finish(start_commands([command] * processes))
    one, two = (tmp_path / "1", tmp_path / "2")
    assert json.loads((two / "search.json").read_text()) == json.loads((one / "search.json").read_text())
    for seed in (0, 1):
        run = f"lr-0.01-seed-{seed}"
        losses = [
            [row["loss"] for row in read_metrics(epath.Path(folder / run)) if "loss" in row] for folder in (one, two)
        ]
        assert len(losses[0]) == 8
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
        predictions = [
            [json.loads(line) for line in (folder / run / "predictions" / "dev.jsonl").read_text().splitlines()]
            for folder in (one, two)
        ]
        assert len(predictions[0]) == 7
        for first, second in zip(*predictions, strict=True):
            # Sums over the devices of two processes are rounded otherwise.
            assert second.pop("probabilities") == pytest.approx(first.pop("probabilities"), abs=1e-5)
            assert second == first
