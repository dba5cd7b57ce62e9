"""TensorBoard: scalars, hyper-parameters and text samples of a run, as events in WORKDIR/tensorboard.

The events are written with the messages and the record writer of the `tensorboard` package. The usual writers
(SummaryWriter) have a background thread, and block forever after it has died of a full disk. They also import
TensorFlow or torch if installed, which takes seconds at each start.
"""

import json
import math
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from bert_jax.files import remote
from bert_jax.tracking.metrics import GrowingFile
from bert_jax.tracking.tracker import RunRecord, Sample, Tracker

TENSORBOARD_FOLDER = "tensorboard"


class TensorBoard(Tracker):
    """Writes events; those of an earlier start after `resume_step` are no longer shown."""

    def __init__(self, workdir: epath.Path, resume_step: int):
        """Opens a new event file. TensorBoard needs `tfevents` in its name and reads in the order of names."""
        folder = workdir / TENSORBOARD_FOLDER
        if not remote.is_remote(folder):
            folder.mkdir(exist_ok=True)
        self._events = RecordWriter(
            GrowingFile(folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}")
        )
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        purge = SessionLog(status=SessionLog.START)  # TensorBoard drops its events from this step on
        self._write(Event(wall_time=time.time(), step=resume_step + 1, session_log=purge))

    def log_config(self, run: RunRecord) -> None:
        values = {key: value if isinstance(value, (bool, int, float)) else str(value)
                  for key, value in run.config.items()}  # fmt: skip
        rows = "\n".join(f"| {key} | {json.dumps(value)} |" for key, value in run.config.items())
        self._add(run.start, time.time(), hparams_pb(values, trial_id=str(run.workdir)))
        self._add(run.start, time.time(), _markdown("config", f"| key | value |\n| --- | --- |\n{rows}"))

    def log_scalars(self, step: int, values: Mapping[str, Any], *, split: str | None, time: float) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)) and math.isfinite(value):  # TensorBoard does not support other values
                tag = f"{split or 'train'}/{name}"
                self._add(step, time, Summary(value=[Summary.Value(tag=tag, simple_value=value)]))

    def log_samples(self, step: int, samples: Sequence[Sample], *, time: float) -> None:
        for number, sample in enumerate(samples):
            self._add(step, time, _markdown(f"samples/{number}", _sample_table(sample)))

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()

    def _add(self, step: int, time: float, summary: Summary) -> None:
        self._write(Event(wall_time=time, step=step, summary=summary))

    def _write(self, event: Event) -> None:
        self._events.write(event.SerializeToString())


def _markdown(name: str, text: str) -> Summary:
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
    metadata = create_summary_metadata(display_name=name, description="")
    return Summary(value=[Summary.Value(tag=name, metadata=metadata, tensor=tensor)])


def _sample_table(sample: Sample) -> str:
    """Formats a sample: the masked text, and a row for each mask."""
    rows = [
        f"| {mask['target']} | {mask['probability']:.3f} | "
        + ", ".join(f"{word} {probability:.3f}" for word, probability in mask["fills"]) + " |"
        for mask in sample["masks"]
    ]  # fmt: skip
    return "\n".join([sample["text"], "", "| target | probability | fills |", "| --- | --- | --- |", *rows])
