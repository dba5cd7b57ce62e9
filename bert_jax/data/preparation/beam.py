"""Apache Beam runner: the functions of the local runner as a pipeline for any Beam runner.

Workers share no disk. The pipeline shuffles the data that the local runner keeps in files between its two passes.

    files -> slices -> runs --+--> sums and lowest hashes -> ranges of buckets ----.
                              +--> hashes of lines -> lines to drop ---------------+  side inputs
                              +--> a part of the run for each bucket -> by bucket -+-> one shard each

A part is the slice of a run's arrays between two hashes, so that elements are few and large. A worker writes its shard
to its own disk and copies it atomically to a folder in the output. The step is idempotent: retried or duplicate workers
write identical files. Shards are published only when all exist, as by the local runner.
"""

import contextlib
import io
import logging
import os
import pickle
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.pvalue import AsList, AsSingleton, TaggedOutput
from apache_beam.runners.runner import PipelineState
from etils import epath

from bert_jax.data.corpora import corpus
from bert_jax.data.corpora.corpus_inputs import is_local_file
from bert_jax.data.corpora.corpus_options import CorpusOptions
from bert_jax.data.hashing import key_from
from bert_jax.data.preparation.filters import counted_lines, frequent
from bert_jax.data.preparation.options import PrepareOptions
from bert_jax.data.preparation.shards import BuildTask, Built, build, lowest_hashes, shard_ranges
from bert_jax.data.preparation.sorted_runs import RunInMemory, hash_range_of, tokenized_runs
from bert_jax.data.preparation.worker_pool import one_thread
from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import atomic
from bert_jax.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Range = tuple[str, str, int, int]  # split, file, low, high
_COUNT = "shards"  # the file with the number of shards


@dataclass(frozen=True)
class Job:
    """Settings of a pipeline, which writes the shards to the folder `staged`."""

    tokenizer: Tokenizer
    options: PrepareOptions
    seed: int
    staged: epath.Path


@contextlib.contextmanager
def staging(folder: epath.Path) -> Iterator[epath.Path]:
    """Yields a unique staging folder in `folder`, since a pipeline may outlive the command that started it."""
    path = os.fspath(folder)
    staged = epath.Path(path if "://" in path else os.path.abspath(path)) / uuid.uuid4().hex
    atomic.make_folder(staged)
    try:
        yield staged
    finally:
        staged.rmtree(missing_ok=True)


def build_splits(
    groups: Sequence[Sequence[str]], job: Job, runner: str, flags: Sequence[str]
) -> tuple[dict[str, list[Built]], dict[str, epath.Path]]:
    """Runs the pipeline; returns each split's shards and each file's path in `job.staged`, both empty without text.

    Args:
      groups: the files of a `corpus.plan`, grouped by the worker that reads them.
      job: the settings of the pipeline.
      runner: the name of a Beam runner.
      flags: Beam's options in command-line syntax.

    Raises:
      InputError: unknown runner, missing option, output not shared with the workers, or as `corpus.read`.
      BertJaxError: the pipeline failed.
    """
    pipeline = _pipeline(runner, flags)
    _connect(pipeline, [tuple(map(_everywhere, paths)) for paths in groups], job)
    log.info("Preparing the dataset with Apache Beam, --runner=%s", runner)
    _run(pipeline, runner)
    if failures := sorted(path.read_text() for path in job.staged.glob("*.failed")):
        others = f" (and {len(failures) - 1} similar errors)" if failures[1:] else ""
        raise InputError(failures[0] + others)
    results = [pickle.loads(path.read_bytes()) for path in job.staged.glob("*.built")]
    count = job.staged / _COUNT
    if not count.exists() or len(results) != int(count.read_text()):
        raise InputError(
            f"--output: not shared by this machine and the workers of --runner={runner}; expected a folder that all "
            "can access, such as gs://BUCKET/FOLDER"
        )
    splits: dict[str, list[Built]] = {"train": [], "eval": []}
    for _, split, built in sorted(results, key=lambda result: result[0]):
        splits[split].append(built)
    return splits, {built.shard.file: job.staged / built.shard.file for shards in splits.values() for built in shards}


def _everywhere(path: str) -> str:
    """Makes a local path absolute, since workers have another working directory."""
    return os.path.abspath(path) if is_local_file(path) else path


def _pipeline(runner: str, flags: Sequence[str]) -> beam.Pipeline:
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            options = PipelineOptions([*flags, f"--runner={runner}"])
            options.get_all_options()
            return beam.Pipeline(options=options)
    except SystemExit as stopped:
        if not stopped.code:
            raise
        raise InputError(
            f"--runner={runner}: invalid option: {stderr.getvalue().strip().splitlines()[-1]}"
        ) from stopped
    except (ValueError, ImportError, AttributeError) as error:
        raise InputError(f"--runner={runner}: {error}") from error


def _run(pipeline: beam.Pipeline, runner: str) -> None:
    # Local runners log the traceback of an error that they raise here.
    logging.getLogger("apache_beam.runners.common").setLevel(logging.CRITICAL)
    try:
        result = pipeline.run()
        try:
            state = result.wait_until_finish()
        except KeyboardInterrupt:
            result.cancel()
            raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise BertJaxError(f"--runner={runner}: the pipeline failed: {lines[-1]}") from error
    if state != PipelineState.DONE:
        raise BertJaxError(f"--runner={runner}: the pipeline ended in state {state}, expected DONE; see its logs")


def _connect(pipeline: beam.Pipeline, groups: Sequence[tuple[str, ...]], job: Job) -> None:
    planned = pipeline | "Files" >> beam.Create(groups) | "Plan" >> _trying(partial(_slices, options=job.options))
    tokenize = partial(tokenized_runs, tokenizer=job.tokenizer, options=job.options)
    read = planned.done | "Spread" >> beam.Reshuffle() | "Tokenize" >> _trying(tokenize)
    runs = read.done
    failures = (planned.failed, read.failed) | "Failures" >> beam.Flatten()
    _ = failures | "Write failures" >> beam.Map(_write_failure, job.staged)

    total = runs | "Sum each" >> beam.Map(lambda run: _sum([run])) | "Sum" >> beam.CombineGlobally(_sum)
    ranges = total | "Ranges" >> beam.Map(_ranges, AsList(failures), job.options)
    _ = ranges | "Count" >> beam.Map(_write_count, job.staged)
    repeated: Any = []
    if limit := job.options.max_line_repeats:
        lines = runs | "Lines" >> beam.FlatMap(_lines) | "By hash" >> beam.GroupByKey()
        repeated = AsList(lines | "Repeated" >> beam.Map(_repeated, limit))

    parts = runs | "Parts" >> beam.FlatMap(_parts, AsSingleton(ranges), bool(job.options.max_line_repeats))
    empty = ranges | "Empty" >> beam.FlatMap(lambda found: [(number, None) for number in range(len(found))])
    _ = (
        (parts, empty)
        | "All parts" >> beam.Flatten()
        | "By bucket" >> beam.GroupByKey()
        | "Build" >> beam.Map(_build, AsSingleton(ranges), repeated, job)
    )


class _Try(beam.DoFn):
    """Yields the results of a function for an element; InputErrors go to the output `failed`.

    Beam would retry an exception, and report it inside a traceback, if at all.
    """

    def __init__(self, function: Callable[[Any], Iterable[Any]]):
        self._function = function

    def setup(self) -> None:
        one_thread()

    def process(self, element: Any) -> Iterator[Any]:
        try:
            yield from self._function(element)
        except InputError as error:
            yield TaggedOutput("failed", str(error))


def _trying(function: Callable[[Any], Iterable[Any]]) -> Any:
    return beam.ParDo(_Try(function)).with_outputs("failed", main="done")


def _slices(paths: Sequence[str], options: CorpusOptions) -> list[tuple[corpus.Slice, ...]]:
    return corpus.group_slices(corpus.slices_of(paths, options))


def _write_failure(failure: str, staged: epath.Path) -> None:
    atomic.write_whole(staged / f"{key_from(failure):016x}.failed", failure.encode())


def _write_count(ranges: list[Any], staged: epath.Path) -> None:
    atomic.write_whole(staged / _COUNT, str(len(ranges)).encode())


def _sum(runs: Iterable[RunInMemory]) -> RunInMemory:
    """Combines the data of runs that determine the ranges of the shards: counts and lowest hashes."""
    all_runs = list(runs)
    documents, tokens = sum(run.documents for run in all_runs), sum(run.tokens for run in all_runs)
    return RunInMemory({"hashes": lowest_hashes(all_runs)}, documents, tokens)


def _ranges(total: RunInMemory, failures: list[str], options: PrepareOptions) -> Any:
    """Returns a list of Range. Annotated as Any: Beam's integer coder would refuse values of 2**63 and more."""
    return [] if failures or not total.documents else shard_ranges([total], options)


def _lines(run: RunInMemory) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray]]]:
    for part, hashes, counts in counted_lines(run):
        yield part, (hashes, counts)


def _repeated(part: tuple[int, Iterable[tuple[np.ndarray, np.ndarray]]], limit: int) -> np.ndarray:
    hashes, counts = (np.concatenate(arrays) for arrays in zip(*part[1], strict=True))
    return frequent(hashes, counts, limit)


def _parts(run: RunInMemory, ranges: list[Range], lines: bool) -> Iterator[tuple[int, RunInMemory]]:
    for number, (_, _, low, high) in enumerate(ranges):
        if part := hash_range_of(run, low, high, lines):
            yield number, part


def _build(
    bucket: tuple[int, Iterable[RunInMemory | None]], ranges: list[Range], repeated: list[np.ndarray], job: Job
) -> None:
    number, parts = bucket
    split, file, low, high = ranges[number]
    runs = [part for part in parts if part]
    drop = np.sort(np.concatenate([np.zeros(0, np.uint64), *repeated]))
    with tempfile.TemporaryDirectory(prefix="bert-jax-prepare-") as scratch:
        size = job.tokenizer.vocab_size
        task = BuildTask(file, split, low, high, runs, size, job.options, job.seed, drop, Path(scratch))
        built = build(task)
        atomic.place(task.path, job.staged / file)
        atomic.write_whole(job.staged / f"{file}.built", pickle.dumps((number, split, built)))
