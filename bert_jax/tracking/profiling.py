"""Profiler traces of some steps, for TensorBoard or Perfetto."""

import logging
import shutil
import tempfile
from pathlib import Path

import jax
from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic

log = logging.getLogger(__name__)

FOLDER = "profile"


def parse_steps(steps: str) -> range:
    """Parses `A:B` to the steps A to B, both included, and "" to no steps. Raises InputError for other texts."""
    if not steps:
        return range(0)
    first, colon, last = steps.partition(":")
    if colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last):
        return range(int(first), int(last) + 1)
    raise InputError(f"profile.steps={steps!r}: expected FIRST:LAST, such as 10:15")


class StepTracer:
    """Traces steps into WORKDIR/profile. A run that starts or ends within them traces those that it runs."""

    def __init__(self, steps: str, workdir: epath.Path, *, records: bool = True):
        """Parses `steps`. With `records` False nothing is traced, but `begins` and `ends` return the same.

        The loop has to read metrics at the same steps in every process, while one of them records.
        """
        self._steps = parse_steps(steps)
        self._records = records
        self._is_active = False
        self._target = workdir / FOLDER
        self._folder: Path | None = None  # local folder of the current trace

    def begins(self, step: int) -> bool:
        """Returns whether the trace has to be started before `step`."""
        return not self._is_active and step in self._steps

    def start(self) -> None:
        """Starts the trace."""
        self._is_active = True
        if not self._records:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="bert_jax_profile_"))  # JAX writes only to local disks
        jax.profiler.start_trace(str(self._folder))

    def ends(self, step: int) -> bool:
        """Returns whether the trace has to be closed after `step`."""
        return self._is_active and step == self._steps[-1]

    def close(self) -> None:
        """Stops the trace and writes it to the workdir."""
        self._is_active = False
        if self._folder is None:
            return
        folder, self._folder = self._folder, None
        try:
            jax.profiler.stop_trace()
            for path in sorted(folder.rglob("*")):
                target = self._target / str(path.relative_to(folder))
                if path.is_file():
                    atomic.make_folder(target.parent)
                    atomic.place(path, target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        log.info("Wrote profiler trace; view it with: tensorboard --logdir %s, or at ui.perfetto.dev", self._target)
