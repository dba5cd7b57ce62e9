"""The best step of a run by its scores on the first scored split, and early stopping."""

import math
from collections.abc import Mapping
from typing import Any

from bert_jax.errors import InputError


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
