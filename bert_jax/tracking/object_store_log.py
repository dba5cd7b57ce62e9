"""Buffered logging to object stores, which cannot append: writes rows and events periodically as part files.

Rows go to WORKDIR/metrics/part-FIRST-LAST.jsonl, where FIRST and LAST number the flushes. Every `MERGED` parts are
merged into one part, which replaces them. A part whose range is contained in another is ignored, so a kill during a
merge neither loses nor duplicates rows. A run of days has some hundred files, and a row is uploaded at most twice.
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
"""Maximal buffering time of a row while others follow: a kill loses no more, and nothing before a checkpoint."""
EVENTS_SECONDS = 300.0
"""Maximal buffering time of TensorBoard events, whose files are never merged."""
MERGED = 64
EVENTS = "events"
"""Name of the local file that buffers the events."""

_PART = re.compile(r"part-(\d{8})-(\d{8})\.jsonl")
_REQUESTS = 16  # concurrent requests


def read_parts(folder: epath.Path) -> list[bytes]:
    """Reads the contents of a folder's parts, in order; empty without a folder."""
    for _ in range(5):
        spans = _outermost_spans(_spans(folder))
        try:
            with ThreadPoolExecutor(_REQUESTS) as pool:
                return list(pool.map(lambda span: atomic.read_whole(folder / _name(*span)), spans))
        except (InputError, FileNotFoundError):  # a running run has merged them since they were listed
            continue
    raise InputError(f"{folder} changed during each of 5 attempts to read it; rerun the command")


def _name(first: int, last: int) -> str:
    return f"part-{first:08d}-{last:08d}.jsonl"


def _spans(folder: epath.Path) -> list[tuple[int, int]]:
    if not remote.exists(folder):
        return []
    names = remote.retry_transient(folder, lambda: [child.name for child in folder.iterdir()])
    return sorted((int(found[1]), int(found[2])) for name in names if (found := _PART.fullmatch(name)))


def _outermost_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the spans that are not contained in another, in order."""
    outermost: list[tuple[int, int]] = []
    for first, last in sorted(spans, key=lambda span: (span[0], -span[1])):
        if not outermost or last > outermost[-1][1]:
            outermost.append((first, last))
    return outermost


class PartRows:
    """JSON lines in part files."""

    def __init__(self, folder: epath.Path, kept: str):
        """Replaces the parts in `folder` by the lines `kept`."""
        self._folder = folder
        self._lines: list[str] = []
        self._flushed_at = time.monotonic()
        self._recent: list[str] = []  # texts of parts that are not merged yet
        before = _spans(folder)
        self._next = max((last for _, last in before), default=-1) + 1
        if before or kept:
            self._next = max(self._next, 1)
            self._put(0, self._next - 1, kept)
            self._delete([span for span in before if span != (0, self._next - 1)])

    def write(self, line: str) -> None:
        """Buffers a line, and flushes every `ROWS_SECONDS`."""
        self._lines.append(line)
        if time.monotonic() - self._flushed_at >= ROWS_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes all buffered data to the store."""
        if not self._lines:
            return
        self._put(self._next, self._next, "".join(self._lines))
        self._recent.append("".join(self._lines))
        self._lines = []
        self._next += 1
        self._flushed_at = time.monotonic()
        if len(self._recent) == MERGED:
            first = self._next - MERGED
            self._put(first, self._next - 1, "".join(self._recent))
            self._delete([(number, number) for number in range(first, self._next)])
            self._recent = []

    def close(self) -> None:
        """Writes all buffered data to the store."""
        self.flush()

    def _put(self, first: int, last: int, text: str) -> None:
        atomic.write_whole(self._folder / _name(first, last), text.encode())

    def _delete(self, spans: list[tuple[int, int]]) -> None:
        def delete(span: tuple[int, int]) -> None:
            path = self._folder / _name(*span)
            remote.retry_transient(path, lambda: path.unlink(missing_ok=True))

        with ThreadPoolExecutor(_REQUESTS) as pool:
            list(pool.map(delete, spans))


class PartEvents:
    """TensorBoard events in separate files, which TensorBoard reads in order."""

    def __init__(self, folder: epath.Path):
        self._folder = folder
        self._local = tempfile.TemporaryDirectory(prefix="bert-jax-")
        self._writer: EventFile | None = None
        self._flushed_at = time.monotonic()

    def write_event(self, event: Event) -> None:
        """Buffers an event, and flushes every `EVENTS_SECONDS`."""
        self._writer = self._writer or EventFile(os.path.join(self._local.name, EVENTS))
        self._writer.write_event(event)
        if time.monotonic() - self._flushed_at >= EVENTS_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes all buffered data to the store."""
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        written = Path(self._local.name) / EVENTS
        try:
            atomic.upload(written, self._folder / event_file_name())
        finally:
            written.unlink()
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Writes all buffered data to the store."""
        try:
            self.flush()
        finally:
            with suppress(OSError):
                self._local.cleanup()
