"""TensorBoard: scalars, hyper-parameters and text samples of a run, as events in WORKDIR/tensorboard."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from bert_jax.files import remote
from bert_jax.tracking.object_store_log import PartEvents
from bert_jax.tracking.tensorboard import (
    Event,
    EventFile,
    SessionLog,
    Summary,
    event_file_name,
    hyperparameters,
    markdown,
    scalar,
)
from bert_jax.tracking.tracker import RunRecord, Sample, Tracker

TENSORBOARD_FOLDER = "tensorboard"


class TensorBoard(Tracker):
    """Writes events; those of an earlier start after `resume_step` are no longer shown."""

    def __init__(self, workdir: epath.Path, resume_step: int):
        """Opens a new event file, or part files in a remote workdir, which does not support append."""
        folder = workdir / TENSORBOARD_FOLDER
        self._events: EventFile | PartEvents
        if remote.is_remote(workdir):
            self._events = PartEvents(folder)
        else:
            folder.mkdir(exist_ok=True)
            self._events = EventFile(folder / event_file_name())
        purge = SessionLog(status=SessionLog.START)  # TensorBoard drops its events from this step on
        self._events.write_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=purge))

    def log_config(self, run: RunRecord) -> None:
        now = time.time()
        values = {key: value if isinstance(value, (bool, int, float)) else str(value)
                  for key, value in run.config.items()}  # fmt: skip
        self._write(run.start, now, hyperparameters(str(run.workdir), values))
        table = "\n".join(f"| {key} | {json.dumps(value)} |" for key, value in run.config.items())
        self._write(run.start, now, markdown("config", f"| key | value |\n| --- | --- |\n{table}"))

    def log_scalars(self, step: int, values: Mapping[str, Any], *, split: str | None, time: float) -> None:
        for name, value in values.items():
            if value is not None and math.isfinite(value):  # TensorBoard does not support other values
                self._write(step, time, scalar(f"{split or 'train'}/{name}", value))
        if isinstance(self._events, EventFile):
            self._events.flush()

    def log_samples(self, step: int, samples: Sequence[Sample], *, time: float) -> None:
        for number, sample in enumerate(samples):
            self._write(step, time, markdown(f"samples/{number}", as_markdown(sample)))
        if isinstance(self._events, EventFile):
            self._events.flush()

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()

    def _write(self, step: int, time: float, summary: Summary) -> None:
        self._events.write_event(Event(wall_time=time, step=step, summary=summary))


def as_markdown(sample: Sample) -> str:
    """Formats a sample: the masked text, and a row for each mask."""
    rows = [
        f"| {mask['target']} | {mask['probability']:.3f} | "
        + ", ".join(f"{word} {probability:.3f}" for word, probability in mask["fills"]) + " |"
        for mask in sample["masks"]
    ]  # fmt: skip
    return "\n".join([sample["text"], "", "| target | probability | fills |", "| --- | --- | --- |", *rows])
