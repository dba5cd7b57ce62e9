"""Second pass of preparation: converts a bucket, the documents in a range of hashes, to a shard of sentence pairs."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from bert_jax.data.dataset import Shard, file_digest
from bert_jax.data.hashing import key_from, random_bits
from bert_jax.data.preparation.filters import filter_documents
from bert_jax.data.preparation.instances import make_pairs, make_rng, make_singles
from bert_jax.data.preparation.options import PrepareOptions
from bert_jax.data.preparation.scratch_folder import load_array, read_finished, save_array, write_finished
from bert_jax.data.preparation.sorted_runs import SortedRun, hash_range_of
from bert_jax.data.records import RANDOM_NEXT, SINGLE, make_headers, sequence_lengths
from bert_jax.text.tokenizer import token_dtype

_VERSION = 3  # of the format of a shard and its .shard.json
_WRITER_OPTIONS = "group_size:16"  # records compressed and read together: fewer make larger files, more slower reads


def eval_threshold(runs: Sequence[SortedRun], fraction: float) -> int:
    """Returns the hash below which documents are held out: the share `fraction`, at least two of four or more."""
    if not fraction:
        return 0
    threshold = int(fraction * 2**64)
    distinct = lowest_hashes(runs)
    if len(distinct) >= 4:
        threshold = max(threshold, int(distinct[1]) + 1)
    return threshold


def lowest_hashes(runs: Sequence[SortedRun]) -> np.ndarray:
    """Returns the four lowest distinct hashes, uint64 [4] or fewer, which determine `eval_threshold`."""
    run_hashes = [np.unique(run.array("hashes"))[:4] for run in runs]
    return np.unique(np.concatenate([np.zeros(0, np.uint64), *run_hashes]))[:4]


def shard_ranges(runs: Sequence[SortedRun], options: PrepareOptions) -> list[tuple[str, str, int, int]]:
    """Returns (split, file, low, high) of each shard, which holds the documents with hashes in [low, high)."""
    tokens = sum(run.tokens for run in runs)
    eval_below = eval_threshold(runs, options.eval_fraction)
    eval_tokens = int(tokens * eval_below / 2**64)
    ranges = {
        "eval": _hash_ranges(0, eval_below, eval_tokens, options.bucket_tokens),
        "train": _hash_ranges(eval_below, 2**64, tokens - eval_tokens, options.bucket_tokens),
    }
    return [
        (split, f"{split}-{number:05d}-of-{len(found):05d}.array_record", low, high)
        for split, found in ranges.items()
        for number, (low, high) in enumerate(found)
    ]


def _hash_ranges(low: int, high: int, tokens: int, bucket_tokens: int) -> list[tuple[int, int]]:
    """Splits [low, high) into equal ranges of about `bucket_tokens` tokens each, as hashes are uniform."""
    if high <= low:
        return []
    parts = max(1, -(-tokens // bucket_tokens))
    bounds = [low + (high - low) * i // parts for i in range(parts + 1)]
    return list(itertools.pairwise(bounds))


@dataclass(frozen=True)
class BuildTask:
    """Task that builds the shard `file` from a bucket, the documents with hashes in [low, high).

    The shard is written to the folder `scratch`; files that a task of the same `name` left there are reused. `repeated`
    are the sorted hashes of lines to drop.
    """

    file: str
    split: str
    low: int
    high: int
    runs: Sequence[SortedRun]
    vocab_size: int
    options: PrepareOptions
    seed: int
    repeated: np.ndarray
    scratch: Path

    @cached_property
    def name(self) -> str:
        runs = [Path(run.path).name for run in self.runs]
        inputs = (self.file, self.low, self.high, *runs, self.repeated.tobytes().hex(), self.vocab_size)
        return f"{key_from(_VERSION, self.options, self.seed, *inputs):016x}"

    @property
    def path(self) -> Path:
        """Path that the shard is written to."""
        return self.scratch / f"{self.name}.array_record"


@dataclass(frozen=True)
class Built:
    """Finished shard with statistics: `lengths` uint16 [N] of sequences, `token_counts` int64 [V] of documents.

    `dropped` counts filtered documents and lines by rule.
    """

    shard: Shard
    documents: int
    sentences: int
    tokens: int
    random_next: int
    dropped: dict[str, int]
    lengths: np.ndarray
    token_counts: np.ndarray


_ARRAYS = ("lengths", "token_counts")  # fields of `Built` that are saved as .npy files


def finished_shard(task: BuildTask) -> Built | None:
    """Returns the saved result of an earlier `build` of the task; None if it is incomplete or damaged."""
    described = read_finished(_finished(task))
    if described is None:
        return None
    content = described["built"]
    arrays: dict[str, Any] = {name: load_array(_array_path(task, name)) for name in _ARRAYS}
    return Built(**{**content, "shard": Shard(**content["shard"])}, **arrays)


def _save(task: BuildTask, built: Built) -> None:
    content = asdict(built)
    files = [task.path, *(_array_path(task, name) for name in _ARRAYS)]
    for name in _ARRAYS:
        with open(_array_path(task, name), "wb") as file:
            save_array(file, content.pop(name))
    write_finished(_finished(task), {"built": content}, files)


def _array_path(task: BuildTask, name: str) -> Path:
    return task.scratch / f"{task.name}.{name}.npy"


def _finished(task: BuildTask) -> Path:
    """Returns the path of the marker that commits a task and describes its shard."""
    return task.scratch / f"{task.name}.shard.json"


@dataclass(frozen=True)
class _Bucket:
    """Documents sorted by hash, as sentence boundaries: offsets into `tokens`. Each sentence is contiguous."""

    hashes: np.ndarray
    documents: list[list[int]]
    tokens: np.ndarray
    dropped: dict[str, int]


def _gather(task: BuildTask) -> _Bucket:
    hashes, counts, lengths, tokens = [], [], [], []
    dropped = {"repeated_lines": 0}
    for run in task.runs:
        part = hash_range_of(run, task.low, task.high, lines=len(task.repeated) > 0)
        if part is None:
            continue
        run_counts, run_lengths = np.diff(part.array("sentence_at")), part.array("lengths")
        run_tokens = part.array("tokens")
        if len(task.repeated):
            kept = ~np.isin(part.array("lines"), task.repeated)
            dropped["repeated_lines"] += int((~kept & part.array("begins_line")).sum())
            run_tokens, run_lengths = run_tokens[np.repeat(kept, run_lengths)], run_lengths[kept]
            run_counts = np.bincount(np.repeat(np.arange(len(run_counts)), run_counts)[kept], minlength=len(run_counts))
        hashes.append(part.array("hashes"))
        counts.append(run_counts)
        lengths.append(run_lengths)
        tokens.append(run_tokens)
    if not hashes:
        return _Bucket(np.zeros(0, np.uint64), [], np.zeros(0, token_dtype(task.vocab_size)), dropped)
    all_hashes = np.concatenate(hashes)
    ends = np.cumsum(np.concatenate(counts)).tolist()
    boundaries = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).tolist()
    documents = [boundaries[start : end + 1] for start, end in zip([0, *ends], ends, strict=False)]
    order = filter_documents(np.argsort(all_hashes, kind="stable"), all_hashes, documents, task.options, dropped)
    return _Bucket(all_hashes[order], [documents[i] for i in order.tolist()], np.concatenate(tokens), dropped)


def build(task: BuildTask) -> Built:
    """Gathers a bucket from the runs, creates its instances `dupe_factor` times and writes them sorted by id."""
    bucket = _gather(task)
    options = task.options
    repeats = _occurrence(bucket.hashes)
    ids, spans = [np.zeros(0, np.uint64)], [np.zeros((0, 5), np.int64)]
    for number in range(options.dupe_factor):
        rng = make_rng(task.seed, task.split, task.low, number)
        if options.pairs == "none":
            instances = make_singles(
                bucket.documents, seq_len=options.seq_len, short_seq_prob=options.short_seq_prob, rng=rng
            )
        else:
            instances = make_pairs(
                bucket.documents,
                seq_len=options.seq_len,
                short_seq_prob=options.short_seq_prob,
                random_next=options.random_next,
                rng=rng,
            )
        counts = np.array([len(created) for created in instances], np.int64)
        owner = np.repeat(np.arange(len(instances)), counts)
        ordinal = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        with np.errstate(over="ignore"):
            counter = ordinal.astype(np.uint64) + np.uint64(number << 32) + (repeats[owner] << np.uint64(48))
        ids.append(random_bits(bucket.hashes[owner], counter))
        spans.append(np.array([instance for created in instances for instance in created], np.int64).reshape(-1, 5))
    all_ids, all_spans = np.concatenate(ids), np.concatenate(spans)
    shard, lengths = _write_shard(task, bucket.tokens, all_ids, all_spans)
    built = Built(
        shard=shard,
        documents=len(bucket.documents),
        sentences=sum(len(document) - 1 for document in bucket.documents),
        tokens=sum(document[-1] - document[0] for document in bucket.documents),
        random_next=int(all_spans[:, 4].sum()),
        dropped=bucket.dropped,
        lengths=lengths,
        token_counts=_token_counts(bucket, task.vocab_size),
    )
    _save(task, built)
    return built


def _token_counts(bucket: _Bucket, vocab_size: int) -> np.ndarray:
    """Returns int64 [V]: the count of each token in the documents, which may be a part of `tokens`."""
    step = np.zeros(len(bucket.tokens) + 1, np.int8)
    for document in bucket.documents:
        step[document[0]] += 1
        step[document[-1]] -= 1
    return np.bincount(bucket.tokens[np.cumsum(step[:-1]) > 0], minlength=vocab_size)


def _occurrence(hashes: np.ndarray) -> np.ndarray:
    """Returns uint64 [n]: 0 for the first document with a hash, 1 for its first duplicate, etc. `hashes` is sorted."""
    position = np.arange(len(hashes))
    is_first = np.concatenate([[True], hashes[1:] != hashes[:-1]])[: len(hashes)]
    return (position - np.maximum.accumulate(np.where(is_first, position, 0))).astype(np.uint64)


def _write_shard(task: BuildTask, tokens: np.ndarray, ids: np.ndarray, spans: np.ndarray) -> tuple[Shard, np.ndarray]:
    """Writes the shard; returns it with the lengths of its sequences, uint16 [N], in order."""
    order = np.argsort(ids, kind="stable")
    spans = spans[order]
    len_a, len_b = spans[:, 1] - spans[:, 0], spans[:, 3] - spans[:, 2]
    flags = np.full(len(spans), SINGLE) if task.options.pairs == "none" else spans[:, 4] * RANDOM_NEXT
    headers = make_headers(ids[order], len_a, len_b, flags)
    data = np.ascontiguousarray(tokens).data.cast("B")
    partial = task.path.with_name(f"{task.path.name}.partial")
    try:
        writer = ArrayRecordWriter(str(partial), _WRITER_OPTIONS)
        header, size = headers.tobytes(), headers.itemsize
        for number, (a_start, a_stop, b_start, b_stop, _) in enumerate((spans * tokens.itemsize).tolist()):
            parts = header[number * size : (number + 1) * size], data[a_start:a_stop], data[b_start:b_stop]
            writer.write(b"".join(parts))
        writer.close()
        reader = ArrayRecordReader(str(partial))
        count = reader.num_records()
        reader.close()
    except (RuntimeError, ValueError) as error:
        raise OSError(f"{task.path}: could not be written ({error})") from error
    if count != len(spans):
        raise OSError(f"{task.path}: got {count} records on disk, expected {len(spans)}")
    partial.replace(task.path)
    shard = Shard(task.file, len(spans), task.path.stat().st_size, file_digest(task.path))
    return shard, sequence_lengths(headers).astype(np.uint16)
