"""Means of training metrics over the steps since the last logged row."""

from collections.abc import Mapping
from typing import Any

AT_THE_STEP = ("learning_rate", "nonfinite_steps", "nonfinite_streak")
"""Metrics that a row gives as they are at its step; all others are means."""


class RunningMeans:
    """Accumulates the metrics of steps until a row is logged.

    A skipped step, whose loss or gradient is not finite, is left out of the means. The accumulated sums are saved with
    a checkpoint, so that the first row of a resumed run is that of a run never stopped.
    """

    def __init__(self, unlogged: Mapping[str, Any] | None = None):
        """`unlogged` is what `to_dict` returned; None starts with no steps."""
        saved = unlogged or {"steps": 0, "sums": {}}
        self._steps: int = saved["steps"]
        self._sums: dict[str, float] = dict(saved["sums"])
        self._last: dict[str, float] = {}

    def add(self, values: Mapping[str, float]) -> None:
        """Adds the metrics of one step, which include `nonfinite_streak`."""
        self._last = dict(values)
        if values["nonfinite_streak"]:
            return
        self._steps += 1
        for name, value in values.items():
            if name not in AT_THE_STEP:
                self._sums[name] = self._sums.get(name, 0.0) + value

    def take(self) -> dict[str, float]:
        """Returns the row's metrics and starts anew.

        `steps_averaged` is the number of steps that the means are over. Where all were skipped it is 0, and the values
        are those of the last step.
        """
        means = {name: total / self._steps for name, total in self._sums.items()}
        row = {**self._last, **means, "steps_averaged": self._steps}
        self._steps, self._sums = 0, {}
        return row

    def to_dict(self) -> dict[str, Any]:
        """Returns the sums of the steps that no row has yet, as JSON."""
        return {"steps": self._steps, "sums": dict(self._sums)}
