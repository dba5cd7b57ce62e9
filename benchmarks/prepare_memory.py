"""Measures the memory of `bert-jax prepare` on a corpus many times larger than its bound.

    python benchmarks/prepare_memory.py --input 'wiki/*.jsonl.gz' --vocab vocab.txt --gigabytes 8

The corpus is the input repeated as JSON lines; the text of each document starts with a unique number. The memory is the
peak resident one of the largest process.
"""

import gzip
import itertools
import json
import resource
import tempfile
import time
from collections.abc import Iterator
from glob import glob
from pathlib import Path

from processes import bert_jax
from record import Record, make_parser

WORKERS = 2
FILE_BYTES = 256 << 20
COLUMNS = {
    "text, GB": "{text_gb:.1f}",
    "tokens, G": "{tokens_g:.2f}",
    "bucket, M tokens": "{bucket_tokens_m:.1f}",
    "workers": "{workers}",
    "minutes": "{minutes:.1f}",
    "largest process, MB": "{largest_process_mb:,.0f}",
    "text / largest process": "{text_over_largest:.1f}",
}


def documents(files: list[str]) -> Iterator[str]:
    """Yields the documents of all files again and again, as JSON lines."""
    for repeat in itertools.count():
        for path in files:
            with gzip.open(path, "rt") as lines:
                for document in map(json.loads, lines):
                    number = f"{repeat} {document['id']}"
                    text = f"Document {number}.\n{document['text']}"
                    yield json.dumps({"id": number, "text": text}) + "\n"


def make_corpus(files: list[str], folder: Path, size: int) -> int:
    """Writes at least `size` bytes of documents, and returns the number of bytes."""
    folder.mkdir()
    lines, written = documents(files), 0
    for number in itertools.count():
        with open(folder / f"{number:05d}.jsonl", "w") as out:
            while out.tell() <= FILE_BYTES:
                written += out.write(next(lines))
                if written >= size:
                    return written
    raise AssertionError


def main() -> None:
    parser = make_parser(__doc__, "prepare_memory")
    parser.add_argument("--input", required=True)
    parser.add_argument("--vocab", required=True)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--bucket_tokens", type=int, default=16 << 20)
    options = parser.parse_args()
    record = Record(options.json, ("bert_jax/data", "bert_jax/text"))
    with tempfile.TemporaryDirectory() as temporary:
        corpus, data, vocabulary = (Path(temporary) / name for name in ("corpus", "data", "tokenizer.json"))
        size = make_corpus(sorted(glob(options.input)), corpus, int(options.gigabytes * 1e9))
        start = time.time()
        bert_jax("vocab", "--from", options.vocab, "--output", vocabulary)
        described = json.loads(bert_jax(
            "prepare", "--input", corpus, "--vocab", vocabulary, "--output", data, "--workers", WORKERS,
            "--bucket_tokens", options.bucket_tokens, "--json",
        ))  # fmt: skip
        seconds = time.time() - start
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    tokens = sum(described[split]["tokens"] for split in ("train", "eval"))
    row = {
        "text_gb": size / 1e9, "tokens_g": tokens / 1e9, "bucket_tokens_m": options.bucket_tokens / 1e6,
        "workers": WORKERS, "minutes": seconds / 60, "largest_process_mb": largest / 1e6,
        "text_over_largest": size / largest,
    }  # fmt: skip
    record.set_table("memory", COLUMNS, [row])
    print(record.render("memory"))


if __name__ == "__main__":
    main()
