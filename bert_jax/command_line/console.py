"""Log lines and progress on stderr: bars on a terminal, log lines where stderr goes to a file."""

import io
import logging
import sys
from contextlib import suppress
from typing import Any

from bert_jax.progress import Bars

log = logging.getLogger(__name__)

_FORMAT = "%(asctime)s %(levelname)s %(process_label)s%(message)s"
_BAR = "{desc}: {percentage:.0f}% {n_fmt}/{total_fmt} {unit}, {remaining} left{postfix}, {rate_fmt} {bar}"
"""What a bar shows, first what is worth most: tqdm cuts its end to the width of the terminal."""
_LINE = (
    "{desc}: {n_fmt} of {total_fmt} {unit} ({percentage:.0f}%), {elapsed} passed, {remaining} left, {rate_fmt}{postfix}"
)


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
            line = self.format(record)
            if not sys.stderr.isatty():
                sys.stderr.write(f"{line}\n")
            elif not getattr(record, "on_bar", False):
                from tqdm import tqdm

                tqdm.write(line, file=sys.stderr)


def bars() -> Bars:
    """Returns a factory of progress reports: a bar on a terminal, elsewhere a log line every 30 s."""
    from tqdm import tqdm

    class LoggedProgress(tqdm):  # type: ignore[type-arg]
        """Logs what a bar would show, unless nothing has happened since the last line."""

        _logged: float = 0

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if msg is None and self.n not in (self.initial, self._logged):
                self._logged = self.n
                log.info(" ".join(str(self).split()))

        def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
            super().set_postfix_str(s, refresh=False)

    def make(**options: Any) -> Any:
        is_terminal = sys.stderr.isatty()
        if options.get("total"):
            options["bar_format"] = _BAR if is_terminal else _LINE
        if is_terminal:
            return tqdm(**{"file": sys.stderr, "dynamic_ncols": True, "mininterval": 0.2, **options})
        return LoggedProgress(file=io.StringIO(), **{"mininterval": 30.0, **options})

    return make
