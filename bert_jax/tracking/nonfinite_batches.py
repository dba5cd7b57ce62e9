"""Batches of non-finite steps, in files of the workdir, so that the cause can be looked for after the run.

WORKDIR/nonfinite/step-STEP-process-INDEX.npz   the rows of one process of the first step of a streak
"""

import io
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from bert_jax.batch import HostBatch
from bert_jax.errors import BertJaxError
from bert_jax.files import atomic, remote

log = logging.getLogger(__name__)

FOLDER = "nonfinite"
MAX_FILES = 8
"""Files of each process in a workdir; the oldest are deleted."""


class NonfiniteBatches:
    """Writes the batch of each step that is not finite, unless the step before was not finite either.

    A batch is a function of the step, so it is recomputed for the file; none is kept in memory.
    """

    def __init__(
        self, workdir: epath.Path, rows: np.ndarray, make_batch: Callable[[int], HostBatch],
        describe: Callable[[int], Mapping[str, np.ndarray]],
    ):  # fmt: skip
        """Writes nothing yet.

        Args:
          workdir: the folder of the run.
          rows: this process's rows of the global batch, int64 [n].
          make_batch: maps the number of steps done to those rows of the next batch.
          describe: maps the same number to further arrays, such as the rows' instances.
        """
        self._folder, self._rows, self._make_batch, self._describe = workdir / FOLDER, rows, make_batch, describe

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the metrics of a step; logs and writes the batch if it is the first of a streak."""
        if values["nonfinite_streak"] != 1:
            return
        process = jax.process_index()
        path = self._folder / f"step-{step}-process-{process}.npz"
        log.warning(
            "Step %d: loss, gradient or update is not finite (loss %g, gradient norm %g); the step is skipped, and its "
            "batch is kept in %s", step, values["loss"], values["grad_norm"], path,
        )  # fmt: skip
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {"step": np.int64(step), "rows": self._rows}
        arrays |= {**self._make_batch(step - 1), **self._describe(step - 1)}
        np.savez_compressed(buffer, **arrays)
        try:
            atomic.make_folder(self._folder)
            atomic.write_whole(path, buffer.getvalue())
            self._delete_oldest(process)
        except (OSError, BertJaxError) as error:
            log.warning("The batch could not be written to %s: %s", path, error)

    def _delete_oldest(self, process: int) -> None:
        def list_files() -> list[epath.Path]:
            return list(self._folder.iterdir())

        found = {}
        for path in remote.retry_transient(self._folder, list_files):
            if match := re.fullmatch(rf"step-([0-9]+)-process-{process}\.npz", path.name):
                found[int(match[1])] = path
        for step in sorted(found)[:-MAX_FILES]:
            found[step].unlink(missing_ok=True)
