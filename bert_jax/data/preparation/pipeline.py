"""Prepares a dataset from raw text in two passes, with bounded memory.

1. Each slice of the input is read, split into sentences and tokenized. Its documents are written to temporary *runs*,
   sorted by the hash of their text.
2. A bucket is a range of hashes: a random sample of the corpus's documents that fits in memory. Its documents are
   gathered from the runs, paired (`instances.py`) and written as one shard. The lowest hashes are the eval split, so
   the split of a document does not depend on the rest of the corpus.

Both passes map a function over independent tasks. The output is deterministic: the same corpus, vocabulary, options
and seed give identical bytes for any number of workers. A worker holds one slice or bucket in memory.

A task's result is saved in a scratch folder under the hash of all its inputs. A run that was killed, or failed on a
full disk or an invalid file, therefore resumes where it stopped.

`beam.py` runs the same functions as a pipeline on a cluster, in place of a pool of local processes.
"""

import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from bert_jax.data.corpora import corpus
from bert_jax.data.corpora.standard_input import is_stream, spooled
from bert_jax.data.corpora.text_hints import warn_of_text
from bert_jax.data.dataset import (
    INFO_FILE,
    TOKEN_COUNTS_FILE,
    DatasetInfo,
    SplitInfo,
    array_bytes,
    digest,
    lengths_file,
)
from bert_jax.data.preparation.corpus_hints import warn_of_random_pairs, warn_of_short_documents
from bert_jax.data.preparation.filters import repeated_lines
from bert_jax.data.preparation.options import MAX_SHARE, PrepareOptions
from bert_jax.data.preparation.scratch_folder import TEMPORARY, locked, scratch_folder, scratch_path, sync
from bert_jax.data.preparation.shards import BuildTask, Built, build, finished_shard, shard_ranges
from bert_jax.data.preparation.sorted_runs import SortedRun, TokenizeTask, finished_runs, tokenize
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
from bert_jax.text.tokenizer import FILE, SETTINGS, Tokenizer

log = logging.getLogger(__name__)

LOCAL = "local"
_PUBLISHED = "published.json"
_CALL = "call.json"
"""In the scratch folder: the call that published its dataset."""


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
    bars: Bars = silent,
) -> DatasetInfo:
    """Prepares the dataset `output` from the corpus `inputs`.

    An interrupted call is resumed by repeating it: tokenized slices and finished shards are kept in `scratch`, by
    default a hidden folder in `output`, until the dataset is complete.

    The `runner` is "local", a pool of `workers` processes, or the name of an Apache Beam runner, which takes
    `beam_options`, retries failed work itself, and starts from the beginning when called again. The bytes are the same.

    Text with a share of [UNK] above `allow_unk` is refused, before pairs are created if possible. Above `WARN_SHARE`, a
    warning is logged.

    The input `-` is stdin. It and pipes are copied to the scratch folder once; call again with the same bytes to
    resume.

    Raises:
      InputError: the corpus is missing, empty or unreadable, an option is out of range, `output` already exists,
        another process holds its lock, its scratch folder is another user's, the runner is unknown, or the vocabulary
        does not match the corpus.
      BertJaxError: a worker died, or a Beam pipeline failed.
      OSError: the disk is full.
    """
    if not output:
        raise InputError("--output=: expected the path of a folder")
    folder = remote.parse_path(output)
    call = _describe_call(inputs, tokenizer, options, seed)
    _check_free(folder, scratch_path(folder, scratch), call)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output={folder}: got a file, expected a new or empty folder")
    if workers < 1:
        raise InputError(f"--workers={workers}: must be at least 1")
    check_limit(allow_unk)
    beam = _beam_runner(runner, scratch, beam_options)
    warn_of_language(options.language, tokenizer.lowercase, options.sentences == "split")
    streams = list(filter(is_stream, inputs))
    if streams:
        _check_runs_here(runner, streams[0])
    slices = [] if streams else corpus.plan(inputs, options)  # streams are first copied to the scratch folder
    atomic.make_folder(folder)
    work = scratch_folder(folder, scratch)
    with ExitStack() as stack:
        stack.enter_context(locked(folder, work))
        stack.push(lambda error, *_: _clear(work) if error is None else None)
        _check_free(folder, work, call)
        if remote.exists(folder / INFO_FILE):
            log.info("The dataset was complete when an earlier call was interrupted; deleted its temporary files")
            return DatasetInfo.read(folder)
        _check_shards(folder, work)
        paths, described = stack.enter_context(spooled(inputs, work))
        slices = slices or corpus.plan(paths, options)
        if not options.ids_field:
            warn_of_text(slices, options, tokenizer.lowercase)
        files = list(dict.fromkeys(piece.path for piece in slices))
        if beam is None:
            splits, shards = _build(slices, tokenizer, options, seed, allow_unk, work, workers, bars)
        else:
            staged = stack.enter_context(beam.staging(folder / TEMPORARY))
            job = beam.Job(tokenizer, options, seed, staged)
            groups = dict.fromkeys(
                tuple(dict.fromkeys(piece.path for piece in pieces)) for pieces in corpus.group_slices(slices)
            )
            splits, shards = beam.build_splits(list(groups), job, runner, beam_options)
        if not shards:
            others = f" and {len(files) - 1} more files" if files[1:] else ""
            raise InputError(f"--input={files[0]}{others}: the corpus contains no text; check its files")
        if not sum(bucket.shard.instances for bucket in splits["train"]):
            dropped = _dropped(splits)
            drops = f" (dropped: {', '.join(f'{count} {rule}' for rule, count in dropped.items())})" if dropped else ""
            raise InputError(
                f"--eval_fraction={options.eval_fraction}: the train split is empty{drops}; provide more "
                "text, or use --eval_fraction 0"
            )
        counts = np.sum([bucket.token_counts for buckets in splits.values() for bucket in buckets], axis=0)
        unknown = unknown_share(counts, tokenizer.unk_id)
        check_share(unknown, allow_unk, tokenizer)
        info = _describe(splits, tokenizer, options, seed)
        read = {"corpus": corpus.describe_files(slices, described, options), "vocabulary": {"sha256": tokenizer.sha256}}
        provenance.append(folder, provenance.record(read, dataset_hash=info.hash))
        (work / _CALL).write_text(call, encoding="utf-8")
        _publish(folder, work, shards, splits, tokenizer, info)
        warn_of_share(unknown, tokenizer, above=WARN_SHARE, where=str(folder))
        if options.pairs == "nsp":
            if options.documents == "blank_line":
                warn_of_short_documents(files, list(info.splits.values()))
            warn_of_random_pairs(info.splits["train"], options.random_next)
    return info


def _describe_call(inputs: Sequence[str], tokenizer: Tokenizer, options: PrepareOptions, seed: int) -> str:
    return json.dumps({"inputs": [*inputs], "vocabulary": tokenizer.sha256, "options": asdict(options), "seed": seed})


def _check_free(folder: epath.Path, work: Path, call: str) -> None:
    """Raises InputError for a complete dataset, unless the same call made it, and was killed before its clean-up."""
    path = work / _CALL
    if remote.exists(folder / INFO_FILE) and not (path.exists() and path.read_text(encoding="utf-8") == call):
        raise InputError(f"--output={folder}: already contains {INFO_FILE}; choose another folder or delete it")


def _clear(work: Path) -> None:
    """Deletes the scratch folder, and the record of the call last: a call that is killed meanwhile can be repeated."""
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _CALL:
            path.unlink()
    shutil.rmtree(work)


def _check_runs_here(runner: str, stream: str) -> None:
    """Raises InputError for a Beam runner whose workers may be on other machines, where `stream` is another."""
    if runner != LOCAL and "direct" not in runner.lower():
        raise InputError(
            f"--input={stream}: workers of --runner={runner} cannot read stdin and pipes of this machine; expected "
            "--runner=local, DirectRunner, or a file that the workers can read, such as gs://BUCKET/FILE"
        )


def _check_shards(folder: epath.Path, work: Path) -> None:
    """Raises InputError for files with the name of a shard that do not belong to an unfinished run."""
    own = _published(work)
    for split in ("train", "eval"):
        for path in folder.glob(f"{split}-[0-9]*-of-[0-9]*.array_record"):
            if path.name not in own:
                raise InputError(f"{path}: already exists; delete it or choose another --output")


def _published(work: Path) -> list[str]:
    """Returns the names of the shards that a killed run has published."""
    path = work / _PUBLISHED
    return json.loads(path.read_text()) if path.exists() else []


def _beam_runner(runner: str, scratch: str | None, beam_options: Sequence[str]) -> Any:
    """Returns the module `beam`, or None for the local runner. Raises InputError without Beam or for wrong options."""
    if runner == LOCAL:
        if beam_options:
            raise InputError(
                f"{beam_options[0]}: --runner=local does not support Beam's options; pass --runner DirectRunner"
            )
        return None
    if scratch is not None:
        raise InputError(f"--scratch={scratch}: --runner={runner} does not support it; pass Beam's --temp_location")
    logging.disable(logging.WARNING)  # Beam warns on import if BigQuery is missing
    try:
        from bert_jax.data.preparation import beam
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "apache_beam":
            raise
        raise InputError(f"--runner={runner}: Apache Beam is not installed; run {install_hint('beam')}") from error
    finally:
        logging.disable(logging.NOTSET)
    return beam


def _build(
    slices: Sequence[corpus.Slice],
    tokenizer: Tokenizer,
    options: PrepareOptions,
    seed: int,
    allow_unk: float,
    work: Path,
    workers: int,
    bars: Bars,
) -> tuple[dict[str, list[Built]], dict[str, Path]]:
    """Runs both passes; returns the shards of each split and each file's path in `work`, both empty without text."""
    # Pass 1: slices to runs.
    before = _fingerprints(slices)
    tokenizing = [
        TokenizeTask(pieces, tuple(before[piece.path] for piece in pieces), tokenizer, options, work)
        for pieces in corpus.group_slices(slices)
    ]
    task_runs: dict[str, Sequence[SortedRun]] = {}
    documents = 0
    with closing(bars(total=sum(piece.bytes for piece in slices), desc="tokenize", unit="B", unit_scale=True)) as bar:
        for task, runs in _map_unfinished(tokenize, finished_runs, tokenizing, workers, "corpus slices"):
            task_runs[task.name] = runs
            documents += sum(run.documents for run in runs)
            bar.set_postfix_str(f"{documents:,} documents")
            bar.update(sum(piece.bytes for piece in task.pieces))
    changed = [path for path, fingerprint in _fingerprints(slices).items() if fingerprint != before[path]]
    if changed:
        raise InputError(f"{changed[0]}: changed while it was read; run the command again once it is stable")
    all_runs = [run for task in tokenizing for run in task_runs[task.name]]
    if not all_runs:
        return {}, {}

    if not options.drops_text:  # Else filters might still drop the [UNK].
        check_share(sampled_share(all_runs, tokenizer.unk_id), allow_unk, tokenizer)

    # Pass 2: buckets to shards.
    repeated = np.zeros(0, np.uint64)
    if options.max_line_repeats:
        repeated = repeated_lines(all_runs, options.max_line_repeats, work)
    building = [
        BuildTask(file, split, low, high, all_runs, tokenizer.vocab_size, options, seed, repeated, work)
        for split, file, low, high in shard_ranges(all_runs, options)
    ]
    built: dict[str, Built] = {}
    with closing(bars(total=documents, desc="pair and write", unit=" documents", unit_scale=True)) as bar:
        for build_task, bucket in _map_unfinished(build, finished_shard, building, workers, "shards"):
            built[build_task.file] = bucket
            bar.update(bucket.documents)
            bar.set_postfix_str(f"{sum(b.shard.instances for b in built.values()):,} instances")
    splits = {split: [built[task.file] for task in building if task.split == split] for split in ("train", "eval")}
    return splits, {task.file: task.path for task in building}


def _fingerprints(slices: Sequence[corpus.Slice]) -> dict[str, str]:
    return {path: corpus.fingerprint(path) for path in {piece.path: None for piece in slices}}


def _map_unfinished(
    function: Callable[[Task], Result],
    finished: Callable[[Task], Result | None],
    tasks: Sequence[Task],
    workers: int,
    unit: str,
) -> Iterator[tuple[Task, Result]]:
    """Yields (task, result) pairs: first of tasks that an earlier run finished, then of others as they finish."""
    before = {index: result for index, task in enumerate(tasks) if (result := finished(task)) is not None}
    if before:
        log.info("Resuming: %s of %s %s are complete", f"{len(before):,}", f"{len(tasks):,}", unit)
    for index, result in before.items():
        yield tasks[index], result
    yield from map_tasks(function, [task for index, task in enumerate(tasks) if index not in before], workers)


def _describe(splits: dict[str, list[Built]], tokenizer: Tokenizer, options: PrepareOptions, seed: int) -> DatasetInfo:
    return DatasetInfo(
        tokenizer={
            "kind": tokenizer.kind,
            "lowercase": tokenizer.lowercase,
            "vocab_size": tokenizer.vocab_size,
            "sha256": tokenizer.sha256,
        },
        seq_len=options.seq_len,
        seed=seed,
        options=options.as_recorded(),
        splits={split: _split_info(buckets) for split, buckets in splits.items()},
        dropped=_dropped(splits),
        arrays={name: digest(array_bytes(array)) for name, array in _arrays(splits).items()},
    ).with_hash()


def _dropped(splits: dict[str, list[Built]]) -> dict[str, int]:
    dropped: Counter[str] = Counter()
    for buckets in splits.values():
        for bucket in buckets:
            dropped.update(bucket.dropped)
    return dict(dropped)


def _publish(
    folder: epath.Path,
    work: Path,
    shards: Mapping[str, Path | epath.Path],
    splits: dict[str, list[Built]],
    tokenizer: Tokenizer,
    info: DatasetInfo,
) -> None:
    """Moves the shards to the output and writes the other files; dataset.json, written last, commits the dataset."""
    for stale in _published(work):  # published by a killed run, which may have had other options
        (folder / stale).unlink(missing_ok=True)
    if not remote.is_remote(folder):
        for unfinished in folder.glob("*.partial"):
            if unfinished.name.startswith((INFO_FILE, FILE, SETTINGS, TOKEN_COUNTS_FILE, *map(lengths_file, splits))):
                unfinished.unlink()
    atomic.write_whole(work / _PUBLISHED, json.dumps(sorted(shards)).encode())
    with ThreadPoolExecutor(16) as pool:  # threads, because copies of remote files wait for the network
        list(pool.map(lambda name: _move(shards[name], folder / name), shards))
    for name, array in _arrays(splits).items():
        atomic.write_whole(folder / name, array_bytes(array))
    tokenizer.save(folder)
    if not remote.is_remote(folder):
        sync(Path(os.fspath(folder)))
    atomic.write_whole(folder / INFO_FILE, info.to_json().encode())
    if not remote.is_remote(folder):
        sync(Path(os.fspath(folder)))


def _arrays(splits: dict[str, list[Built]]) -> dict[str, np.ndarray]:
    """Returns the arrays of the .npy files by file name."""
    counts = np.sum([bucket.token_counts for bucket in splits["train"]], axis=0, dtype=np.int64)
    lengths = {
        lengths_file(split): np.concatenate([np.zeros(0, np.uint16), *(bucket.lengths for bucket in buckets)])
        for split, buckets in splits.items()
    }
    return {TOKEN_COUNTS_FILE: np.asarray(counts), **lengths}


def _move(path: Path | epath.Path, target: epath.Path) -> None:
    """Hard-links a file, else copies it. The source is kept, so that a killed run can resume."""
    if remote.is_remote(path):  # staged by a cluster: copied within the store
        store, name = remote.store_of(path)
        with remote.store_errors(target):
            store.copy(name, os.fspath(target))
        return
    try:
        os.link(path, os.fspath(target))
    except OSError:
        atomic.place(path, target)


def _split_info(buckets: Sequence[Built]) -> SplitInfo:
    def total(name: str) -> int:
        return sum(getattr(bucket, name) for bucket in buckets)

    shards = tuple(bucket.shard for bucket in buckets)
    return SplitInfo(
        documents=total("documents"),
        sentences=total("sentences"),
        tokens=total("tokens"),
        instances=sum(shard.instances for shard in shards),
        random_next=total("random_next"),
        shards=shards,
    )


def describe(info: DatasetInfo) -> dict[str, Any]:
    """Returns the counts to show after preparation: those of each split, and of dropped documents and lines."""
    dropped = {rule: count for rule, count in info.dropped.items() if count}
    return ({"dropped": dropped} if dropped else {}) | {
        name: {
            "documents": split.documents,
            "sentences": split.sentences,
            "tokens": split.tokens,
            "instances": split.instances,
            "random_next_share": round(split.random_next / max(1, split.instances), 4),
        }
        for name, split in info.splits.items()
    }
