"""Measures the memory of `bert-jax prepare` on a corpus many times larger than its bound.

    python benchmarks/prepare_memory.py --input 'wiki/*.jsonl.gz' --vocab vocab.txt --gigabytes 8

The corpus is the input repeated as JSON lines; the text of each document starts with a unique number. Prints the peak
resident memory of each process, from /proc.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from glob import glob
from pathlib import Path

from record import Record, add_json_argument

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


def make_corpus(files: list[str], folder: Path, size: int) -> int:
    """Writes at least `size` bytes of documents, and returns the number of bytes."""
    written, number, repeat = 0, 0, 0
    out = None
    while written < size:
        for path in files:
            with gzip.open(path, "rt") as lines:
                for line in lines:
                    if out is None or out.tell() > FILE_BYTES:
                        if out is not None:
                            out.close()
                        out = open(folder / f"{number:05d}.jsonl", "w")  # noqa: SIM115
                        number += 1
                    document = json.loads(line)
                    text = f"Document {repeat} {document['id']}.\n{document['text']}"
                    written += out.write(json.dumps({"id": f"{repeat}-{document['id']}", "text": text}) + "\n")
                    if written >= size:
                        out.close()
                        return written
        repeat += 1
    return written


def peaks_below(parent: int) -> dict[int, int]:
    """Returns the peak resident memory in bytes of a process and its descendants, by process id."""
    found, seen = {}, [parent]
    while seen:
        process = seen.pop()
        try:
            status = Path(f"/proc/{process}/status").read_text()
            seen += map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
        line = next((line for line in status.split("\n") if line.startswith("VmHWM")), None)
        if line:
            found[process] = int(line.split()[1]) << 10
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--input", required=True)
    parser.add_argument("--vocab", required=True)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--bucket_tokens", type=int, default=16 << 20)
    add_json_argument(parser, "prepare_memory")
    options = parser.parse_args()
    record = Record(options.json, ("bert_jax/data", "bert_jax/text"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "corpus").mkdir()
        size = make_corpus(sorted(glob(options.input)), folder / "corpus", int(options.gigabytes * 1e9))
        print(f"{size / 1e9:.1f} GB of text", file=sys.stderr, flush=True)
        start = time.time()
        cli, vocabulary = [sys.executable, "-m", "bert_jax.cli"], folder / "tokenizer.json"
        subprocess.run([*cli, "vocab", "--from", options.vocab, "--output", vocabulary], check=True)
        command = [
            *cli, "prepare", "--input", folder / "corpus", "--vocab", vocabulary,
            "--output", folder / "data", "--workers", str(options.workers),
            "--bucket_tokens", str(options.bucket_tokens), "--json",
        ]  # fmt: skip
        process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True)
        peaks: dict[int, int] = {}
        while process.poll() is None:
            for one, peak in peaks_below(process.pid).items():
                peaks[one] = max(peaks.get(one, 0), peak)
            time.sleep(0.2)
        if process.returncode or process.stdout is None:
            raise SystemExit(process.returncode)
        seconds = time.time() - start
        described = json.loads(process.stdout.read())
        tokens = sum(described[split]["tokens"] for split in ("train", "eval"))
        largest = max(peaks.values())
        row = {
            "text_gb": size / 1e9, "tokens_g": tokens / 1e9, "bucket_tokens_m": options.bucket_tokens / 1e6,
            "workers": options.workers, "minutes": seconds / 60, "largest_process_mb": largest / 1e6,
            "text_over_largest": size / largest,
        }  # fmt: skip
        record.set_table("memory", COLUMNS, [row])
        print(record.render("memory"))
        print("MB of each process:", ", ".join(f"{peak / 1e6:,.0f}" for peak in sorted(peaks.values(), reverse=True)))


if __name__ == "__main__":
    main()
