"""Second pass of preparation: filters the documents in a range of hashes, a bucket, and makes a shard of instances.

The filters drop duplicate documents and repeated lines, as `PrepareOptions` says.
"""

import itertools
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from etils import epath

from bert_jax.data.dataset import Counts, Shard, SplitInfo, file_digest, new_digest
from bert_jax.data.hashing import random_bits
from bert_jax.data.options import PrepareOptions
from bert_jax.data.preparation.instances import MAKE_INSTANCES, Document, make_rng
from bert_jax.data.preparation.sorted_runs import Job, Run, write_run
from bert_jax.data.records import RANDOM_NEXT, SINGLE, make_headers, sequence_lengths
from bert_jax.files import atomic

_WRITER_OPTIONS = "group_size:16"  # records compressed and read together: fewer make larger files, more slower reads
_COUNTED_TOKENS = 1 << 20  # at once

RULES = {"duplicate_documents": "drop_duplicates", "repeated_lines": "max_line_repeats"}
"""Option of each filter, by the name of what it drops."""

Hashes = tuple[int, int]
"""A range of hashes, both ends included."""

EVERY: Hashes = (0, 2**64 - 1)
NO_HASHES = np.zeros(0, np.uint64)


def hash_ranges(hashes: Hashes, tokens: int, bucket_tokens: int) -> list[Hashes]:
    """Splits a range into equal ranges of about `bucket_tokens` tokens each, as hashes are uniform."""
    first, size = hashes[0], hashes[1] + 1 - hashes[0]
    parts = max(1, -(-tokens // bucket_tokens)) if size > 0 else 0
    return [(first + size * i // parts, first + size * (i + 1) // parts - 1) for i in range(parts)]


def read_documents(
    runs: Sequence[Run], options: PrepareOptions, repeated: np.ndarray, hashes: Hashes, *names: str,
    lines: Hashes = EVERY,
) -> tuple[dict[str, np.ndarray], dict[str, Counts]]:  # fmt: skip
    """Returns the filtered documents with hashes in a range, in the order of runs, then hashes; and what was dropped.

    The arrays are `hashes` and the number of `sentences` of each document, `lengths` in tokens of each sentence, and
    those of `names`. What was dropped is by rule of `RULES`. Memory is bounded by the documents that stay, and one run.

    Args:
      runs: all runs.
      options: those of the filters.
      repeated: the sorted hashes of lines to drop.
      hashes: the range.
      names: arrays of the runs to read, `tokens` or those with an item for every sentence.
      lines: the hashes of lines to read; documents without any are none, and are not counted as dropped.
    """
    ranges = [run.hash_range(*hashes) for run in runs]
    found = [run.read("hashes", *ends) for run, ends in zip(runs, ranges, strict=True)]
    duplicate = np.full(sum(map(len, found)), options.drop_duplicates)
    duplicate[np.unique(np.concatenate(found), return_index=True)[1]] = False
    duplicates = np.split(duplicate, np.cumsum([len(each) for each in found])[:-1])
    dropped = dict.fromkeys(RULES, Counts())
    parts = [
        _read(run, ends, is_duplicate, repeated, lines, names, dropped)
        for run, ends, is_duplicate in zip(runs, ranges, duplicates, strict=True)
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, dropped


def _read(
    run: Run, ends: tuple[int, int], duplicate: np.ndarray, repeated: np.ndarray, lines: Hashes, names: Sequence[str],
    dropped: dict[str, Counts],
) -> dict[str, np.ndarray]:  # fmt: skip
    """Returns the arrays of `read_documents` for the documents at `ends` of a run; adds what it drops to `dropped`.

    `duplicate` bool [n] are the documents that are read elsewhere.
    """
    start, stop = ends
    sentence_at = run.read("sentence_at", start, stop + 1)
    first, last = sentence_at[[0, -1]].tolist()
    lengths = run.read("lengths", first, last)
    owner = np.repeat(np.arange(stop - start), np.diff(sentence_at))
    sentence = np.ones(last - first, bool)

    def drop(rule: str, lost: np.ndarray) -> None:
        before, lost = len(np.unique(owner[sentence])), lost & sentence
        sentence[lost] = False
        documents = before - len(np.unique(owner[sentence]))
        dropped[rule] += Counts(documents, int(lost.sum()), int(lengths[lost].sum()))

    drop("duplicate_documents", duplicate[owner])
    if len(repeated) or lines != EVERY:
        line = run.read("lines", first, last)
        drop("repeated_lines", np.isin(line, repeated))
        sentence &= (line >= np.uint64(lines[0])) & (line <= np.uint64(lines[1]))
    counts = np.bincount(owner[sentence], minlength=stop - start)
    arrays = {
        "hashes": run.read("hashes", start, stop)[counts > 0], "sentences": counts[counts > 0],
        "lengths": lengths[sentence],
    }  # fmt: skip
    for name in names:
        if name == "tokens":
            tokens = run.read(name, *run.read("token_at", start, stop + 1)[[0, -1]].tolist())
            arrays[name] = tokens if sentence.all() else tokens[np.repeat(sentence, lengths)]
        else:
            arrays[name] = run.read(name, first, last)[sentence]
    return arrays


def count_lines(job: Job, runs: Sequence[Run], task: tuple[int, Hashes]) -> Run:
    """Counts the lines of the documents in a range of hashes; of distinct ones, if duplicates are dropped.

    Args:
      job: the inputs of every task.
      runs: all runs.
      task: the number of the task, and the range of the documents' hashes.

    Returns:
      A run of the lines' `hashes`, sorted, and their `counts`.
    """
    number, hashes = task
    arrays, _ = read_documents(runs, job.options, NO_HASHES, hashes, "lines", "begins_line")
    distinct, counts = np.unique(arrays["lines"][arrays["begins_line"]], return_counts=True)
    return write_run(f"{job.work}/lines-{number:06d}", Counts(), {"hashes": distinct, "counts": counts})


def frequent_lines(job: Job, counted: Sequence[Run], task: Hashes) -> np.ndarray:
    """Returns the hashes, uint64 and sorted, of lines in a range that occur more than `max_line_repeats` times."""
    parts = [[run.read(name, *run.hash_range(*task)) for run in counted] for name in ("hashes", "counts")]
    hashes, counts = map(np.concatenate, parts)
    distinct, which = np.unique(hashes, return_inverse=True)
    return distinct[np.bincount(which, counts, len(distinct)) > job.options.max_line_repeats]


class Bucket(NamedTuple):
    """The lines with hashes in `lines`, of documents with `hashes`, which become the shard `file`."""

    split: str
    file: str
    hashes: Hashes
    lines: Hashes


def make_buckets(runs: Sequence[Run], options: PrepareOptions, repeated: Run) -> list[Bucket]:
    """Returns the bucket of each shard. The eval split has the lowest hashes, of documents or, of few, of lines.

    Lines are held out without pairs if there are too few documents to hold out the share `eval_fraction`.

    Args:
      runs: all runs.
      options: the options of the preparation.
      repeated: the sorted `hashes` of lines to drop.
    """
    counts = sum((run.counts for run in runs), Counts())
    of_lines = options.pairs == "none" and 0 < counts.documents * options.eval_fraction < 1
    threshold = int(options.eval_fraction * 2**64)
    if options.eval_fraction:
        lowest = NO_HASHES  # at least two are held out of four or more
        for hashes in hash_ranges(EVERY, counts.tokens, options.bucket_tokens):
            found, _ = read_documents(runs, options, repeated.read("hashes"), hashes, *(["lines"] * of_lines))
            lowest = np.unique(np.concatenate([lowest, found["lines" if of_lines else "hashes"]]))[:4]
            if len(lowest) >= 4 and not of_lines:
                break
        threshold = max(threshold, 1, int(lowest[1]) + 1 if len(lowest) >= 4 else 0)
    eval_tokens = int(counts.tokens * threshold / 2**64)
    buckets = []
    for split, held, tokens in (
        ("eval", (0, threshold - 1), eval_tokens), ("train", (threshold, EVERY[1]), counts.tokens - eval_tokens)
    ):  # fmt: skip
        ranges = hash_ranges(EVERY if of_lines else held, tokens, options.bucket_tokens)
        for number, hashes in enumerate(ranges):
            name = f"{split}-{number:05d}-of-{len(ranges):05d}.array_record"
            buckets.append(Bucket(split, name, hashes, held if of_lines else EVERY))
    return buckets


class Built(NamedTuple):
    """Finished shard: its counts, what filters dropped, `lengths` uint16 [N] of sequences, `token_counts` int64 [V]."""

    info: SplitInfo
    dropped: dict[str, Counts]
    lengths: np.ndarray
    token_counts: np.ndarray


def build(job: Job, runs: Sequence[Run], repeated: Run, bucket: Bucket) -> Built:
    """Gathers a bucket from the runs, creates its instances `dupe_factor` times and writes them sorted by id.

    Args:
      job: the inputs of every task.
      runs: all runs.
      repeated: the sorted `hashes` of lines to drop.
      bucket: the range of hashes.
    """
    lines = repeated.read("hashes")
    arrays, dropped = read_documents(runs, job.options, lines, bucket.hashes, "tokens", lines=bucket.lines)
    hashes, sentences, lengths, tokens = (arrays[name] for name in ("hashes", "sentences", "lengths", "tokens"))
    order = np.argsort(hashes, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    ends = np.cumsum(sentences)[order]
    begins = ends - sentences[order]
    texts = [bounds[begin : end + 1].tolist() for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    # Both parts of a document whose lines are held out have its hash; ids are unique.
    ids, spans, owners = _make_instances(job, bucket, texts, hashes[order] ^ np.uint64(bucket.lines[0]))
    is_random = (spans[:, 4] == 1) & (job.options.pairs == "nsp")
    is_same = is_random & (spans[:, 2] >= bounds[begins][owners]) & (spans[:, 2] < bounds[ends][owners])
    spans[:, 4] = SINGLE if job.options.pairs == "none" else spans[:, 4] * RANDOM_NEXT
    shard, sequence_sizes = write_shard(f"{job.output}/{bucket.file}", tokens, ids, spans)
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
    if bucket.lines[1] < EVERY[1]:
        dropped = {}  # counted once, not for each part
    return Built(info, dropped, sequence_sizes, token_counts)


def _make_instances(
    job: Job, bucket: Bucket, documents: Sequence[Document], hashes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the instances of documents [n]: ids [N], `Instance`s int32 [N, 5], and documents [N].

    Documents with equal hashes are adjacent. They are numbered, so that ids are unique.
    """
    options = job.options
    first = np.flatnonzero(np.r_[True, hashes[1:] != hashes[:-1]])
    copy = (np.arange(len(hashes)) - np.repeat(first, np.diff(np.r_[first, len(hashes)]))).astype(np.uint64)
    keys = np.where(copy >> 16, random_bits(hashes, copy >> 16), hashes)  # the counter has room for 16 bits
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for number in range(options.dupe_factor):
        rng = make_rng(job.seed, bucket.split, bucket.hashes[0], number)
        make = MAKE_INSTANCES[options.pairs]
        made = make(documents, seq_len=options.seq_len, short_seq_prob=options.short_seq_prob, rng=rng)
        flat, sizes = array("i"), array("i")  # an array, since a million tuples take hundreds of megabytes
        for instances in made:
            sizes.append(len(instances))
            flat.extend(itertools.chain.from_iterable(instances))
        owner = np.repeat(np.arange(len(sizes)), sizes)
        ordinal = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        with np.errstate(over="ignore"):
            counter = (ordinal + (number << 32)).astype(np.uint64) + (copy[owner] << np.uint64(48))
        parts.append((random_bits(keys[owner], counter), np.array(flat, np.int32).reshape(-1, 5), owner))
    ids, spans, owners = (np.concatenate(each) for each in zip(*parts, strict=True))
    return ids, spans, owners


def _used_tokens(spans: np.ndarray) -> int:
    """Returns the number of tokens that are in a segment of at least one of the instances `spans` int32 [N, 5]."""
    segments = np.concatenate([spans[:, :2], spans[:, 2:4]])
    segments = segments[np.argsort(segments[:, 0], kind="stable")]
    before = np.concatenate([[0], np.maximum.accumulate(segments[:, 1])])[: len(segments)]
    return int(np.maximum(0, segments[:, 1] - np.maximum(segments[:, 0], before)).sum())


def write_shard(path: str, tokens: np.ndarray, ids: np.ndarray, spans: np.ndarray) -> tuple[Shard, np.ndarray]:
    """Writes instances sorted by id as the shard `path`.

    Args:
      path: the file.
      tokens: of all segments, in the type of the vocabulary.
      ids: uint64 [N], of the instances.
      spans: int32 [N, 5]: start and stop in `tokens` of A, and of B; and the flags of a record.

    Returns:
      The shard, and the lengths of its sequences, uint16 [N], in order.
    """
    order = np.argsort(ids, kind="stable")
    spans = spans[order]
    headers = make_headers(ids[order], spans[:, 1] - spans[:, 0], spans[:, 3] - spans[:, 2], spans[:, 4])
    data = tokens.data.cast("B") if len(tokens) else b""
    ends = spans[:, :4].astype(np.int64) * tokens.itemsize
    content = new_digest()
    with atomic.whole_path(path) as local:
        try:
            writer = ArrayRecordWriter(str(local), _WRITER_OPTIONS)
            for header, (a_start, a_stop, b_start, b_stop) in zip(headers, ends, strict=True):
                record = b"".join((header.tobytes(), data[a_start:a_stop], data[b_start:b_stop]))
                content.update(record)
                writer.write(record)
            writer.close()
            ArrayRecordReader(str(local)).close()  # fails if the disk was full
        except (RuntimeError, ValueError) as error:
            raise OSError(f"{path}: could not be written ({error})") from error
        shard = Shard(epath.Path(path).name, len(spans), content.hexdigest(), local.stat().st_size, file_digest(local))
    return shard, sequence_lengths(headers).astype(np.uint16)
