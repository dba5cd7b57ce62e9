"""Logs where nothing can be appended to: what is written is held for some seconds, and then put as a file of its own.

Rows go to WORKDIR/metrics/part-FIRST-LAST.jsonl, where FIRST and LAST count what was put. Every `MERGED` parts are put
once more as one, which takes their place: a part whose range lies within another's is not read, so a kill between the
two hides nothing and doubles nothing, a run of days has some hundred files, and a row is put twice at the most.
"""

import os
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.tracking.tensorboard import Event, EventFile, event_file_name

ROWS_SECONDS = 30.0
"""How long a row is held at the most, as long as others follow: a kill loses no more, and none before a checkpoint."""
EVENTS_SECONDS = 300.0
"""The same for TensorBoard's events, whose files are never merged."""
MERGED = 64
EVENTS = "events"
"""The file that they are held in."""

_PART = re.compile(r"part-(\d{8})-(\d{8})\.jsonl")
_REQUESTS = 16  # at the same time


def read_parts(folder: epath.Path) -> list[bytes]:
    """The contents of a folder's parts, in order; nothing where there is no folder."""
    for _ in range(5):
        spans = _whole_spans(_spans(folder))
        try:
            with ThreadPoolExecutor(_REQUESTS) as pool:
                return list(pool.map(lambda span: atomic.read_whole(folder / _name(*span)), spans))
        except (InputError, FileNotFoundError):  # a run that goes on has merged them since they were listed
            continue
    raise InputError(f"{folder} changes while it is read: try again")


def _name(first: int, last: int) -> str:
    return f"part-{first:08d}-{last:08d}.jsonl"


def _spans(folder: epath.Path) -> list[tuple[int, int]]:
    if not remote.exists(folder):
        return []
    names = remote.patiently(folder, lambda: [child.name for child in folder.iterdir()])
    return sorted((int(found[1]), int(found[2])) for name in names if (found := _PART.fullmatch(name)))


def _whole_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those that lie within no other, in order."""
    whole: list[tuple[int, int]] = []
    for first, last in sorted(spans, key=lambda span: (span[0], -span[1])):
        if not whole or last > whole[-1][1]:
            whole.append((first, last))
    return whole


class PartRows:
    """Lines of JSON, in parts."""

    def __init__(self, folder: epath.Path, kept: str):
        """What there is in `folder` is replaced by the lines `kept`."""
        self._folder = folder
        self._lines: list[str] = []
        self._put_at = time.monotonic()
        self._recent: list[str] = []  # parts that are not merged yet
        before = _spans(folder)
        self._next = max((last for _, last in before), default=-1) + 1
        if before or kept:
            self._next = max(self._next, 1)
            self._put(0, self._next - 1, kept)
            self._delete([span for span in before if span != (0, self._next - 1)])

    def write(self, line: str) -> None:
        """Adds a line, and puts those that are held if it is time."""
        self._lines.append(line)
        if time.monotonic() - self._put_at >= ROWS_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Puts all that is held."""
        if not self._lines:
            return
        self._put(self._next, self._next, "".join(self._lines))
        self._recent.append("".join(self._lines))
        self._lines = []
        self._next += 1
        self._put_at = time.monotonic()
        if len(self._recent) == MERGED:
            first = self._next - MERGED
            self._put(first, self._next - 1, "".join(self._recent))
            self._delete([(number, number) for number in range(first, self._next)])
            self._recent = []

    def close(self) -> None:
        """Puts all that is held."""
        self.flush()

    def _put(self, first: int, last: int, text: str) -> None:
        atomic.write_whole(self._folder / _name(first, last), text.encode())

    def _delete(self, spans: list[tuple[int, int]]) -> None:
        def delete(span: tuple[int, int]) -> None:
            path = self._folder / _name(*span)
            remote.patiently(path, lambda: path.unlink(missing_ok=True))

        with ThreadPoolExecutor(_REQUESTS) as pool:
            list(pool.map(delete, spans))


class PartEvents:
    """TensorBoard's events, in files that it reads one after the other."""

    def __init__(self, folder: epath.Path):
        self._folder = folder
        self._local = tempfile.TemporaryDirectory(prefix="bert-jax-")
        self._writer: EventFile | None = None
        self._put_at = time.monotonic()

    def write_event(self, event: Event) -> None:
        """Adds an event, and puts those that are held if it is time."""
        self._writer = self._writer or EventFile(os.path.join(self._local.name, EVENTS))
        self._writer.write_event(event)
        if time.monotonic() - self._put_at >= EVENTS_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Puts all that is held."""
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        written = Path(self._local.name) / EVENTS
        try:
            atomic.upload(written, self._folder / event_file_name())
        finally:
            written.unlink()
        self._put_at = time.monotonic()

    def close(self) -> None:
        """Puts all that is held."""
        try:
            self.flush()
        finally:
            with suppress(OSError):
                self._local.cleanup()
