"""Means of training metrics over the steps since the last logged row, and spikes of the loss."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

LAST_VALUE = ("learning_rate", "nonfinite_steps", "nonfinite_streak")
"""Metrics that are logged as their last value; all others are logged as means."""


class RunningMeans:
    """Accumulates the metrics of steps until a row is logged.

    The means skip a step whose loss or gradient is not finite. The accumulated sums are saved with a checkpoint, so
    that the first row of a resumed run is that of an uninterrupted run.
    """

    def __init__(self, unlogged: Mapping[str, Any] | None = None):
        """Restores the result of `to_dict` in `unlogged`; None starts with no steps."""
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
            if name not in LAST_VALUE:
                self._sums[name] = self._sums.get(name, 0.0) + value

    def take(self) -> dict[str, float]:
        """Returns the metrics of a row and resets the sums.

        `steps_averaged` is the number of steps in the means. If all were skipped it is 0, and the values are those of
        the last step.
        """
        means = {name: total / self._steps for name, total in self._sums.items()}
        row = {**self._last, **means, "steps_averaged": self._steps}
        self._steps, self._sums = 0, {}
        return row

    def to_dict(self) -> dict[str, Any]:
        """Returns the sums of the steps that are not logged yet, as JSON."""
        return {"steps": self._steps, "sums": dict(self._sums)}


_WINDOW = 128  # steps whose losses a loss is compared with
_FEWEST = 32  # steps before the first comparison
_NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
_LEAST_SHARE = 1e-3  # of the median, as a deviation: equal losses have none


class LossSpikes:
    """Counts spikes: losses above the median of the last steps by `deviations` times their deviation.

    The deviation is 1.4826 times the median absolute deviation, which a few spikes in the window do not change. The
    losses of the window are saved with a checkpoint, so that a resumed run counts as an uninterrupted run.
    """

    def __init__(self, deviations: float, unlogged: Mapping[str, Any] | None = None):
        """Restores the result of `to_dict` in `unlogged`; None starts with no steps. `deviations` of 0 finds none."""
        saved = (unlogged or {}).get("spikes", {"losses": [], "count": 0})
        self._deviations = deviations
        self._losses: deque[float] = deque(saved["losses"], _WINDOW)
        self._count: int = saved["count"]
        self._was_spike = False

    def add(self, values: Mapping[str, float]) -> str:
        """Adds the metrics of a step. Returns a description of its spike; empty if it is none, or follows another."""
        loss = values["loss"]
        if not self._deviations or values["nonfinite_streak"] or not math.isfinite(loss):
            return ""
        found = ""
        is_spike = False
        if len(self._losses) >= _FEWEST:
            median = statistics.median(self._losses)
            spread = _NORMAL * statistics.median(abs(loss - median) for loss in self._losses)
            deviation = max(spread, _LEAST_SHARE * abs(median))
            is_spike = loss > median + self._deviations * deviation
            if is_spike and not self._was_spike:
                found = f"{loss:.3f}, {(loss - median) / deviation:.0f} deviations above the median {median:.3f}"
        self._count += is_spike
        self._was_spike = is_spike
        self._losses.append(loss)
        return found

    def take(self) -> dict[str, int]:
        """Returns the number of spikes since the last row, as a metric, and resets it; {} if none are sought."""
        count, self._count = self._count, 0
        return {"loss_spikes": count} if self._deviations else {}

    def forget(self) -> None:
        """Empties the window, as between phases, whose losses differ."""
        self._losses.clear()

    def to_dict(self) -> dict[str, Any]:
        """Returns the window and the spikes that are not logged yet, as JSON; {} without any."""
        return {"spikes": {"losses": list(self._losses), "count": self._count}} if self._losses else {}
