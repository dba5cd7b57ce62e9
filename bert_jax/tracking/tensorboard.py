"""TensorBoard event files, written with the messages and the record writer of the `tensorboard` package.

The usual writers (SummaryWriter) have a background thread, and block forever after it has died of a full disk. They
also import TensorFlow or torch if installed, which takes seconds at each start.
"""

import os
import socket
import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text import metadata as text_plugin
from tensorboard.summary.writer.record_writer import RecordWriter

__all__ = [
    "Event", "EventFile", "SessionLog", "Summary", "event_file_name", "hyperparameters", "markdown", "scalar",
]  # fmt: skip


def event_file_name() -> str:
    """Makes a file name that sorts after earlier ones: TensorBoard needs `tfevents` in it and reads in name order."""
    return f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"


class EventFile:
    """Event file that is written without a background thread."""

    def __init__(self, path: str | os.PathLike[str]):
        self._records = RecordWriter(open(path, "xb"))  # noqa: SIM115
        self.write_event(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write_event(self, event: Event) -> None:
        """Appends an event."""
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        """Flushes the buffer to the system."""
        self._records.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._records.close()


def scalar(name: str, value: float) -> Summary:
    """Makes a summary with one value of a curve."""
    return Summary(value=[Summary.Value(tag=name, simple_value=value)])


def markdown(name: str, text: str) -> Summary:
    """Makes a summary with one text in Markdown."""
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
    metadata = text_plugin.create_summary_metadata(display_name=name, description="")
    return Summary(value=[Summary.Value(tag=name, metadata=metadata, tensor=tensor)])


def hyperparameters(run: str, values: Mapping[str, bool | int | float | str]) -> Summary:
    """Makes a summary of the hyper-parameters of `run` for the HParams tab."""
    return hparams_pb(dict(values), trial_id=run)
