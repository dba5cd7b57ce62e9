"""Second pass of preparation: converts a bucket, the documents in a range of hashes, to a shard of instances."""

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from bert_jax.data.dataset import Counts, Shard, file_digest, new_digest
from bert_jax.data.hashing import random_bits
from bert_jax.data.preparation.filters import Filter, hash_ranges
from bert_jax.data.preparation.instances import Document, make_pairs, make_rng, make_singles
from bert_jax.data.preparation.options import PrepareOptions
from bert_jax.data.preparation.sorted_runs import Job, Run, write_run
from bert_jax.data.records import RANDOM_NEXT, SINGLE, make_headers, sequence_lengths
from bert_jax.files import atomic

_WRITER_OPTIONS = "group_size:16"  # records compressed and read together: fewer make larger files, more slower reads
_COUNTED_TOKENS = 1 << 20  # at once
_WRITTEN = 1 << 14  # instances at once


class Bucket(NamedTuple):
    """The documents with hashes in [low, high), which become the shard `file`."""

    split: str
    file: str
    low: int
    high: int


def eval_threshold(runs: Sequence[Run], filtered: Filter) -> int:
    """Returns the hash below which documents are held out.

    They are the share `eval_fraction`, and at least two if the filters keep four or more.
    """
    options = filtered.options
    if not options.eval_fraction:
        return 0
    lowest = np.zeros(0, np.uint64)
    for low, high in hash_ranges(0, 2**64, sum(run.counts.tokens for run in runs), options.bucket_tokens):
        lowest = np.sort(np.concatenate([lowest, filtered.read(runs, low, high).hashes]))
        if len(lowest) >= 4:
            break
    return _threshold(lowest, options)


def _threshold(lowest: np.ndarray, options: PrepareOptions) -> int:
    """Returns the hash below which the share `eval_fraction` is, and at least two of the sorted hashes `lowest`."""
    threshold = int(options.eval_fraction * 2**64)
    return max(threshold, int(lowest[1]) + 1) if len(lowest) >= 4 else threshold


def holds_out_lines(documents: int, options: PrepareOptions) -> bool:
    """Returns True if lines are held out because there are too few documents to hold out the share `eval_fraction`."""
    return options.pairs == "none" and options.eval_fraction > 0 and documents * options.eval_fraction < 1


def line_threshold(runs: Sequence[Run], options: PrepareOptions) -> int:
    """Returns the hash below which lines are held out."""
    lowest = np.zeros(0, np.uint64)
    for run in runs:
        lowest = np.unique(np.concatenate([lowest, run.array("lines")]))[:4]
    return _threshold(lowest, options)


def hold_out_lines(
    job: Job, runs: Sequence[Run], repeated: Run | None, threshold: int, task: tuple[int, tuple[int, int]]
) -> tuple[Run, dict[str, Counts]]:
    """Filters documents in a range of hashes, and makes each two: lines with hashes below the threshold, and the rest.

    The hashes of the former are below the share `eval_fraction`, those of the latter above.

    Args:
      job: the inputs of every task.
      runs: all runs.
      repeated: the sorted `hashes` of lines to drop, if any.
      threshold: that of `line_threshold`.
      task: the number of the task, and the range of the documents' hashes.

    Returns:
      A run of the halves, and what the filters drop.
    """
    number, (low, high) = task
    documents = _filter(job, repeated).read(runs, low, high, "tokens", "lines")
    order = np.argsort(documents.hashes, kind="stable")
    order = np.repeat(order, documents.copies[order])
    lengths, sizes = documents.arrays["lengths"], documents.sentences[order]
    sentence = _ranges(_starts(documents.sentences)[order], sizes)
    owner = np.repeat(np.arange(len(order)), sizes)
    is_held = documents.arrays["lines"][sentence] < np.uint64(min(threshold, 2**64 - 1))
    halves = np.concatenate([np.bincount(owner[side], minlength=len(order)) for side in (is_held, ~is_held)])
    sentence = np.concatenate([sentence[is_held], sentence[~is_held]])
    limit = int(job.options.eval_fraction * 2**64)
    hashes = documents.hashes[order].tolist()
    scaled = [value * limit >> 64 for value in hashes] + [limit + (value * (2**64 - limit) >> 64) for value in hashes]
    sentence_at = np.cumsum([0, *halves[halves > 0]])
    tokens = documents.arrays["tokens"][_ranges(_starts(lengths)[sentence], lengths[sentence])]
    arrays = {
        "hashes": np.array(scaled, np.uint64)[halves > 0],
        "sentence_at": sentence_at,
        "token_at": np.concatenate([[0], np.cumsum(lengths[sentence])])[sentence_at],
        "lengths": lengths[sentence],
        "tokens": tokens,
    }
    counts = Counts(len(order), len(sentence), len(tokens))
    return write_run(f"{job.work}/halves-{number:06d}", counts, arrays), documents.dropped


def _filter(job: Job, repeated: Run | None) -> Filter:
    return Filter(job.options, repeated.array("hashes") if repeated else np.zeros(0, np.uint64))


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns the numbers of the ranges [start, start + size), one after the other."""
    return np.repeat(starts - _starts(sizes), sizes) + np.arange(sizes.sum())


def _starts(sizes: np.ndarray) -> np.ndarray:
    starts: np.ndarray = np.cumsum(sizes) - sizes
    return starts


def make_buckets(runs: Sequence[Run], eval_below: int, options: PrepareOptions) -> list[Bucket]:
    """Returns the bucket of each shard; documents with hashes below `eval_below` are in the eval split."""
    tokens = sum(run.counts.tokens for run in runs)
    eval_tokens = int(tokens * eval_below / 2**64)
    ranges = {
        "eval": hash_ranges(0, eval_below, eval_tokens, options.bucket_tokens),
        "train": hash_ranges(eval_below, 2**64, tokens - eval_tokens, options.bucket_tokens),
    }
    return [
        Bucket(split, f"{split}-{number:05d}-of-{len(ends):05d}.array_record", low, high)
        for split, ends in ranges.items()
        for number, (low, high) in enumerate(ends)
    ]


@dataclass(frozen=True)
class Built:
    """Finished shard with statistics: `lengths` uint16 [N] of sequences, `token_counts` int64 [V] of documents.

    For the others see `SplitInfo` and `DatasetInfo`.
    """

    shard: Shard
    counts: Counts
    used_tokens: int
    random_next: int
    same_document: int
    dropped: dict[str, Counts]
    lengths: np.ndarray
    token_counts: np.ndarray


def build(job: Job, runs: Sequence[Run], repeated: Run | None, bucket: Bucket) -> Built:
    """Gathers a bucket from the runs, creates its instances `dupe_factor` times and writes them sorted by id.

    Args:
      job: the inputs of every task.
      runs: all runs.
      repeated: the sorted `hashes` of lines to drop, if any.
      bucket: the range of hashes.
    """
    documents = _filter(job, repeated).read(runs, bucket.low, bucket.high, "tokens")
    tokens, lengths = documents.arrays["tokens"], documents.arrays["lengths"]
    order = np.argsort(documents.hashes, kind="stable")
    hashes, copies = documents.hashes[order], documents.copies[order]
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    ends = np.cumsum(documents.sentences)[order]
    sizes = documents.sentences[order]
    texts = [bounds[end - size : end + 1].tolist() for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]
    starts, stops = bounds[ends - sizes], bounds[ends]
    ids, spans, owners = _make_instances(job, bucket, texts, hashes, copies)
    is_random = spans[:, 4] == 1
    is_same = is_random & (spans[:, 2] >= starts[owners]) & (spans[:, 2] < stops[owners])
    if len(texts) > 1:  # then B may be of another copy
        is_same &= copies[owners] == 1
    shard, sequence_sizes = _write_shard(job, bucket, tokens, ids, spans)
    return Built(
        shard=shard,
        counts=Counts(*(int((copies * number).sum()) for number in (1, sizes, stops - starts))),
        used_tokens=int((_used_tokens(spans, starts) * copies).sum()),
        random_next=int(is_random.sum()),
        same_document=int(is_same.sum()),
        dropped=documents.dropped,
        lengths=sequence_sizes,
        token_counts=_token_counts(tokens, texts, copies, job.tokenizer.vocab_size),
    )


def _make_instances(
    job: Job, bucket: Bucket, texts: Sequence[Document], hashes: np.ndarray, copies: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the instances of distinct documents [n]: ids uint64 [N], `Instance`s int32 [N, 5], and documents [N]."""
    options = job.options
    distinct = np.repeat(np.arange(len(texts)), copies)  # of each copy
    copy = np.arange(len(distinct)) - np.repeat(_starts(copies), copies)
    documents = [texts[number] for number in distinct.tolist()]
    ids: list[np.ndarray] = []
    spans: list[np.ndarray] = []
    owners: list[np.ndarray] = []
    for number in range(options.dupe_factor):
        rng = make_rng(job.seed, bucket.split, bucket.low, number)
        made = (
            make_singles(documents, seq_len=options.seq_len, short_seq_prob=options.short_seq_prob, rng=rng)
            if options.pairs == "none"
            else make_pairs(
                documents,
                seq_len=options.seq_len,
                short_seq_prob=options.short_seq_prob,
                random_next=options.random_next,
                rng=rng,
            )
        )
        flat, counts = array("i"), array("i")  # an array, since a million tuples take hundreds of megabytes
        for instances in made:
            counts.append(len(instances))
            flat.extend(itertools.chain.from_iterable(instances))
        sizes = np.array(counts, np.int64)
        owner = np.repeat(np.arange(len(sizes)), sizes)
        ordinal = np.arange(len(owner)) - np.repeat(_starts(sizes), sizes)
        with np.errstate(over="ignore"):
            counter = (ordinal + (number << 32)).astype(np.uint64) + (copy[owner].astype(np.uint64) << np.uint64(48))
        ids.append(random_bits(hashes[distinct[owner]], counter))
        spans.append(np.array(flat, np.int32).reshape(-1, 5))
        owners.append(distinct[owner])
    return np.concatenate(ids), np.concatenate(spans), np.concatenate(owners)


def _used_tokens(spans: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Returns int64 [n]: the tokens of each document that are in a segment of at least one instance.

    Args:
      spans: int32 [N, 5], the instances.
      starts: int64 [n], the offset of each document's first token.
    """
    segments = np.concatenate([spans[:, :2], spans[:, 2:4]])
    segments = segments[np.argsort(segments[:, 0], kind="stable")]
    before = np.concatenate([[0], np.maximum.accumulate(segments[:, 1])])[: len(segments)]
    new = np.maximum(0, segments[:, 1] - np.maximum(segments[:, 0], before))
    order = np.argsort(starts)
    owner = order[np.searchsorted(starts[order], segments[:, 0], side="right") - 1] if len(starts) else order
    return np.bincount(owner, new, len(starts)).astype(np.int64)


def _token_counts(tokens: np.ndarray, texts: Sequence[Document], copies: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns int64 [V]: the count of each token in all copies of the documents."""
    total = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), _COUNTED_TOKENS):
        total += np.bincount(tokens[start : start + _COUNTED_TOKENS], minlength=vocab_size)
    for number in np.flatnonzero(copies > 1).tolist():
        ids, counts = np.unique(tokens[texts[number][0] : texts[number][-1]], return_counts=True)
        total[ids] += counts * (copies[number] - 1)
    return total


def _write_shard(
    job: Job, bucket: Bucket, tokens: np.ndarray, ids: np.ndarray, spans: np.ndarray
) -> tuple[Shard, np.ndarray]:
    """Writes the shard; returns it with the lengths of its sequences, uint16 [N], in order."""
    order = np.argsort(ids, kind="stable")
    spans = spans[order]
    flags = np.full(len(spans), SINGLE) if job.options.pairs == "none" else spans[:, 4] * RANDOM_NEXT
    headers = make_headers(ids[order], spans[:, 1] - spans[:, 0], spans[:, 3] - spans[:, 2], flags)
    data = tokens.data.cast("B") if len(tokens) else b""
    path = f"{job.output}/{bucket.file}"
    content = new_digest()
    with atomic.whole_path(path) as local:
        try:
            writer = ArrayRecordWriter(str(local), _WRITER_OPTIONS)
            for start in range(0, len(spans), _WRITTEN):  # Python's integers take more memory than the arrays
                header, size = headers[start : start + _WRITTEN].tobytes(), headers.itemsize
                ends = spans[start : start + _WRITTEN, :4].astype(np.int64) * tokens.itemsize
                for at, (a_start, a_stop, b_start, b_stop) in enumerate(ends.tolist()):
                    parts = header[at * size : (at + 1) * size], data[a_start:a_stop], data[b_start:b_stop]
                    record = b"".join(parts)
                    content.update(record)
                    writer.write(record)
            writer.close()
            reader = ArrayRecordReader(str(local))
            count = reader.num_records()
            reader.close()
        except (RuntimeError, ValueError) as error:
            raise OSError(f"{path}: could not be written ({error})") from error
        if count != len(spans):
            raise OSError(f"{path}: got {count} records on disk, expected {len(spans)}")
        shard = Shard(bucket.file, len(spans), content.hexdigest(), local.stat().st_size, file_digest(local))
    return shard, sequence_lengths(headers).astype(np.uint16)
