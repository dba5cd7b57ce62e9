"""Raw text to a prepared dataset, in two passes over the work, never over memory.

1. Each slice of the input is read, split into sentences and tokenized; its documents go to temporary *runs* sorted
   by the hash of their text.
2. A bucket is a range of hashes: a random sample of the corpus's documents, small enough to hold. Each is gathered
   from the runs, paired (`instances.py`) and written as one shard. The lowest hashes are the eval split, so a document
   stays on its side whatever else is in the corpus.

Both passes are a map over independent tasks, and nothing depends on which process did what: the same corpus,
vocabulary, options and seed give the same bytes for any number of workers. Memory is a slice or a bucket a worker.
"""

import hashlib
import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from etils import epath

from bert_jax.data import corpus, sentences
from bert_jax.data.dataset import (
    INFO_FILE,
    TOKEN_COUNTS_FILE,
    VOCABULARY_FILE,
    DatasetInfo,
    Shard,
    ShardWriter,
    SplitInfo,
    encode_headers,
    token_dtype,
)
from bert_jax.data.hashing import content_hash, random_bits
from bert_jax.data.instances import RANDOM_NEXT_RULES, make_pairs, make_rng
from bert_jax.data.tokenization import WordPieceTokenizer
from bert_jax.errors import BertJaxError, InputError
from bert_jax.progress import Bars, silent

log = logging.getLogger(__name__)

SENTENCES_A_BATCH = 2048  # tokenized in one call
TOKENS_A_RUN = 8 << 20  # held by pass 1 before it writes them out
LONGEST_SEQ_LEN = 1 << 15
TEMPORARY = ".prepare"
INFO_PARTIAL = f"{INFO_FILE}.partial"

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class PrepareOptions:
    """What decides a dataset's bytes besides corpus, vocabulary and seed."""

    seq_len: int = 128
    dupe_factor: int = 1
    short_seq_prob: float = 0.1
    random_next: str = "paper"
    eval_fraction: float = 0.01
    sentences: str = "split"  # or "lines": the corpus has one sentence a line
    language: str = "en"
    documents: str = "blank_line"
    errors: str = "strict"
    bucket_tokens: int = 16 << 20

    def __post_init__(self) -> None:
        def check(holds: bool, message: str) -> None:
            if not holds:
                raise InputError(message)

        check(8 <= self.seq_len <= LONGEST_SEQ_LEN, f"--seq_len is 8 to {LONGEST_SEQ_LEN}, not {self.seq_len}")
        check(self.dupe_factor >= 1, f"--dupe_factor is at least 1, not {self.dupe_factor}")
        check(0 <= self.short_seq_prob <= 1, f"--short_seq_prob is a probability, not {self.short_seq_prob}")
        check(0 <= self.eval_fraction < 1, f"--eval_fraction is in [0, 1), not {self.eval_fraction}")
        check(self.bucket_tokens >= 1024, f"--bucket_tokens is at least 1024, not {self.bucket_tokens}")
        check(
            self.random_next in RANDOM_NEXT_RULES,
            f"--random_next is one of {', '.join(RANDOM_NEXT_RULES)}, not {self.random_next!r}",
        )
        check(self.sentences in ("split", "lines"), f"--sentences is split or lines, not {self.sentences!r}")


def prepare(
    inputs: Sequence[str],
    tokenizer: WordPieceTokenizer,
    output: str,
    options: PrepareOptions,
    *,
    seed: int = 0,
    workers: int = 1,
    bars: Bars = silent,
) -> DatasetInfo:
    """Makes the prepared dataset `output` from the corpus `inputs`.

    Raises:
      InputError: the corpus is missing, empty or unreadable, an option is out of range, or `output` is taken.
      OSError: the disk is full. What was written is removed; no `dataset.json` is left behind.
    """
    folder = epath.Path(output)
    if (folder / INFO_FILE).exists():
        raise InputError(f"{folder} already holds a prepared dataset: choose another --output or delete it")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: choose another --output")
    if workers < 1:
        raise InputError(f"--workers is at least 1, not {workers}")
    reading = corpus.CorpusOptions(documents=options.documents, errors=options.errors)
    slices = corpus.plan(inputs, reading)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f"{TEMPORARY}*"):  # of a run that was killed
        stale.rmtree()
    _remove_output(folder)  # of the same: its shards need not have the names that this run's have
    before = {name for name in (TOKEN_COUNTS_FILE, VOCABULARY_FILE) if (folder / name).exists()}  # not ours to remove
    scratch = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=os.fspath(folder)))
    try:
        info = _prepare(slices, reading, tokenizer, folder, scratch, options, seed, workers, bars)
    except BaseException:
        _remove_output(folder)
        for name in {TOKEN_COUNTS_FILE, VOCABULARY_FILE} - before:
            (folder / name).unlink(missing_ok=True)
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return info


def _remove_output(folder: epath.Path) -> None:
    """Removes what an unfinished run leaves, and nothing that a person may have put there, like `train-1.txt`."""
    for pattern in ("train-[0-9]*-of-[0-9]*.array_record*", "eval-[0-9]*-of-[0-9]*.array_record*", INFO_PARTIAL):
        for path in folder.glob(pattern):
            path.unlink()


def _save_array(file: BinaryIO, array: np.ndarray) -> None:
    """What `np.save` does, but on a full disk the OSError says so: that of `ndarray.tofile` has no errno."""
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(np.ascontiguousarray(array).data)


def _prepare(
    slices: Sequence[corpus.Slice],
    reading: corpus.CorpusOptions,
    tokenizer: WordPieceTokenizer,
    folder: epath.Path,
    scratch: Path,
    options: PrepareOptions,
    seed: int,
    workers: int,
    bars: Bars,
) -> DatasetInfo:
    tokenize = [_TokenizeTask(i, piece, reading, tokenizer, options, scratch) for i, piece in enumerate(slices)]
    runs: list[_Run] = []
    documents = 0
    total = sum(piece.bytes for piece in slices)
    with closing(bars(total=total, desc="tokenize", unit="B", unit_scale=True)) as bar:
        for task, result in _map(_tokenize, tokenize, workers):
            runs += result
            documents += sum(run.documents for run in result)
            bar.set_postfix_str(f"{documents:,} documents")
            bar.update(task.piece.bytes)
    tokens = sum(run.tokens for run in runs)
    if not documents:
        raise InputError(f"the corpus holds no text: {slices[0].path if slices else 'no input'} and the rest are empty")
    runs.sort(key=lambda run: run.path)

    eval_below = _eval_threshold(runs, options.eval_fraction)
    eval_tokens = int(tokens * eval_below / 2**64)
    ranges = [("eval", *bounds) for bounds in _hash_ranges(0, eval_below, eval_tokens, options.bucket_tokens)]
    ranges += [
        ("train", *bounds) for bounds in _hash_ranges(eval_below, 2**64, tokens - eval_tokens, options.bucket_tokens)
    ]
    totals = {split: sum(name == split for name, _, _ in ranges) for split in ("train", "eval")}
    numbers = {split: itertools.count() for split in totals}
    build = [
        _BuildTask(
            f"{split}-{next(numbers[split]):05d}-of-{totals[split]:05d}.array_record",
            split,
            low,
            high,
            runs,
            os.fspath(folder),
            options,
            tokenizer.vocab_size,
            seed,
        )
        for split, low, high in ranges
    ]
    built: dict[str, _Built] = {}
    with closing(bars(total=documents, desc="pair and write", unit=" documents", unit_scale=True)) as bar:
        for built_task, bucket in _map(_build, build, workers):
            built[built_task.file] = bucket
            bar.update(bucket.documents)
            bar.set_postfix_str(f"{sum(b.shard.instances for b in built.values()):,} instances")

    splits = {split: [built[task.file] for task in build if task.split == split] for split in totals}
    if not sum(bucket.shard.instances for bucket in splits["train"]):
        raise InputError("the corpus has too little text for a train split: give more, or --eval_fraction 0")
    counts = np.sum([bucket.token_counts for bucket in splits["train"]], axis=0, dtype=np.int64)
    with (folder / TOKEN_COUNTS_FILE).open("wb") as file:
        _save_array(file, np.asarray(counts))
    tokenizer.save_vocabulary(os.fspath(folder / VOCABULARY_FILE))
    info = DatasetInfo(
        tokenizer={
            "kind": "wordpiece",
            "lowercase": tokenizer.lowercase,
            "vocab_size": tokenizer.vocab_size,
            "sha256": tokenizer.sha256,
        },
        seq_len=options.seq_len,
        seed=seed,
        options=asdict(options),
        splits={split: _split_info(buckets) for split, buckets in splits.items()},
    ).with_hash()
    partial = folder / INFO_PARTIAL
    partial.write_text(info.to_json())
    partial.rename(folder / INFO_FILE)  # last: a folder with it is whole
    return info


# --- Pass 1: slices of the input to runs of tokenized documents ----------------------------------------------------


@dataclass(frozen=True)
class _TokenizeTask:
    number: int
    piece: corpus.Slice
    reading: corpus.CorpusOptions
    tokenizer: WordPieceTokenizer
    options: PrepareOptions
    scratch: Path


@dataclass(frozen=True)
class _Run:
    """Tokenized documents on disk in order of hash, as .npy files.

    `hashes` [n] of the documents; `sentence_at` and `token_at` [n + 1], where each document begins in `lengths`, the
    tokens of every sentence, and in `tokens`.
    """

    path: str
    documents: int
    tokens: int

    def array(self, name: str) -> np.ndarray:
        return np.load(f"{self.path}.{name}.npy", mmap_mode="r")


def _tokenize(task: _TokenizeTask) -> list[_Run]:
    split: Callable[[str], list[str]] = sentences.lines
    if task.options.sentences == "split":
        split = lambda text: sentences.split(text, task.options.language)  # noqa: E731
    dtype = token_dtype(task.tokenizer.vocab_size)
    runs: list[_Run] = []
    hashes: list[int] = []
    documents: list[list[np.ndarray]] = []
    held = 0
    for batch in _batches(corpus.read(task.piece, task.reading), split):
        encoded = iter(task.tokenizer.encode_batch([sentence for _, found in batch for sentence in found]))
        for text_hash, found in batch:
            tokenized = [np.array(ids, dtype) for ids in itertools.islice(encoded, len(found)) if ids]
            if tokenized:
                hashes.append(text_hash)
                documents.append(tokenized)
                held += sum(map(len, tokenized))
        if held >= TOKENS_A_RUN:
            runs.append(_write_run(task, len(runs), hashes, documents, held))
            hashes, documents, held = [], [], 0
    if documents:
        runs.append(_write_run(task, len(runs), hashes, documents, held))
    return runs


def _batches(documents: Iterable[str], split: Callable[[str], list[str]]) -> Iterator[list[tuple[int, list[str]]]]:
    """(hash, sentences) of documents, in lists of some `SENTENCES_A_BATCH` sentences."""
    batch: list[tuple[int, list[str]]] = []
    size = 0
    for document in documents:
        found = split(document)
        batch.append((content_hash(document), found))
        size += len(found)
        if size >= SENTENCES_A_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_run(
    task: _TokenizeTask, number: int, hashes: list[int], documents: list[list[np.ndarray]], tokens: int
) -> _Run:
    path = str(task.scratch / f"{task.number:06d}-{number:04d}")
    keys = np.array(hashes, np.uint64)
    order = np.argsort(keys, kind="stable")
    ordered = [documents[i] for i in order.tolist()]
    sentence_arrays = [sentence for document in ordered for sentence in document]
    lengths = np.array([len(sentence) for sentence in sentence_arrays], np.int64)
    sentence_at = np.cumsum([0, *(len(document) for document in ordered)])
    arrays = {
        "hashes": keys[order],
        "sentence_at": sentence_at,
        "token_at": np.concatenate([[0], np.cumsum(lengths)])[sentence_at],
        "lengths": lengths,
        "tokens": np.concatenate(sentence_arrays),
    }
    for name, array in arrays.items():
        with open(f"{path}.{name}.npy", "wb") as file:
            _save_array(file, array)
    return _Run(path, len(documents), tokens)


# --- Pass 2: ranges of hashes to shards ----------------------------------------------------------------------------


def _eval_threshold(runs: Sequence[_Run], fraction: float) -> int:
    """Documents with a hash below this are held out: the share `fraction`, and two at least where there are four."""
    if not fraction:
        return 0
    threshold = int(fraction * 2**64)
    distinct = np.unique(np.concatenate([np.unique(run.array("hashes"))[:4] for run in runs]))
    if len(distinct) >= 4:
        threshold = max(threshold, int(distinct[1]) + 1)
    return threshold


def _hash_ranges(low: int, high: int, tokens: int, bucket_tokens: int) -> list[tuple[int, int]]:
    """[low, high) in equal parts of some `bucket_tokens` tokens, which is what hashes spread evenly come to."""
    if high <= low:
        return []
    parts = max(1, -(-tokens // bucket_tokens))
    bounds = [low + (high - low) * i // parts for i in range(parts + 1)]
    return list(itertools.pairwise(bounds))


@dataclass(frozen=True)
class _BuildTask:
    file: str
    split: str
    low: int
    high: int
    runs: list[_Run]
    folder: str
    options: PrepareOptions
    vocab_size: int
    seed: int


@dataclass(frozen=True)
class _Built:
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


def _gather(task: _BuildTask) -> _Bucket:
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


def _build(task: _BuildTask) -> _Built:
    bucket = _gather(task)
    repeats = _occurrence(bucket.hashes)
    ids, spans = [np.zeros(0, np.uint64)], [np.zeros((0, 5), np.int64)]
    for number in range(task.options.dupe_factor):
        rng = make_rng(task.seed, task.split, task.low, number)
        pairs = make_pairs(
            bucket.documents,
            seq_len=task.options.seq_len,
            short_seq_prob=task.options.short_seq_prob,
            random_next=task.options.random_next,
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
    return _Built(
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


def _write_shard(task: _BuildTask, tokens: np.ndarray, ids: np.ndarray, spans: np.ndarray) -> Shard:
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


def _split_info(buckets: Sequence[_Built]) -> SplitInfo:
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


def _map(function: Callable[[Task], Result], tasks: Sequence[Task], workers: int) -> Iterator[tuple[Task, Result]]:
    """(task, result) pairs as they finish, from `workers` processes; from this one where one is enough."""
    if min(workers, len(tasks)) <= 1:
        for task in tasks:
            yield task, function(task)
        return
    # Spawned, not forked: the tokenizer and ArrayRecord have threads, and a fork inherits their locks.
    pool = ProcessPoolExecutor(min(workers, len(tasks)), get_context("spawn"), initializer=_one_thread)
    try:
        waiting: dict[Future[Result], Task] = {}
        rest = iter(tasks)
        while True:
            for task in itertools.islice(rest, 2 * workers - len(waiting)):  # a short queue: tasks hold memory
                waiting[pool.submit(function, task)] = task
            if not waiting:
                return
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield waiting.pop(future), future.result()
    except BrokenProcessPool as error:
        raise BertJaxError(
            "a worker died, most likely for want of memory: give fewer --workers or a smaller --bucket_tokens"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is a core: its tokenizer starts no threads of its own


def describe(info: DatasetInfo) -> dict[str, Any]:
    """The counts a person wants to see after preparing, by split."""
    return {
        name: {
            "documents": split.documents,
            "sentences": split.sentences,
            "tokens": split.tokens,
            "instances": split.instances,
            "random_next_share": round(split.random_next / max(1, split.instances), 4),
        }
        for name, split in info.splits.items()
    }
