"""Valid files of what `bert-jax report` shows, without checksums: damage reaches what draws them."""

import json
from typing import Any


def _encode(content: Any) -> list[bytes]:
    return [json.dumps(content).encode()]


def study() -> list[bytes]:
    cell = {"mean": 90.0, "deviation": 0.5, "median": 90.1, "best": 90.9, "spread": 1.2, "values": [89.5, 90.1],
            "seeds": ["0", "1"], "learning_rate": 3e-5, "paper": 92.7, "difference": 0.0, "difference_error": 0.3,
            "paper_difference": -0.2}  # fmt: skip
    trained = {"steps": 400, "mlm_loss": 4.1, "mlm_accuracy": 0.3, "nsp_loss": 0.2, "nsp_accuracy": 0.9,
               "unigram_loss": 7.0, "perplexity": 60.3}  # fmt: skip
    rows = [{"name": name, "pretraining": trained, "columns": {"SST-2": cell}} for name in ("MLM & NSP", "no NSP")]
    return _encode({"format_version": 1, "title": "T", "note": "N", "columns": ["SST-2"], "rows": rows})


def search() -> list[bytes]:
    found = {"median": 0.8, "worst": 0.7, "best": 0.9, "scores": {"0": 0.7, "1": 0.9}}
    return _encode({"format_version": 1, "metric": "accuracy", "learning_rate": 2e-5,
                    "by_learning_rate": {"2e-05": found, "5e-05": found}})  # fmt: skip


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
