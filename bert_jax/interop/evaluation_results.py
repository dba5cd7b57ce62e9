"""Evaluation results that a checkpoint's run recorded at its step."""

from dataclasses import dataclass
from typing import Any

from bert_jax.files import remote
from bert_jax.finetuning.results import RESULT_FILE, read_result
from bert_jax.tracking.metrics import read_metrics
from bert_jax.training.checkpoints import Checkpoint

_PROGRESS = (
    "step",
    "time",
    "tokens_seen",
    "examples_seen",
    "sequences",
    "old_sequences",
)  # in rows of metrics, beside the scores


@dataclass(frozen=True)
class SplitScores:
    """Metrics of one split by name, such as `accuracy`; `split` is `dev`, `eval` and so on."""

    split: str
    metrics: dict[str, float]


def read_results(checkpoint: Checkpoint) -> list[SplitScores]:
    """Returns the results of the checkpoint's step in its workdir; [] if there are none, or of an imported model.

    They are in `result.json` of a fine-tuning run, and in the rows of metrics of pre-training.
    """
    if not checkpoint.config:
        return []
    workdir = checkpoint.path.parent.parent
    if checkpoint.task is not None:
        path = workdir / RESULT_FILE
        result = read_result(path) if remote.exists(path) else {}
        scores = result.get("scores") if result.get("step") == checkpoint.step else None
        return [SplitScores(split, _numbers(values)) for split, values in (scores or {}).items()]
    rows = [row for row in read_metrics(workdir) if (row["step"], row.get("split")) == (checkpoint.step, "eval")]
    return [SplitScores("eval", _numbers(rows[-1]))] if rows else []


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value) for name, value in row.items() if isinstance(value, (int, float)) and name not in _PROGRESS
    }
