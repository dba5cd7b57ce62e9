"""Apache Beam instead of a pool of local processes: the tasks of `prepare` on the workers of any Beam runner.

A pass of `prepare` is a pipeline that maps its function over its tasks. Workers read the runs of other workers from a
folder that all share. They write files atomically and under names that depend on the task alone, so a retried or
duplicate task writes the same file again.
"""

import contextlib
import io
import logging
import pickle
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import PipelineState
from etils import epath

from bert_jax.data.preparation.worker_pool import Result, Task, one_thread
from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import atomic

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BeamRunner:
    """Beam runner with Beam's options in command-line syntax, whose results pass through the shared folder `work`.

    Raises:
      InputError: unknown runner or invalid option.
    """

    runner: str
    flags: Sequence[str]
    work: str

    def __post_init__(self) -> None:
        self._pipeline()

    def map_tasks(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[Task, Result]]:
        """Yields (task, result) pairs in order.

        Raises:
          InputError: that of a task, or `work` is not shared with the workers.
          BertJaxError: the pipeline failed.
        """
        pipeline, folder = self._pipeline(), f"{self.work}/{uuid.uuid4().hex}"
        atomic.make_folder(epath.Path(folder))
        _ = (
            pipeline
            | "Tasks" >> beam.Create([(number, pickle.dumps(task)) for number, task in enumerate(tasks)])
            | "Spread" >> beam.Reshuffle()
            | "Run" >> beam.Map(_run_task, function, folder)
        )
        log.info("Running %d tasks with Apache Beam, --runner=%s", len(tasks), self.runner)
        self._run(pipeline)
        found = [_read(_result_path(folder, number)) for number in range(len(tasks))]
        for result in found:
            if isinstance(result, InputError):
                raise result
            if result is None:
                raise InputError(f"output: not shared with the workers of runner={self.runner}; use a store (gs://)")
        yield from ((task, result[0]) for task, result in zip(tasks, found, strict=True))

    def _pipeline(self) -> beam.Pipeline:
        stderr = io.StringIO()
        try:
            with contextlib.redirect_stderr(stderr):
                options = PipelineOptions([*self.flags, f"--runner={self.runner}"])
                options.get_all_options()
                return beam.Pipeline(options=options)
        except SystemExit as stopped:
            if not stopped.code:
                raise
            message = stderr.getvalue().strip().splitlines()[-1]
            raise InputError(f"runner={self.runner}: invalid option: {message}") from stopped
        except (ValueError, ImportError, AttributeError) as error:
            raise InputError(f"runner={self.runner}: {error}") from error

    def _run(self, pipeline: beam.Pipeline) -> None:
        # Local runners log the traceback of an error that they raise here.
        logging.getLogger("apache_beam.runners.common").setLevel(logging.CRITICAL)
        try:
            state = pipeline.run().wait_until_finish()
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise BertJaxError(f"runner={self.runner}: the pipeline failed: {lines[-1]}") from error
        if state != PipelineState.DONE:
            raise BertJaxError(f"runner={self.runner}: the pipeline ended in state {state}; see its logs")


def _result_path(folder: str, number: int) -> str:
    return f"{folder}/{number:06d}.result"


def _run_task(task: tuple[int, bytes], function: Callable[[Any], Result], folder: str) -> None:
    """Writes the result of a pickled task, or its InputError, which Beam would retry and report in a traceback."""
    one_thread()
    try:
        result: Any = (function(pickle.loads(task[1])),)
    except InputError as error:
        result = InputError(str(error))
    with atomic.whole_path(_result_path(folder, task[0])) as path:
        path.write_bytes(pickle.dumps(result))


def _read(path: str) -> Any:
    """Returns the result of a task in a tuple, or its InputError; None if it is missing."""
    file = epath.Path(path)
    result: Any = pickle.loads(atomic.read_whole(file)) if file.exists() else None
    return result
