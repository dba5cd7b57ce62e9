"""Trackers: receivers of the config, the metrics and the text samples that a run logs.

A run has one for `metrics.jsonl`, one for TensorBoard, and those that the config or the caller adds.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from etils import epath

log = logging.getLogger(__name__)

Sample = Mapping[str, Any]
"""A masked text and its fills, as JSON: `text`, with [MASK]s, and `masks`. Each of these has its `target`, the
`probability` of it, and `fills`: the most probable words with their probabilities, best first."""


@dataclass(frozen=True)
class RunRecord:
    """A run as its trackers see it.

    Attributes:
      workdir: the folder of the run.
      config: the hyper-parameters, by dotted key.
      start: steps done when the run was opened; above 0 if it resumes.
    """

    workdir: epath.Path
    config: Mapping[str, Any]
    start: int


class Tracker(AbstractContextManager["Tracker"]):
    """Receiver of what a run logs, in process 0. A subclass overrides the methods that it needs.

    Steps ascend, and a resumed run logs the steps after its checkpoint again. `time` is in unix seconds.
    """

    def log_config(self, run: RunRecord) -> None:
        """Called once, before anything else."""

    def log_scalars(self, step: int, values: Mapping[str, Any], *, split: str | None, time: float) -> None:
        """Called with a row of metrics. `split` is None for training; a value is a number,
        which may not be finite, or the text `data`: the hash of the dataset that an evaluation measured."""

    def log_samples(self, step: int, samples: Sequence[Sample], *, time: float) -> None:
        """Called with the fills of masked texts after an evaluation."""

    def flush(self) -> None:
        """Called before each checkpoint: writes everything to where it survives a kill."""

    def close(self) -> None:
        """Called once, at the end of the run, whatever the reason."""

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Trackers:
    """All trackers of a run. Empty in processes other than process 0.

    Attributes:
      files: trackers of files in the workdir. Their errors end the run.
      others: trackers of services, and those of the caller. An error of one is logged, and ends its tracking alone.
    """

    files: Sequence[Tracker] = ()
    others: Sequence[Tracker] = ()
    _failed: list[Tracker] = field(default_factory=list)

    def log_config(self, run: RunRecord) -> None:
        """Logs the config of the run."""
        self._each(lambda tracker: tracker.log_config(run))

    def log_scalars(self, step: int, values: Mapping[str, Any], split: str | None = None) -> None:
        """Logs a row of metrics. `split` is "eval" for evaluations and None for training."""
        now = time.time()
        self._each(lambda tracker: tracker.log_scalars(step, values, split=split, time=now))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Logs the fills of masked texts."""
        now = time.time()
        self._each(lambda tracker: tracker.log_samples(step, samples, time=now))

    def flush(self) -> None:
        """Writes everything to where it survives a kill."""
        self._each(lambda tracker: tracker.flush())

    def close(self) -> None:
        """Closes every tracker, those that failed too; then raises the first error of `files`."""
        errors = []
        for tracker in self.files:
            try:
                tracker.close()
            except Exception as error:
                errors.append(error)
        for tracker in self.others:
            try:
                tracker.close()
            except Exception:
                log.exception("Tracker %s failed to close", type(tracker).__name__)
        if errors:
            raise errors[0]

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in self.files:
            call(tracker)
        for tracker in self.others:
            if tracker in self._failed:
                continue
            try:
                call(tracker)
            except Exception:
                self._failed.append(tracker)
                log.exception("Tracker %s failed and is not used any more; the run continues", type(tracker).__name__)
