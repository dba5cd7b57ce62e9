"""TensorBoard's event files, by the messages and the record writer of the package that shows them.

The usual writers (SummaryWriter) have a thread of their own, which waits for ever once it has died of a full disk, and
import what else is installed, TensorFlow or torch: seconds of each start.
"""

import os
import socket
import time

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

__all__ = ["Event", "EventFile", "SessionLog", "event_file_name", "scalar"]


def event_file_name() -> str:
    """A name after those of earlier starts: the viewer wants `tfevents` in it, and reads a folder in names' order."""
    return f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"


class EventFile:
    """A new file of events, which is written by no other thread."""

    def __init__(self, path: str | os.PathLike[str]):
        self._records = RecordWriter(open(path, "xb"))  # noqa: SIM115
        self.write_event(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write_event(self, event: Event) -> None:
        """Appends an event."""
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        """Hands what is buffered to the system."""
        self._records.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._records.close()


def scalar(name: str, value: float) -> Summary:
    """One number of a curve."""
    return Summary(value=[Summary.Value(tag=name, simple_value=value)])
