"""Results of a fine-tuning run: `result.json`, and what is not scored."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from etils import epath

from bert_jax.files import remote
from bert_jax.files.format_versions import read_json, write_json
from bert_jax.finetuning.best_step import BestStep
from bert_jax.finetuning.task import Split, Task
from bert_jax.tracking.metrics import finite_json
from bert_jax.training.checkpoints import newest_step

RESULT_FILE = "result.json"
RESULT_VERSION = 1
PREDICTIONS = "predictions"


@dataclass
class Final:
    """Outputs and scores, by split, of the evaluated step that may be the result, reused at the end of the run."""

    step: int | None = None
    outputs: dict[str, list[np.ndarray]] = field(default_factory=dict)
    scores: dict[str, dict[str, float]] = field(default_factory=dict)


def scoring_warnings(splits: Sequence[Split]) -> list[str]:
    """Returns warnings for the start of a run: no split can be scored, or some rows cannot."""
    scored = [split for split in splits if split.score is not None]
    if not scored:
        return ["No split has labels, so that nothing is scored; set task.dev to a labelled file"]
    return [
        f"Split {split.name}: {sum(split.left_out.values())} rows are not scored ({_listed(split.left_out)}), "
        f"{split.scorable} are scored"
        for split in scored if split.left_out
    ]  # fmt: skip


def unscored(workdir: str) -> dict[str, Any]:
    """Returns the outcome of a finished run without scores, as JSON: `checkpoint`, `step`, reason in `not_scored`."""
    newest = newest_step(remote.absolute(workdir))
    assert newest is not None
    return {
        "checkpoint": str(newest), "step": int(newest.name), "scores": {},
        "not_scored": "no split has labels; task.dev names a file with labels",
    }  # fmt: skip


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()))


def describe_result(
    task: Task, splits: Sequence[Split], step: int, scores: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Returns the contents of `result.json`.

    Keys: `format_version`, `task`, `main_metric`, `step`, `scores` by split, and `rows`: for each scored split the
    number `scored` and the numbers `left_out` (skipped) by reason. If `f1` is that of one of two labels, also
    `positive_label`.
    """
    rows = {
        split.name: {"scored": split.scorable, "left_out": dict(split.left_out)}
        for split in splits if split.name in scores
    }  # fmt: skip
    positive = {} if task.positive_label is None else {"positive_label": task.positive_label}
    return {
        "format_version": RESULT_VERSION, "task": task.name, "main_metric": task.main_metric, **positive, "step": step,
        "scores": dict(scores), "rows": rows,
    }  # fmt: skip


def describe_best(best: BestStep, last: int, steps_an_epoch: int, total_steps: int) -> dict[str, Any]:
    """Returns the keys of `result.json` of a run with `keep_best`.

    `best` has `epoch`, `step` and `score`, the main metric on the first scored split; None if no score was finite.
    `last` has `epoch` and `step` of the end of the training, and `stopped_early` tells if it was before `total_steps`.
    """
    return {
        "best": best.best and {"epoch": best.best // steps_an_epoch, "step": best.best, "score": best.score},
        "last": {"epoch": last // steps_an_epoch, "step": last},
        "stopped_early": last < total_steps,
    }  # fmt: skip


def write_result(path: epath.Path, result: Mapping[str, Any]) -> None:
    """Writes `result.json` atomically."""
    write_json(path, json.loads(finite_json(result)))


def read_result(path: epath.Path) -> dict[str, Any]:
    """Reads `result.json` at `path`. Raises InputError for a damaged file or a newer version."""
    return read_json(path, RESULT_VERSION)
