"""Means of training metrics over the steps since the last logged row."""

from collections.abc import Mapping
from typing import Any

LAST_VALUE = ("learning_rate", "nonfinite_steps", "nonfinite_streak")
"""Metrics that are logged as their last value; all others are logged as means."""


class RunningMeans:
    """Accumulates the metrics of steps until a row is logged.

    Each mean has a count of its own, and skips a step whose loss or gradient is not finite. The accumulated sums are
    saved with a checkpoint, so that the first row of a resumed run is that of an uninterrupted run.
    """

    def __init__(self, unlogged: Mapping[str, Any] | None = None):
        """Restores the result of `to_dict` in `unlogged`; None starts with no steps."""
        saved = unlogged or {"steps": 0, "sums": {}}
        self._steps: int = saved["steps"]
        self._sums: dict[str, tuple[float, int]] = {name: (total, n) for name, (total, n) in saved["sums"].items()}
        self._last: dict[str, float] = {}

    def add(self, values: Mapping[str, float]) -> None:
        """Adds the metrics of one step, which include `nonfinite_streak`."""
        self._last = dict(values)
        if values["nonfinite_streak"]:
            return
        self._steps += 1
        for name, value in values.items():
            if name not in LAST_VALUE:
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + value, count + 1

    def take(self) -> dict[str, float]:
        """Returns the metrics of a row and resets the sums.

        `steps_averaged` is the number of steps in the means. If all were skipped it is 0, and the values are those of
        the last step.
        """
        means = {name: total / count for name, (total, count) in self._sums.items()}
        row = {**self._last, **means, "steps_averaged": self._steps}
        self._steps, self._sums = 0, {}
        return row

    def to_dict(self) -> dict[str, Any]:
        """Returns the sums and counts of the steps that are not logged yet, as JSON."""
        return {"steps": self._steps, "sums": {name: list(sums) for name, sums in self._sums.items()}}
