"""Second pass of preparation: converts a bucket, the documents in a range of hashes, to a shard of instances."""

import itertools
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from bert_jax.data.dataset import Counts, Shard, SplitInfo, file_digest, new_digest
from bert_jax.data.hashing import random_bits
from bert_jax.data.preparation.filters import EVERY, Hashes, hash_ranges, read_documents
from bert_jax.data.preparation.instances import Document, make_pairs, make_rng, make_singles
from bert_jax.data.preparation.options import PrepareOptions
from bert_jax.data.preparation.sorted_runs import Job, Run
from bert_jax.data.records import RANDOM_NEXT, SINGLE, make_headers, sequence_lengths
from bert_jax.files import atomic

_WRITER_OPTIONS = "group_size:16"  # records compressed and read together: fewer make larger files, more slower reads
_COUNTED_TOKENS = 1 << 20  # at once
_WRITTEN = 1 << 14  # instances at once


class Bucket(NamedTuple):
    """The lines with hashes in `lines`, of documents with `hashes`, which become the shard `file`."""

    split: str
    file: str
    hashes: Hashes
    lines: Hashes


def make_buckets(runs: Sequence[Run], options: PrepareOptions, repeated: np.ndarray) -> list[Bucket]:
    """Returns the bucket of each shard. The eval split has the lowest hashes, of documents or, of few, of lines.

    Lines are held out without pairs if there are too few documents to hold out the share `eval_fraction`.

    Args:
      runs: all runs.
      options: the options of the preparation.
      repeated: the sorted hashes of lines to drop.
    """
    counts = sum((run.counts for run in runs), Counts())
    of_lines = options.pairs == "none" and 0 < counts.documents * options.eval_fraction < 1
    lowest = _lowest_lines(runs) if of_lines else _lowest_documents(runs, options, repeated)
    threshold = int(options.eval_fraction * 2**64)
    if options.eval_fraction and len(lowest) >= 4:
        threshold = max(threshold, int(lowest[1]) + 1)
    eval_tokens = int(counts.tokens * threshold / 2**64)
    buckets = []
    for split, held, tokens in (
        ("eval", (0, threshold), eval_tokens), ("train", (threshold, 2**64), counts.tokens - eval_tokens)
    ):  # fmt: skip
        ranges = hash_ranges(EVERY if of_lines else held, tokens, options.bucket_tokens)
        for number, hashes in enumerate(ranges):
            name = f"{split}-{number:05d}-of-{len(ranges):05d}.array_record"
            buckets.append(Bucket(split, name, hashes, held if of_lines else EVERY))
    return buckets


def _lowest_lines(runs: Sequence[Run]) -> np.ndarray:
    """Returns the lowest hashes of lines, at most four, without repetition."""
    lowest = np.zeros(0, np.uint64)
    for run in runs:
        lowest = np.unique(np.concatenate([lowest, run.array("lines")]))[:4]
    return lowest


def _lowest_documents(runs: Sequence[Run], options: PrepareOptions, repeated: np.ndarray) -> np.ndarray:
    """Returns the lowest hashes of filtered documents without repetition: four or more if there are so many."""
    lowest = np.zeros(0, np.uint64)
    tokens = sum(run.counts.tokens for run in runs)
    for hashes in hash_ranges(EVERY, tokens, options.bucket_tokens) if options.eval_fraction else []:
        lowest = np.unique(np.concatenate([lowest, read_documents(runs, options, repeated, hashes).hashes]))
        if len(lowest) >= 4:
            break
    return lowest


class Built(NamedTuple):
    """Finished shard: its counts, what filters dropped, `lengths` uint16 [N] of sequences, `token_counts` int64 [V]."""

    info: SplitInfo
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
    documents = read_documents(
        runs, job.options, repeated_hashes(repeated), bucket.hashes, "tokens", lines=bucket.lines
    )
    tokens, lengths = documents.arrays["tokens"], documents.arrays["lengths"]
    order = np.argsort(documents.hashes, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    ends = np.cumsum(documents.sentences)[order]
    begins = ends - documents.sentences[order]
    texts = [bounds[begin : end + 1].tolist() for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    # Both parts of a document whose lines are held out have its hash; ids are unique.
    ids, spans, owners = _make_instances(job, bucket, texts, documents.hashes[order] ^ np.uint64(bucket.lines[0]))
    is_random = spans[:, 4] == 1
    is_same = is_random & (spans[:, 2] >= bounds[begins][owners]) & (spans[:, 2] < bounds[ends][owners])
    shard, sequence_sizes = _write_shard(job, bucket, tokens, ids, spans)
    token_counts = np.zeros(job.tokenizer.vocab_size, np.int64)
    for start in range(0, len(tokens), _COUNTED_TOKENS):
        token_counts += np.bincount(tokens[start : start + _COUNTED_TOKENS], minlength=job.tokenizer.vocab_size)
    info = SplitInfo(
        documents=len(texts),
        sentences=len(lengths),
        tokens=len(tokens),
        used_tokens=_used_tokens(spans),
        instances=shard.instances,
        random_next=int(is_random.sum()),
        same_document=int(is_same.sum()),
        shards=(shard,),
    )
    dropped = documents.dropped if bucket.lines[1] == EVERY[1] else {}  # counted once, not for each part
    return Built(info, dropped, sequence_sizes, token_counts)


def repeated_hashes(repeated: Run | None) -> np.ndarray:
    """Returns the sorted hashes of lines to drop."""
    return repeated.array("hashes") if repeated else np.zeros(0, np.uint64)


def _make_instances(
    job: Job, bucket: Bucket, documents: Sequence[Document], hashes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the instances of documents [n] sorted by hash: ids [N], `Instance`s int32 [N, 5], and documents [N]."""
    options = job.options
    _, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    copy = np.arange(len(hashes)) - np.repeat(first, counts)
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for number in range(options.dupe_factor):
        rng = make_rng(job.seed, bucket.split, bucket.hashes[0], number)
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
        flat, sizes = array("i"), array("i")  # an array, since a million tuples take hundreds of megabytes
        for instances in made:
            sizes.append(len(instances))
            flat.extend(itertools.chain.from_iterable(instances))
        owner = np.repeat(np.arange(len(sizes)), sizes)
        ordinal = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        with np.errstate(over="ignore"):
            counter = (ordinal + (number << 32)).astype(np.uint64) + (copy[owner].astype(np.uint64) << np.uint64(48))
        parts.append((random_bits(hashes[owner], counter), np.array(flat, np.int32).reshape(-1, 5), owner))
    ids, spans, owners = (np.concatenate(each) for each in zip(*parts, strict=True))
    return ids, spans, owners


def _used_tokens(spans: np.ndarray) -> int:
    """Returns the number of tokens that are in a segment of at least one of the instances `spans` int32 [N, 5]."""
    segments = np.concatenate([spans[:, :2], spans[:, 2:4]])
    segments = segments[np.argsort(segments[:, 0], kind="stable")]
    before = np.concatenate([[0], np.maximum.accumulate(segments[:, 1])])[: len(segments)]
    return int(np.maximum(0, segments[:, 1] - np.maximum(segments[:, 0], before)).sum())


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
