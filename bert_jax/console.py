"""Log lines and progress on stderr: bars on a terminal, log lines where stderr goes to a file."""

import io
import logging
import sys
from typing import Any

from bert_jax.progress import Bars, Progress

log = logging.getLogger(__name__)

_FORMAT = "%(asctime)s %(levelname)s %(process_label)s%(message)s"
_LINE = (
    "{desc}: {n_fmt} of {total_fmt} {unit} ({percentage:.0f}%), {elapsed} passed, {remaining} left, {rate_fmt}{postfix}"
)


def set_up_logging() -> None:
    """Sends the package's log to stderr: time, level, process index if there are several, message."""
    handler = _BarSafeHandler()
    handler.addFilter(_add_process_label)
    handler.setFormatter(logging.Formatter(_FORMAT, "%Y-%m-%d %H:%M:%S"))
    package = logging.getLogger("bert_jax")
    package.handlers = [handler]
    package.setLevel(logging.INFO)
    package.propagate = False


def _add_process_label(record: logging.LogRecord) -> bool:
    """Adds `process_label` to a record: "[INDEX/COUNT] " in one of several processes, else empty."""
    processes = sys.modules.get("bert_jax.runtime.processes")  # importing it takes seconds
    joined = processes.joined() if processes else None
    record.process_label = f"[{joined[0]}/{joined[1]}] " if joined else ""
    return True


class _BarSafeHandler(logging.Handler):
    """Writes lines to stderr, on a terminal above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if sys.stderr.isatty():
            from tqdm import tqdm

            tqdm.write(line, file=sys.stderr)
        else:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


def bars() -> Bars:
    """Returns a factory of progress reports: a bar on a terminal, elsewhere a log line every 10 s."""
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

    def make(**options: Any) -> Progress:
        if sys.stderr.isatty():
            return tqdm(file=sys.stderr, dynamic_ncols=True, mininterval=0.2, **options)
        if options.get("total"):
            options["bar_format"] = _LINE
        return LoggedProgress(file=io.StringIO(), **{"mininterval": 10.0, **options})

    return make
