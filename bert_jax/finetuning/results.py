"""Results of a fine-tuning run: `result.json`, and what is not scored."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.files.format_versions import read_json, write_json
from bert_jax.finetuning.task import Split, Task
from bert_jax.tracking.metrics import finite_json
from bert_jax.training.checkpoints import newest_step

RESULT_FILE = "result.json"
RESULT_VERSION = 1
PREDICTIONS = "predictions"


class BestStep:
    """Scores of a run's evaluations, of which higher is better; the best step; and whether training is to end.

    Without `keep_best` there is no best step, and nothing ends early.
    """

    def __init__(
        self, *, keep_best: bool, patience: int = 0, min_delta: float = 0.0, scored: Mapping[str, str] | None = None
    ):  # fmt: skip
        """Starts without scores.

        Args:
          keep_best: choose the best step.
          patience: evaluations without improvement that end the training; 0 for any number.
          min_delta: a score improves if it is above that of the last improvement by more than this.
          scored: the `split` that the scores are of, and the `hash` of its examples; None if unknown.
        """
        self._keep_best, self._patience, self._min_delta, self._scored = keep_best, patience, min_delta, scored
        self._scores: list[tuple[int, float | None]] = []  # None is not finite, and never the best

    def add(self, step: int, score: float) -> None:
        """Adds the score of the evaluation after `step`, in the order of steps."""
        self._scores.append((step, score if math.isfinite(score) else None))

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Replaces the scores by the result of `to_dict`; by none if a checkpoint has None.

        Raises InputError if they are those of other examples.
        """
        if saved and self._scored and saved["scored"] not in (None, self._scored):
            raise InputError(
                f"keep_best=True: the epochs so far were scored by other examples of {saved['scored']['split']}; "
                "restore the old file, or choose another workdir"
            )
        self._scores = [(step, score) for step, score in saved["scores"]] if saved else []

    def to_dict(self) -> dict[str, Any] | None:
        """Returns `best_step`, `scores`, a list of [step, score], and `scored`, as JSON; None without `keep_best`."""
        if not self._keep_best:
            return None
        scored = None if self._scored is None else dict(self._scored)
        return {"best_step": self.best, "scores": [list(pair) for pair in self._scores], "scored": scored}

    @property
    def best(self) -> int | None:
        """The step with the best score, the earliest of equals; None if there is none."""
        finite = [(score, step) for step, score in self._scores if score is not None]
        return max(finite, key=lambda pair: pair[0])[1] if self._keep_best and finite else None

    @property
    def score(self) -> float | None:
        """The best score; None if there is none."""
        return dict(self._scores)[self.best] if self.best is not None else None

    def without_improvement(self) -> int:
        """Counts the latest evaluations that did not improve the score by more than `min_delta`."""
        reference, count = -math.inf, 0
        for _, score in self._scores:
            if score is not None and score > reference + self._min_delta:
                reference, count = score, 0
            else:
                count += 1
        return count

    def ends_training(self) -> bool:
        """Returns whether `patience` evaluations have not improved the score."""
        return self._keep_best and 0 < self._patience <= self.without_improvement()


def scoring_warnings(splits: Sequence[Split]) -> list[str]:
    """Returns warnings for the start of a run: no split can be scored, or some rows cannot."""
    scored = [split for split in splits if split.is_labelled]
    if not scored:
        return ["No split has labels, so that nothing is scored; set task.dev to a labelled file"]
    return [
        f"Split {split.name}: {sum(split.left_out.values())} rows are not scored ({_listed(split.left_out)}), "
        f"{len(split.examples)} are scored"
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
        split.name: {"scored": len(split.examples), "left_out": dict(split.left_out)}
        for split in splits if split.name in scores
    }  # fmt: skip
    positive = {} if task.positive is None else {"positive_label": task.positive}
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
