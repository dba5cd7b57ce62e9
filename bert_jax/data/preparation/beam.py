"""Apache Beam instead of a pool of local processes: the tasks of `prepare` on the workers of any Beam runner.

A pass of `prepare` is a pipeline that maps its function over its tasks. Workers read the runs of other workers from a
folder that all share. They write files atomically and under names that depend on the task alone, so a retried or
duplicate task writes the same file again.
"""

import contextlib
import io
import logging
import os
import pickle
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import PipelineState
from etils import epath

from bert_jax.data.preparation.worker_pool import Result, Task
from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import atomic


def map_tasks(
    function: Callable[[Task], Result], tasks: Sequence[Task], *, runner: str, flags: Sequence[str], work: str
) -> Iterator[Result]:
    """Yields the results of tasks in order; they pass through the shared folder `work`.

    Raises:
      InputError: that of a task; or an unknown runner, an invalid option, or `work` is not shared with the workers.
      BertJaxError: the pipeline failed.
    """
    pipeline, folder = open_pipeline(runner, flags), f"{work}/{uuid.uuid4().hex}"
    atomic.make_folder(epath.Path(folder))
    pickled = [(f"{folder}/{number}.result", pickle.dumps(task)) for number, task in enumerate(tasks)]
    _ = pipeline | beam.Create(pickled) | beam.Reshuffle() | beam.Map(_run_task, function)
    # Local runners log the traceback of an error that they raise here.
    logging.getLogger("apache_beam.runners.common").setLevel(logging.CRITICAL)
    try:
        state = pipeline.run().wait_until_finish()
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise BertJaxError(f"runner={runner}: the pipeline failed: {lines[-1]}") from error
    if state != PipelineState.DONE:
        raise BertJaxError(f"runner={runner}: the pipeline ended in state {state}; see its logs")
    for name, _ in pickled:
        path = epath.Path(name)
        if not path.exists():
            raise InputError(f"output: not shared with the workers of runner={runner}; use a store (gs://)")
        result = pickle.loads(atomic.read_whole(path))
        if isinstance(result, InputError):
            raise result
        yield result[0]


def open_pipeline(runner: str, flags: Sequence[str]) -> beam.Pipeline:
    """Opens a pipeline with Beam's options in command-line syntax.

    Raises InputError for an unknown runner or an invalid option.
    """
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            options = PipelineOptions([*flags, f"--runner={runner}"])
            options.get_all_options()
            return beam.Pipeline(options=options)
    except (SystemExit, ValueError, ImportError, AttributeError) as error:
        problem = stderr.getvalue().strip().splitlines()[-1] if isinstance(error, SystemExit) else error
        raise InputError(f"runner={runner}: {problem}") from error


def _run_task(task: tuple[str, bytes], function: Callable[[Any], Result]) -> None:
    """Writes the result of a pickled task, or its InputError, which Beam would retry and report in a traceback."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker has one core
    try:
        result: Any = (function(pickle.loads(task[1])),)
    except InputError as error:
        result = InputError(str(error))
    with atomic.whole_path(task[0]) as path:
        path.write_bytes(pickle.dumps(result))
