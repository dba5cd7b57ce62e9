"""A trace of some steps, for TensorBoard's profiler or Perfetto."""

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
    """`A:B` as the steps A to B, both included; no step for "". InputError for anything else."""
    if not steps:
        return range(0)
    first, colon, last = steps.partition(":")
    if colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last):
        return range(int(first), int(last) + 1)
    raise InputError(f"profile.steps has to be FIRST:LAST, such as 10:15, not {steps!r}")


class StepTracer:
    """Traces steps into WORKDIR/profile. A run that begins or ends among them has a trace of those that it makes."""

    def __init__(self, steps: str, workdir: epath.Path, *, records: bool = True):
        """With `records` False nothing is traced, and `begins` and `ends` say the same: the loop has to read metrics
        at the same steps in every process, while one of them records."""
        self._steps = parse_steps(steps)
        self._records = records
        self._is_active = False
        self._target = workdir / FOLDER
        self._folder: Path | None = None  # of what is being traced

    def begins(self, step: int) -> bool:
        """Returns True if the trace has to be started before `step`."""
        return not self._is_active and step in self._steps

    def start(self) -> None:
        """Traces from now on."""
        self._is_active = True
        if not self._records:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="bert_jax_profile_"))  # JAX writes to local disks alone
        jax.profiler.start_trace(str(self._folder))

    def ends(self, step: int) -> bool:
        """Returns True if the trace has to be closed after `step`."""
        return self._is_active and step == self._steps[-1]

    def close(self) -> None:
        """Writes what has been traced."""
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
        log.info("traced: tensorboard --logdir %s, or ui.perfetto.dev", self._target)
