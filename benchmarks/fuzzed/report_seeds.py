"""Valid metrics of runs that `bert-jax report` shows."""

import json
from typing import Any


def pretraining() -> list[bytes]:
    rows: list[dict[str, Any]] = []
    for step in (10, 20):
        mask = {"target": "film", "probability": 0.1, "fills": [["film", 0.5], ["b", 0.25]]}
        rows += [
            {"step": step, "mlm_loss": 5.0, "mlm_accuracy": 0.2, "nsp_loss": 0.6, "nsp_accuracy": 0.7,
             "learning_rate": 1e-4, "grad_norm": 1.5, "tokens_per_second": 100.0, "time": 3.5},
            {"step": step, "split": "eval", "mlm_loss": 4.5, "mlm_accuracy": 0.3, "unigram_loss": 7.0},
            {"step": step, "split": "samples", "samples": [{"text": "a [MASK] text", "masks": [mask]}]},
        ]  # fmt: skip
    return ["".join(json.dumps(row) + "\n" for row in rows).encode()]


def finetuning() -> list[bytes]:
    rows = [
        {"step": step, "split": "eval", "dev/accuracy": 0.5, "test/f1": 0.4} if step % 2 else
        {"step": step, "loss": 0.5, "accuracy": 0.6, "learning_rate": 2e-5, "grad_norm": 1.0}
        for step in range(6)
    ]  # fmt: skip
    return ["".join(json.dumps(row) + "\n" for row in rows).encode()]
