"""Prepares a dataset from raw text in two passes, with bounded memory.

1. Each slice of the input is read, split into sentences and tokenized. Its documents are written to temporary *runs*,
   sorted by the hash of their text.
2. A bucket is a range of hashes: a random sample of the corpus's documents that fits in memory. Its documents are
   gathered from the runs, paired (`instances.py`) and written as one shard. The lowest hashes are the eval split, so
   the split of a document does not depend on the rest of the corpus.

Both passes map a function over independent tasks, in a pool of processes or on the workers of Apache Beam. The output
is deterministic: the same corpus, vocabulary, options and seed give identical bytes for any number of workers. A worker
holds one slice or bucket in memory.

The dataset is written to a folder beside the output, which is renamed at the end. A store has no rename: there,
`dataset.json` is written last.
"""

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from etils import epath

from bert_jax.data.corpora import corpus
from bert_jax.data.corpora.corpus_inputs import is_local_file
from bert_jax.data.corpora.standard_input import is_stream, spooled
from bert_jax.data.corpora.text_hints import warn_of_text
from bert_jax.data.dataset import (
    INFO_FILE,
    TOKEN_COUNTS_FILE,
    TOKENIZER_FIELDS,
    Counts,
    DatasetInfo,
    SplitInfo,
    array_bytes,
    digest,
    lengths_file,
)
from bert_jax.data.preparation import report
from bert_jax.data.preparation.filters import RULES, Filter, count_lines, frequent_lines, hash_ranges, without_filters
from bert_jax.data.preparation.options import MAX_SHARE, PrepareOptions
from bert_jax.data.preparation.shards import (
    Built,
    build,
    eval_threshold,
    hold_out_lines,
    holds_out_lines,
    line_threshold,
    make_buckets,
)
from bert_jax.data.preparation.sorted_runs import Job, Run, tokenize, write_run
from bert_jax.data.preparation.worker_pool import Result, Task, map_tasks
from bert_jax.data.unknown_tokens import (
    WARN_SHARE,
    check_limit,
    check_share,
    sampled_share,
    unknown_share,
    warn_of_share,
)
from bert_jax.errors import InputError
from bert_jax.extras import install_hint
from bert_jax.files import atomic, provenance, remote
from bert_jax.progress import Bars, silent
from bert_jax.text.languages import warn_of_language
from bert_jax.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LOCAL = "local"
_COPIES = 16  # within a store, at a time

Splits = Mapping[str, Sequence[Built]]


class RunTasks(Protocol):
    """Runs a function on each task; yields (task, result) pairs, in any order."""

    def __call__(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[Task, Result]]: ...


def prepare(
    inputs: Sequence[str],
    tokenizer: Tokenizer,
    output: str,
    options: PrepareOptions,
    *,
    seed: int = 0,
    workers: int = 1,
    scratch: str | None = None,
    runner: str = LOCAL,
    beam_options: Sequence[str] = (),
    allow_unk: float = MAX_SHARE,
    vocabulary: str = "",
    bars: Bars = silent,
) -> DatasetInfo:
    """Prepares the dataset `output`, a new or empty folder, from the corpus `inputs`.

    The files of earlier datasets, and the file or folder `vocabulary` of the tokenizer, are no text, and are skipped.

    The `runner` is "local", a pool of `workers` processes, or the name of an Apache Beam runner, which takes
    `beam_options`. The bytes are the same. Temporary files of the local runner are in `scratch`, by default beside the
    output.

    Text with a share of [UNK] above `allow_unk` is refused, before pairs are created if possible. Above `WARN_SHARE`, a
    warning is logged. The input `-` is stdin; it and pipes are copied to a temporary file.

    Raises:
      InputError: the corpus is missing, empty or unreadable, an option is out of range, `output` already exists, the
        runner is unknown, or the vocabulary does not match the corpus.
      BertJaxError: a worker died, or a Beam pipeline failed.
      OSError: the disk is full.
    """
    folder = atomic.new_folder(output)
    if workers < 1:
        raise InputError(f"--workers={workers}: must be at least 1")
    check_limit(allow_unk)
    temporary = None if scratch is None else os.fspath(remote.parse_path(scratch))
    streams = list(filter(is_stream, inputs))
    _check_runner(runner, scratch, beam_options, streams)
    warn_of_language(options.language, tokenizer.lowercase, options.sentences == "split")
    plan = partial(corpus.plan, options=options, vocabulary=vocabulary)
    slices = [] if streams else plan(inputs)  # streams are first copied
    with ExitStack() as stack:
        new = stack.enter_context(atomic.whole_folder(folder, INFO_FILE, temporary))
        shared = str(new) if runner == LOCAL else stack.enter_context(_shared_folder(folder, new))
        local = stack.enter_context(_local_folder(temporary or str(new)))
        paths, described = stack.enter_context(spooled(inputs, Path(local)))
        slices = slices or plan(paths)
        if not options.ids_field:
            warn_of_text(slices, options, tokenizer.lowercase)
        work = local if shared == str(new) else f"{shared}/work"
        job = Job(tokenizer, options, seed, work, shared)
        run_tasks: RunTasks = partial(map_tasks, workers=workers)
        if runner != LOCAL:
            from bert_jax.data.preparation.beam import BeamRunner

            run_tasks, bars = BeamRunner(runner, beam_options, work).map_tasks, silent
            slices = [
                replace(piece, path=os.path.abspath(piece.path)) if is_local_file(piece.path) else piece
                for piece in slices
            ]
        info, unknown = _build(slices, job, allow_unk, run_tasks, bars, new)
        read = {"corpus": corpus.describe_files(slices, described, options), "vocabulary": {"sha256": tokenizer.sha256}}
        provenance.append(new, provenance.record(read, dataset_hash=info.hash))
        if shared != str(new):
            _copy_shards(info, shared, folder)
    warn_of_share(unknown, tokenizer, above=WARN_SHARE, where=str(folder))
    report.warn(info, list(dict.fromkeys(piece.path for piece in slices)))
    return info


def _check_runner(runner: str, scratch: str | None, beam_options: Sequence[str], streams: Sequence[str]) -> None:
    """Raises InputError for an unknown runner, for options that it does not support, or without Beam."""
    if runner == LOCAL:
        if beam_options:
            raise InputError(
                f"{beam_options[0]}: --runner=local does not support Beam's options; pass --runner DirectRunner"
            )
        return
    if scratch is not None:
        raise InputError(f"--scratch={scratch}: --runner={runner} does not support it; pass Beam's --temp_location")
    if streams and "direct" not in runner.lower():
        raise InputError(
            f"--input={streams[0]}: workers of --runner={runner} cannot read stdin and pipes of this machine; expected "
            "--runner=local, DirectRunner, or a file that the workers can read, such as gs://BUCKET/FILE"
        )
    logging.disable(logging.WARNING)  # Beam warns on import if BigQuery is missing
    try:
        from bert_jax.data.preparation.beam import BeamRunner
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "apache_beam":
            raise
        raise InputError(f"--runner={runner}: Apache Beam is not installed; run {install_hint('beam')}") from error
    finally:
        logging.disable(logging.NOTSET)
    BeamRunner(runner, beam_options, "")


@contextmanager
def _local_folder(parent: str) -> Iterator[str]:
    """Yields a new folder for temporary files, and deletes it."""
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bert-jax-prepare-", dir=parent) as work:
        yield work


@contextmanager
def _shared_folder(folder: epath.Path, new: epath.Path) -> Iterator[str]:
    """Yields the folder in which Beam's workers write: `new`, or one beside the output in a store, which it deletes."""
    if not remote.is_remote(folder):
        yield os.fspath(new)
        return
    shared = folder.parent / f".{folder.name}.partial-{os.urandom(4).hex()}"
    try:
        yield os.fspath(shared)
    finally:
        shared.rmtree(missing_ok=True)


def _copy_shards(info: DatasetInfo, source: str, folder: epath.Path) -> None:
    """Copies the shards within a store."""
    store, _ = remote.store_of(folder)
    names = [shard.file for split in info.splits.values() for shard in split.shards]
    with remote.store_errors(folder), ThreadPoolExecutor(_COPIES) as threads:
        list(threads.map(lambda name: store.copy(f"{source}/{name}", os.fspath(folder / name)), names))


def _build(
    slices: Sequence[corpus.Slice], job: Job, allow_unk: float, run_tasks: RunTasks, bars: Bars, new: epath.Path
) -> tuple[DatasetInfo, float]:
    """Runs both passes and writes the dataset; returns its description and the share of [UNK]."""
    runs = _tokenize(slices, job, run_tasks, bars)
    if not runs:
        files = list(dict.fromkeys(piece.path for piece in slices))
        others = f" and {len(files) - 1} more files" if files[1:] else ""
        raise InputError(f"--input={files[0]}{others}: the corpus contains no text; check its files")
    read = sum((run.counts for run in runs), Counts())
    if not job.options.drops_text:  # Else filters might still drop the [UNK].
        check_share(sampled_share(runs, job.tokenizer.unk_id), allow_unk, job.tokenizer)
    splits, dropped = _build_shards(runs, read, job, run_tasks, bars)
    _check_kept(splits, read, dropped, job.options)
    counts = np.sum([bucket.token_counts for buckets in splits.values() for bucket in buckets], axis=0)
    unknown = unknown_share(counts, job.tokenizer.unk_id)
    check_share(unknown, allow_unk, job.tokenizer)
    contents = {name: array_bytes(array) for name, array in _arrays(splits).items()}
    info = _describe(splits, read, dropped, job, {name: digest(content) for name, content in contents.items()})
    job.tokenizer.save(new)
    contents[INFO_FILE] = info.to_json().encode()
    for name, content in contents.items():
        atomic.write_whole(new / name, content)
    return info, unknown


def _tokenize(slices: Sequence[corpus.Slice], job: Job, run_tasks: RunTasks, bars: Bars) -> list[Run]:
    """Runs the first pass; returns its runs, in the order of the slices."""
    before = _fingerprints(slices)
    found: dict[int, list[Run]] = {}
    documents = 0
    with closing(bars(total=sum(piece.bytes for piece in slices), desc="tokenize", unit="B", unit_scale=True)) as bar:
        tasks = list(enumerate(corpus.group_slices(slices)))
        for (number, pieces), runs in run_tasks(partial(tokenize, job), tasks):
            found[number] = runs
            documents += sum(run.counts.documents for run in runs)
            bar.set_postfix_str(f"{documents:,} documents")
            bar.update(sum(piece.bytes for piece in pieces))
    changed = [path for path, fingerprint in _fingerprints(slices).items() if fingerprint != before[path]]
    if changed:
        raise InputError(f"{changed[0]}: changed while it was read; run the command again once it is stable")
    return [run for number in sorted(found) for run in found[number]]


def _fingerprints(slices: Sequence[corpus.Slice]) -> dict[str, str]:
    return {path: corpus.fingerprint(path) for path in {piece.path: None for piece in slices}}


def _build_shards(
    runs: Sequence[Run], read: Counts, job: Job, run_tasks: RunTasks, bars: Bars
) -> tuple[Splits, dict[str, Counts]]:
    """Runs the second pass; returns the shards of each split, and what each filter drops."""
    options = job.options
    dropped: list[dict[str, Counts]] = []
    repeated = _repeated_lines(runs, read, job, run_tasks) if options.max_line_repeats else None
    if holds_out_lines(read.documents, options):
        log.info("Holding out lines: the corpus has %s document(s), too few to hold out documents", read.documents)
        tasks = list(enumerate(hash_ranges(0, 2**64, read.tokens, options.bucket_tokens)))
        hold_out = partial(hold_out_lines, job, runs, repeated, line_threshold(runs, options))
        held = dict(run_tasks(hold_out, tasks))
        runs = [held[task][0] for task in tasks]
        dropped = [held[task][1] for task in tasks]
        options = without_filters(options)
        job, repeated = replace(job, options=options), None
        eval_below = int(options.eval_fraction * 2**64)
    else:
        lines = repeated.array("hashes") if repeated else np.zeros(0, np.uint64)
        eval_below = eval_threshold(runs, Filter(options, lines))
    buckets = make_buckets(runs, eval_below, options)
    built: dict[str, Built] = {}
    with closing(bars(total=read.documents, desc="pair and write", unit=" documents", unit_scale=True)) as bar:
        for bucket, shard in run_tasks(partial(build, job, runs, repeated), buckets):
            built[bucket.file] = shard
            bar.update(shard.counts.documents)
            bar.set_postfix_str(f"{sum(b.shard.instances for b in built.values()):,} instances")
    dropped += [shard.dropped for shard in built.values()]
    splits = {split: [built[bucket.file] for bucket in buckets if bucket.split == split] for split in ("train", "eval")}
    return splits, {rule: sum((counts[rule] for counts in dropped), Counts()) for rule in RULES}


def _repeated_lines(runs: Sequence[Run], read: Counts, job: Job, run_tasks: RunTasks) -> Run:
    """Returns a run of the hashes of the lines that occur too often."""
    ranges = hash_ranges(0, 2**64, read.tokens, job.options.bucket_tokens)
    counted = [run for _, run in run_tasks(partial(count_lines, job, runs), list(enumerate(ranges)))]
    frequent = [lines for _, lines in run_tasks(partial(frequent_lines, job, counted), ranges)]
    return write_run(f"{job.work}/repeated-lines", Counts(), {"hashes": np.sort(np.concatenate(frequent))})


def _check_kept(splits: Splits, read: Counts, dropped: Mapping[str, Counts], options: PrepareOptions) -> None:
    """Raises InputError for a train split without instances."""
    if sum(bucket.shard.instances for bucket in splits["train"]):
        return
    lost = {rule: counts.tokens for rule, counts in dropped.items() if counts.tokens}
    if sum(lost.values()) == read.tokens:
        rules = ", ".join(f"{number:,} of {rule.replace('_', ' ')}" for rule, number in lost.items())
        most = max(lost, key=lambda rule: lost[rule])
        raise InputError(
            f"--{RULES[most]}={getattr(options, RULES[most])}: the filters drop all {read.tokens:,} tokens of "
            f"{read.documents:,} documents ({rules}); change their limits"
        )
    raise InputError(f"--eval_fraction={options.eval_fraction}: the train split is empty; provide more text, or pass 0")


def _describe(
    splits: Splits, read: Counts, dropped: dict[str, Counts], job: Job, arrays: Mapping[str, str]
) -> DatasetInfo:
    return DatasetInfo(
        tokenizer={name: getattr(job.tokenizer, name) for name in TOKENIZER_FIELDS},
        seq_len=job.options.seq_len,
        seed=job.seed,
        options=job.options.as_recorded(),
        splits={split: _split_info(buckets) for split, buckets in splits.items()},
        corpus=read,
        dropped=dropped,
        arrays=arrays,
    ).with_hash()


def _split_info(buckets: Sequence[Built]) -> SplitInfo:
    kept = sum((bucket.counts for bucket in buckets), Counts())
    shards = tuple(bucket.shard for bucket in buckets)
    return SplitInfo(
        documents=kept.documents,
        sentences=kept.sentences,
        tokens=kept.tokens,
        used_tokens=sum(bucket.used_tokens for bucket in buckets),
        instances=sum(shard.instances for shard in shards),
        random_next=sum(bucket.random_next for bucket in buckets),
        same_document=sum(bucket.same_document for bucket in buckets),
        shards=shards,
    )


def _arrays(splits: Splits) -> dict[str, np.ndarray]:
    """Returns the arrays of the .npy files by file name."""
    counts = np.sum([bucket.token_counts for bucket in splits["train"]], axis=0, dtype=np.int64)
    lengths = {
        lengths_file(split): np.concatenate([np.zeros(0, np.uint16), *(bucket.lengths for bucket in buckets)])
        for split, buckets in splits.items()
    }
    return {TOKEN_COUNTS_FILE: np.asarray(counts), **lengths}
