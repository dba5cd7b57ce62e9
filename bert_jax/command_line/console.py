"""Log lines and progress on stderr: bars on a terminal, log lines where stderr goes to a file.

A bar shows first what is worth most: steps, time left, and the parts of its postfix in their order. What does not fit
into the terminal's width is dropped, the drawing of the bar first.
"""

import io
import logging
import sys
from contextlib import suppress
from typing import Any

from bert_jax.progress import Bars, Progress, silent

log = logging.getLogger(__name__)

_FORMAT = "%(asctime)s %(levelname)s %(process_label)s%(message)s"
_LINE = (
    "{desc}: {n_fmt} of {total_fmt} {unit} ({percentage:.0f}%), {elapsed} passed, {remaining} left, {rate_fmt}{postfix}"
)
_LONGEST_INTERVAL = 600.0  # seconds between two lines of progress
_INTERVAL_SHARE = 0.02  # of the time that has passed
_LEAST_DRAWING = 8
_MOST_DRAWING = 30


def set_up_logging(*, quiet: bool = False) -> None:
    """Sends the package's log to stderr: time, level, process index if there are several, message.

    With `quiet`, only errors.
    """
    handler = _BarSafeHandler()
    handler.addFilter(_add_process_label)
    handler.setFormatter(logging.Formatter(_FORMAT, "%Y-%m-%d %H:%M:%S"))
    package = logging.getLogger("bert_jax")
    package.handlers = [handler]
    package.setLevel(logging.ERROR if quiet else logging.INFO)
    package.propagate = False


def _add_process_label(record: logging.LogRecord) -> bool:
    """Adds `process_label` to a record: "[INDEX/COUNT] " in one of several processes, else empty."""
    processes = sys.modules.get("bert_jax.runtime.processes")  # importing it takes seconds
    joined = processes.joined() if processes else None
    record.process_label = f"[{joined[0]}/{joined[1]}] " if joined else ""
    return True


class _BarSafeHandler(logging.Handler):
    """Writes lines to stderr, on a terminal above the progress bars.

    A record with the attribute `on_bar` is not written to a terminal, where a bar shows the same values. Lines that
    cannot be written are lost, so that no run ends because the reader of its log has ended, or its disk is full.
    """

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            self._write(self.format(record), on_bar=getattr(record, "on_bar", False))

    def _write(self, line: str, *, on_bar: bool) -> None:
        if sys.stderr.isatty():
            if on_bar:
                return
            from tqdm import tqdm

            tqdm.write(line, file=sys.stderr)
        else:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


def layout(
    n: float, total: float | None, elapsed: float, *, ncols: int | None = None, prefix: str = "", unit: str = "it",
    unit_scale: bool = False, rate: float | None = None, postfix: str | None = None, initial: float = 0,
) -> str:  # fmt: skip
    """Returns the line of a bar that fits into `ncols` columns. The arguments are those of `tqdm.format_meter`."""
    from tqdm import tqdm

    def count(value: float) -> str:
        return tqdm.format_sizeof(value) if unit_scale else f"{value:g}" if value % 1 else f"{int(value)}"

    unit = unit.strip()
    rate = rate or ((n - initial) / elapsed if elapsed and n > initial else None)
    values = [part for part in (postfix or "").split("  ") if part]
    parts: list[tuple[float, str]] = [(0, prefix)] if prefix else []  # (rank by worth, text) from left to right
    if total:
        parts.append((10, f"{100 * n / total:.0f}%"))
        parts.append((1, f"{count(n)}/{count(total)}" + ("B" if unit == "B" else "" if prefix else f" {unit}")))
        if rate and n < total:
            parts.append((2, f"{tqdm.format_interval((total - n) / rate)} left"))
    else:
        parts.append((1, f"{count(n)} {unit}"))
    parts += [(3 + i / len(values), value) for i, value in enumerate(values)]
    if rate:
        parts.append((20, f"{count(rate) if unit_scale else f'{rate:.3g}'}{'' if unit == 'B' else ' '}{unit}/s"))
    parts.append((30, f"{tqdm.format_interval(elapsed)} passed"))
    width = (ncols or 10**9) - 1
    shown: set[int] = set()
    used = 0
    for i in sorted(range(len(parts)), key=lambda i: parts[i][0]):
        needed = len(parts[i][1]) + (2 if shown else 0)
        if used + needed <= width:
            shown.add(i)
            used += needed
    texts = [text for i, (_, text) in enumerate(parts) if i in shown]
    if total and ncols and (cells := min(width - used - 2, _MOST_DRAWING)) >= _LEAST_DRAWING:
        filled = int(cells * min(1.0, n / total))
        texts.insert(1 if prefix else 0, "#" * filled + "-" * (cells - filled))
    line = "  ".join(texts)
    return line if ncols is None else line[:width]


def bars(*, quiet: bool = False) -> Bars:
    """Returns a factory of progress reports: a bar on a terminal, elsewhere a log line every 10 s or more.

    With `quiet`, nothing is shown.
    """
    if quiet:
        return silent
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        """Bar on a terminal, with the line of `layout`."""

        @staticmethod
        def format_meter(n: float, total: float | None, elapsed: float, **options: Any) -> str:  # type: ignore[override]
            names = ("ncols", "prefix", "unit", "unit_scale", "rate", "postfix", "initial")
            return layout(n, total, elapsed, **{name: options[name] for name in names if name in options})

    class LoggedProgress(tqdm):  # type: ignore[type-arg]
        """Logs what a bar would show, unless nothing has happened since the last line.

        The interval between two lines grows with the time that has passed.
        """

        _logged: float = 0

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if msg is None and self.n not in (self.initial, self._logged):
                self._logged = self.n
                log.info(" ".join(str(self).split()))
                if self.mininterval:
                    elapsed = self.format_dict["elapsed"]
                    self.mininterval = min(_LONGEST_INTERVAL, max(self.mininterval, _INTERVAL_SHARE * elapsed))

        def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
            super().set_postfix_str(s, refresh=False)

    def make(**options: Any) -> Progress:
        if sys.stderr.isatty():
            return Bar(file=sys.stderr, dynamic_ncols=True, mininterval=0.2, **options)
        if options.get("total"):
            options["bar_format"] = _LINE
        return LoggedProgress(file=io.StringIO(), **{"mininterval": 10.0, **options})

    return make
