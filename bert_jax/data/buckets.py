"""The second pass of preparing: a bucket, the documents in a range of hashes, to one shard of sentence pairs."""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from etils import epath

from bert_jax.data.dataset import Shard, ShardWriter, encode_headers, token_dtype
from bert_jax.data.hashing import random_bits
from bert_jax.data.instances import make_pairs, make_rng
from bert_jax.data.runs import Run


def eval_threshold(runs: Sequence[Run], fraction: float) -> int:
    """Documents with a hash below this are held out: the share `fraction`, and two at least where there are four."""
    if not fraction:
        return 0
    threshold = int(fraction * 2**64)
    distinct = np.unique(np.concatenate([np.unique(run.array("hashes"))[:4] for run in runs]))
    if len(distinct) >= 4:
        threshold = max(threshold, int(distinct[1]) + 1)
    return threshold


def hash_ranges(low: int, high: int, tokens: int, bucket_tokens: int) -> list[tuple[int, int]]:
    """[low, high) in equal parts of some `bucket_tokens` tokens, which is what hashes spread evenly come to."""
    if high <= low:
        return []
    parts = max(1, -(-tokens // bucket_tokens))
    bounds = [low + (high - low) * i // parts for i in range(parts + 1)]
    return list(itertools.pairwise(bounds))


@dataclass(frozen=True)
class BuildTask:
    """One bucket, the documents with hashes in [low, high), and how it becomes the shard `file` in `folder`."""

    file: str
    split: str
    low: int
    high: int
    runs: list[Run]
    folder: str
    vocab_size: int
    seq_len: int
    dupe_factor: int
    short_seq_prob: float
    random_next: str
    seed: int


@dataclass(frozen=True)
class Built:
    """A shard and what is in it; `token_counts` int64 [V] counts each document once."""

    shard: Shard
    documents: int
    sentences: int
    tokens: int
    random_next: int
    token_counts: np.ndarray


@dataclass(frozen=True)
class _Bucket:
    """Documents in order of hash: their sentence boundaries as offsets into `tokens`."""

    hashes: np.ndarray
    documents: list[list[int]]
    tokens: np.ndarray


def _gather(task: BuildTask) -> _Bucket:
    hashes, counts, lengths, tokens = [], [], [], []
    for run in task.runs:
        run_hashes = run.array("hashes")
        first, last = (_position(run_hashes, bound) for bound in (task.low, task.high))
        if first == last:
            continue
        sentence_at, token_at = (run.array(name)[first : last + 1] for name in ("sentence_at", "token_at"))
        hashes.append(run_hashes[first:last])
        counts.append(np.diff(sentence_at))
        lengths.append(run.array("lengths")[sentence_at[0] : sentence_at[-1]])
        tokens.append(run.array("tokens")[token_at[0] : token_at[-1]])
    if not hashes:
        return _Bucket(np.zeros(0, np.uint64), [], np.zeros(0, token_dtype(task.vocab_size)))
    all_hashes = np.concatenate(hashes)
    ends = np.cumsum(np.concatenate(counts)).tolist()
    boundaries = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).tolist()
    documents = [boundaries[start : end + 1] for start, end in zip([0, *ends], ends, strict=False)]
    order = np.argsort(all_hashes, kind="stable")
    return _Bucket(all_hashes[order], [documents[i] for i in order.tolist()], np.concatenate(tokens))


def _position(hashes: np.ndarray, bound: int) -> int:
    return len(hashes) if bound >= 2**64 else int(np.searchsorted(hashes, np.uint64(bound)))


def build(task: BuildTask) -> Built:
    """Gathers a bucket from the runs, draws its pairs `dupe_factor` times and writes them in order of instance id."""
    bucket = _gather(task)
    repeats = _occurrence(bucket.hashes)
    ids, spans = [np.zeros(0, np.uint64)], [np.zeros((0, 5), np.int64)]
    for number in range(task.dupe_factor):
        rng = make_rng(task.seed, task.split, task.low, number)
        pairs = make_pairs(
            bucket.documents,
            seq_len=task.seq_len,
            short_seq_prob=task.short_seq_prob,
            random_next=task.random_next,
            rng=rng,
        )
        counts = np.array([len(found) for found in pairs], np.int64)
        owner = np.repeat(np.arange(len(pairs)), counts)
        ordinal = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        with np.errstate(over="ignore"):
            counter = ordinal.astype(np.uint64) + np.uint64(number << 32) + (repeats[owner] << np.uint64(48))
        ids.append(random_bits(bucket.hashes[owner], counter))
        spans.append(np.array([pair for found in pairs for pair in found], np.int64).reshape(-1, 5))
    all_ids, all_spans = np.concatenate(ids), np.concatenate(spans)
    shard = _write_shard(task, bucket.tokens, all_ids, all_spans)
    return Built(
        shard=shard,
        documents=len(bucket.documents),
        sentences=sum(len(document) - 1 for document in bucket.documents),
        tokens=len(bucket.tokens),
        random_next=int(all_spans[:, 4].sum()),
        token_counts=np.bincount(bucket.tokens, minlength=task.vocab_size),
    )


def _occurrence(hashes: np.ndarray) -> np.ndarray:
    """uint64: 0 for the first document with a hash, 1 for its first duplicate, and so on. `hashes` is sorted."""
    position = np.arange(len(hashes))
    is_first = np.concatenate([[True], hashes[1:] != hashes[:-1]])[: len(hashes)]
    return (position - np.maximum.accumulate(np.where(is_first, position, 0))).astype(np.uint64)


def _write_shard(task: BuildTask, tokens: np.ndarray, ids: np.ndarray, spans: np.ndarray) -> Shard:
    order = np.argsort(ids, kind="stable")
    spans = spans[order]
    len_a, len_b = spans[:, 1] - spans[:, 0], spans[:, 3] - spans[:, 2]
    headers = encode_headers(ids[order], len_a, len_b, spans[:, 4] > 0).data.cast("B")
    size = len(headers) // len(spans) if len(spans) else 0
    width = tokens.itemsize
    data = np.ascontiguousarray(tokens).data.cast("B")
    writer = ShardWriter(epath.Path(task.folder) / task.file)
    digest = hashlib.blake2b(digest_size=16)
    for i, (a_start, a_stop, b_start, b_stop, _) in enumerate((spans * width).tolist()):
        record = b"".join((headers[i * size : (i + 1) * size], data[a_start:a_stop], data[b_start:b_stop]))
        digest.update(record)
        writer.write(record)
    return writer.close(digest.hexdigest())
