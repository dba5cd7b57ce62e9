"""Raw text to a prepared dataset, in two passes over the work, never over memory.

1. Each slice of the input is read, split into sentences and tokenized; its documents go to temporary *runs* sorted
   by the hash of their text.
2. A bucket is a range of hashes: a random sample of the corpus's documents, small enough to hold. Each is gathered
   from the runs, paired (`instances.py`) and written as one shard. The lowest hashes are the eval split, so a document
   stays on its side whatever else is in the corpus.

Both passes are a map over independent tasks, and nothing depends on which process did what: the same corpus,
vocabulary, options and seed give the same bytes for any number of workers. Memory is a slice or a bucket a worker.
"""

import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from bert_jax.data import corpus
from bert_jax.data.buckets import BuildTask, Built, build, eval_threshold, hash_ranges
from bert_jax.data.dataset import (
    INFO_FILE,
    TOKEN_COUNTS_FILE,
    VOCABULARY_FILE,
    DatasetInfo,
    SplitInfo,
)
from bert_jax.data.instances import RANDOM_NEXT_RULES
from bert_jax.data.parallel import map_tasks
from bert_jax.data.runs import Run, TokenizeTask, save_array, tokenize
from bert_jax.data.tokenization import WordPieceTokenizer
from bert_jax.errors import InputError
from bert_jax.progress import Bars, silent

log = logging.getLogger(__name__)

LONGEST_SEQ_LEN = 1 << 15
TEMPORARY = ".prepare"
INFO_PARTIAL = f"{INFO_FILE}.partial"


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
    # Pass 1: slices to runs.
    tokenizing = [
        TokenizeTask(i, piece, reading, tokenizer, options.sentences, options.language, scratch)
        for i, piece in enumerate(slices)
    ]
    runs: list[Run] = []
    documents = 0
    total = sum(piece.bytes for piece in slices)
    with closing(bars(total=total, desc="tokenize", unit="B", unit_scale=True)) as bar:
        for task, result in map_tasks(tokenize, tokenizing, workers):
            runs += result
            documents += sum(run.documents for run in result)
            bar.set_postfix_str(f"{documents:,} documents")
            bar.update(task.piece.bytes)
    tokens = sum(run.tokens for run in runs)
    if not documents:
        files = list(dict.fromkeys(piece.path for piece in slices))
        raise InputError(
            f"the corpus holds no text: {files[0]} {f'and {len(files) - 1} more are' if files[1:] else 'is'} empty"
        )
    runs.sort(key=lambda run: run.path)

    # Pass 2: buckets to shards.
    eval_below = eval_threshold(runs, options.eval_fraction)
    eval_tokens = int(tokens * eval_below / 2**64)
    ranges = [("eval", *bounds) for bounds in hash_ranges(0, eval_below, eval_tokens, options.bucket_tokens)]
    ranges += [
        ("train", *bounds) for bounds in hash_ranges(eval_below, 2**64, tokens - eval_tokens, options.bucket_tokens)
    ]
    totals = {split: sum(name == split for name, _, _ in ranges) for split in ("train", "eval")}
    numbers = {split: itertools.count() for split in totals}
    building = [
        BuildTask(
            file=f"{split}-{next(numbers[split]):05d}-of-{totals[split]:05d}.array_record",
            split=split,
            low=low,
            high=high,
            runs=runs,
            folder=os.fspath(folder),
            vocab_size=tokenizer.vocab_size,
            seq_len=options.seq_len,
            dupe_factor=options.dupe_factor,
            short_seq_prob=options.short_seq_prob,
            random_next=options.random_next,
            seed=seed,
        )
        for split, low, high in ranges
    ]
    built: dict[str, Built] = {}
    with closing(bars(total=documents, desc="pair and write", unit=" documents", unit_scale=True)) as bar:
        for built_task, bucket in map_tasks(build, building, workers):
            built[built_task.file] = bucket
            bar.update(bucket.documents)
            bar.set_postfix_str(f"{sum(b.shard.instances for b in built.values()):,} instances")

    # What describes the dataset, last of all dataset.json: a folder with it is whole.
    splits = {split: [built[task.file] for task in building if task.split == split] for split in totals}
    if not sum(bucket.shard.instances for bucket in splits["train"]):
        raise InputError("the corpus has too little text for a train split: give more, or --eval_fraction 0")
    counts = np.sum([bucket.token_counts for bucket in splits["train"]], axis=0, dtype=np.int64)
    with (folder / TOKEN_COUNTS_FILE).open("wb") as file:
        save_array(file, np.asarray(counts))
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
    partial.rename(folder / INFO_FILE)
    return info


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
