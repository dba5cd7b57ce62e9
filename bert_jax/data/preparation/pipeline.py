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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from bert_jax.data import dataset, report
from bert_jax.data.corpora import corpus
from bert_jax.data.corpora.corpus_inputs import is_local_file, is_stream, spool
from bert_jax.data.dataset import INFO_FILE, SPLITS, TOKEN_COUNTS_FILE, Counts, DatasetInfo, SplitInfo
from bert_jax.data.options import PrepareOptions
from bert_jax.data.preparation import shards
from bert_jax.data.preparation.shards import RULES
from bert_jax.data.preparation.sorted_runs import Job, Run, tokenize, write_run
from bert_jax.data.preparation.worker_pool import map_tasks
from bert_jax.errors import InputError, install_hint
from bert_jax.files import atomic, provenance, remote
from bert_jax.progress import Bars, quiet, silent
from bert_jax.text.sentences import warn_of_language
from bert_jax.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LOCAL = "local"
WARN_SHARE = 0.02
"""Share of [UNK] in the text read above which a warning is logged."""


RunTasks = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]
"""Runs a function on each task; yields the results in order."""


def prepare(
    inputs: Sequence[str], tokenizer: Tokenizer, output: str, options: PrepareOptions, *, seed: int = 0,
    workers: int = 1, runner: str = LOCAL, beam_options: Sequence[str] = (), bars: Bars = silent,
) -> DatasetInfo:  # fmt: skip
    """Prepares the dataset `output`, a new or empty folder, from the corpus `inputs`.

    The `runner` is "local", a pool of `workers` processes, or the name of an Apache Beam runner, which takes
    `beam_options`. The bytes are the same. Temporary files of the local runner are beside the output.

    Text with a share of [UNK] above `allow_unk` is refused, before pairs are created. Above `WARN_SHARE`, a warning is
    logged. The input `-` is stdin; it and pipes are copied to a temporary file.

    Raises:
      InputError: the corpus is missing, empty or unreadable, an option is out of range, `output` already exists, the
        runner is unknown, or the vocabulary does not match the corpus.
      BertJaxError: a worker died, or a Beam pipeline failed.
      OSError: the disk is full.
    """
    folder = atomic.new_folder(output)
    beam = _open_beam(runner, beam_options)
    if options.sentences == "split":
        warn_of_language(options.language)
    slices = [] if any(map(is_stream, inputs)) else corpus.plan(inputs, options)  # streams are first copied
    with ExitStack() as stack:
        new = stack.enter_context(atomic.whole_folder(folder, INFO_FILE))
        local = stack.enter_context(tempfile.TemporaryDirectory(prefix="bert-jax-prepare-", dir=new))
        paths = stack.enter_context(spool(inputs, Path(local)))
        slices = slices or corpus.plan(list(paths.values()), options)
        if not options.ids_field:
            corpus.warn_of_text(slices, options, lowercase=tokenizer.lowercase)
        job = Job(tokenizer, options, seed, local, str(new))
        run_tasks: RunTasks = partial(map_tasks, workers=workers)
        if beam:
            if remote.is_remote(folder):  # whose objects are written atomically, and where all workers write
                job = replace(job, work=f"{folder}/work", output=str(folder))
                stack.callback((folder / "work").rmtree, missing_ok=True)
            run_tasks, bars = partial(beam.map_tasks, runner=runner, flags=beam_options, work=job.work), silent
            absolute = {piece.path: os.path.abspath(piece.path) for piece in slices if is_local_file(piece.path)}
            slices = [replace(piece, path=absolute.get(piece.path, piece.path)) for piece in slices]
        info, unknown = _build(slices, job, run_tasks, bars, new)
        read = {"corpus": corpus.describe_files(slices, paths), "vocabulary": {"sha256": tokenizer.sha256}}
        provenance.append(new, provenance.record(read, dataset_hash=info.hash))
    if unknown > WARN_SHARE:
        log.warning("%s: %.1f%% of the tokens are [UNK]: the vocabulary may not match", folder, 100 * unknown)
    report.warn(info)
    return info


def _open_beam(runner: str, beam_options: Sequence[str]) -> Any:
    """Returns the module `beam`; None for the local runner.

    Raises InputError for an unknown runner, for options that it does not support, or without Beam.
    """
    if runner == LOCAL:
        if beam_options:
            raise InputError(f"{beam_options[0]}: an option of Beam, and runner=local; pass --runner DirectRunner")
        return None
    try:
        with quiet():  # Beam warns on import if BigQuery is missing
            from bert_jax.data.preparation import beam
    except ModuleNotFoundError as error:
        raise InputError(f"runner={runner}: {error}; run {install_hint('beam')}") from error
    beam.open_pipeline(runner, beam_options)
    return beam


def _build(
    slices: Sequence[corpus.Slice], job: Job, run_tasks: RunTasks, bars: Bars, new: epath.Path
) -> tuple[DatasetInfo, float]:
    """Runs both passes and writes the dataset; returns its description and the share of [UNK] in the text read."""
    options = job.options
    runs = _tokenize(slices, job, run_tasks, bars)
    read = sum((run.counts for run in runs), Counts())
    if not runs:
        raise InputError(f"input={slices[0].path}: the corpus contains no text; check its files")
    unknown = sum(run.unknown for run in runs) / read.tokens
    if unknown > options.allow_unk:
        raise InputError(
            f"allow_unk={options.allow_unk:g}: {unknown:.1%} of the tokens are [UNK]: the vocabulary does not match; "
            f"train one on such text, or pass allow_unk={min(1.0, int(unknown * 20 + 1) / 20):g}"
        )
    repeated = _repeated_lines(runs, read, job, run_tasks)
    buckets = shards.make_buckets(runs, options, repeated)
    splits: dict[str, list[shards.Built]] = {name: [] for name in SPLITS}
    token_counts = np.zeros(job.tokenizer.vocab_size, np.int64)
    with closing(bars(total=len(buckets), desc="pair and write", unit=" shards")) as bar:
        for bucket, shard in zip(buckets, run_tasks(partial(shards.build, job, runs, repeated), buckets), strict=True):
            token_counts += shard.token_counts * (bucket.split == "train")
            splits[bucket.split].append(shard._replace(token_counts=token_counts))  # one array, not one for each
            bar.update(1)
    dropped = {
        rule: sum((shard.dropped.get(rule, Counts()) for split in splits.values() for shard in split), Counts())
        for rule in RULES
    }
    if not any(shard.info.instances for shard in splits["train"]):
        lost = {RULES[rule]: counts.tokens for rule, counts in dropped.items() if counts.tokens}
        cause = ", ".join(f"{option}={getattr(options, option)} drops {count:,}" for option, count in lost.items())
        if options.pairs == "sop" and any(shard.info.tokens for shard in splits["train"]):
            cause = "no document has two sentences, which pairs=sop needs"
        cause = cause or f"eval_fraction={options.eval_fraction} holds out the rest"
        raise InputError(f"the train split is empty: of {read.tokens:,} tokens, {cause}")
    arrays = {TOKEN_COUNTS_FILE: token_counts}
    for name, split in splits.items():
        arrays[dataset.lengths_file(name)] = np.concatenate([np.zeros(0, np.uint16), *(one.lengths for one in split)])
    contents = {name: dataset.array_bytes(array) for name, array in arrays.items()}
    info = DatasetInfo(
        tokenizer={name: getattr(job.tokenizer, name) for name in dataset.TOKENIZER_FIELDS},
        seq_len=options.seq_len,
        seed=job.seed,
        options=options.as_recorded(),
        splits={name: sum((shard.info for shard in split), SplitInfo()) for name, split in splits.items()},
        corpus=read,
        dropped=dropped,
        arrays={name: dataset.digest(content) for name, content in contents.items()},
    ).with_hash()
    job.tokenizer.save(new)
    for name, content in (contents | {INFO_FILE: info.to_json().encode()}).items():
        atomic.write_whole(new / name, content)
    return info, unknown


def _tokenize(slices: Sequence[corpus.Slice], job: Job, run_tasks: RunTasks, bars: Bars) -> list[Run]:
    """Runs the first pass; returns its runs, in the order of the slices."""
    found: list[Run] = []
    with closing(bars(total=sum(piece.bytes for piece in slices), desc="tokenize", unit="B", unit_scale=True)) as bar:
        tasks = list(enumerate(corpus.group_slices(slices)))
        for (_, pieces), runs in zip(tasks, run_tasks(partial(tokenize, job), tasks), strict=True):
            found += runs
            bar.update(sum(piece.bytes for piece in pieces))
    return found


def _repeated_lines(runs: Sequence[Run], read: Counts, job: Job, run_tasks: RunTasks) -> Run:
    """Returns a run of the hashes of the lines that occur too often."""
    frequent = [shards.NO_HASHES]
    if job.options.max_line_repeats:
        ranges = shards.hash_ranges(shards.EVERY, read.tokens, job.options.bucket_tokens)
        counted = list(run_tasks(partial(shards.count_lines, job, runs), list(enumerate(ranges))))
        frequent += run_tasks(partial(shards.frequent_lines, job, counted), ranges)
    return write_run(f"{job.work}/repeated-lines", Counts(), {"hashes": np.sort(np.concatenate(frequent))})
