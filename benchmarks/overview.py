"""Lists all benchmarks: which results are unfinished or older than the code, and the command that reruns each.

    python benchmarks/overview.py          # the list, in a second
    python benchmarks/overview.py --run    # first reruns the quick ones, some ten minutes on two cores

A new benchmark is one entry of `BENCHMARKS`. Commands run in the repository; `{data}` is the folder in BERT_JAX_DATA,
with corpus/, glue/ and vocab/, and without it commands that read it are skipped. Figures of a shared machine are not
worth recording: run the quick ones while nothing else runs, and look at the differences that git shows.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass

from record import REPOSITORY, RESULTS, outdated

QUICK = 3.0
"""Minutes below which `--run` reruns a benchmark."""
WIKIPEDIA = "--input '{data}/corpus/enwiki/enwiki-00000*.jsonl.gz' --vocab {data}/vocab/bert-base-uncased-vocab.txt"


@dataclass(frozen=True)
class Benchmark:
    """Command with its usual duration on two cores, and the names of the files in results/ that it writes.

    The script is that of the command; without `results` it writes one file of its name.
    """

    command: str
    minutes: float
    results: tuple[str, ...] = ()

    @property
    def script(self) -> str:
        return next(word for word in self.command.split() if word.startswith("benchmarks/"))

    @property
    def files(self) -> tuple[str, ...]:
        return self.results or (self.script.removeprefix("benchmarks/").rpartition(".")[0],)

    @property
    def is_quick(self) -> bool:
        return self.minutes < QUICK


GPU_PARTS = ("check", "parity", "determinism", "speed", "attention", "remat", "torch", "curve")
BENCHMARKS = (
    Benchmark("python benchmarks/packing.py " + WIKIPEDIA, 2.5),
    Benchmark("python benchmarks/startup.py --data {data}", 5),
    Benchmark("python benchmarks/restarts.py --kills 3 --every 30", 5),
    Benchmark("python benchmarks/step_speed.py", 12),
    Benchmark("bash benchmarks/gpu.sh", 10, tuple(f"gpu_{part}" for part in GPU_PARTS)),
    Benchmark("python benchmarks/data_pipeline.py " + WIKIPEDIA, 10),
    Benchmark("python benchmarks/quickstart_recipes.py", 15),
    Benchmark("BERT_JAX_DATA={data} python benchmarks/continue_pretraining.py", 15),
    Benchmark("python benchmarks/pod_input.py --data128 DATASET --data512 DATASET", 15),
    Benchmark("BERT_JAX_DATA={data} python benchmarks/gradient_reduction.py", 10),
    Benchmark("python benchmarks/finetune_speed.py --data {data} --repeats 3", 40),
    Benchmark("python benchmarks/tpu_topologies.py", 25),
    Benchmark("python benchmarks/tpu_programs.py", 120),
    Benchmark("python benchmarks/step_programs.py", 35),
    Benchmark("python benchmarks/korean.py {data}/corpus/kowiki/kowiki.jsonl.gz", 30),
    Benchmark("python benchmarks/loss_memory.py", 15),
    Benchmark("python benchmarks/kills.py --kills 500", 60),
    Benchmark("python benchmarks/fuzz.py", 70),
    Benchmark("python benchmarks/soak.py", 185),
    Benchmark("python benchmarks/storage_faults.py", 45),
    Benchmark("python benchmarks/many_files.py", 15),
    Benchmark("python benchmarks/attention_memory.py", 30),
    Benchmark(
        f"python benchmarks/prepare_memory.py {WIKIPEDIA} --gigabytes 5.2 --bucket_tokens 4194304", 90
    ),
)  # fmt: skip


def state(name: str) -> str:
    """Returns in a few words whether results/NAME.json is unfinished, or older than the code that it measures."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return "no results"
    content = json.loads(path.read_text(encoding="utf-8"))
    older, rows = outdated(content)
    age = f"{older} of {rows} rows are older than the code" if older else "up to date"
    if name.removeprefix("gpu_") in GPU_PARTS and "complete" not in content:
        age = f"unfinished, {age}" if older else "unfinished"
    return f"{age}, {content['date'] or 'date not recorded'}"


def is_current(benchmark: Benchmark) -> bool:
    """Returns whether all results of a benchmark exist and are of today's code."""
    return all(state(name).startswith("up to date") for name in benchmark.files)


def overview() -> str:
    """Returns the list, the benchmarks whose results are not of today's code first."""
    lines = ["{data} is the folder in BERT_JAX_DATA"]
    for benchmark in sorted(BENCHMARKS, key=is_current):
        lines += [f"{name}: {state(name)}" for name in benchmark.files]
        lines.append(f"    {benchmark.command}    # some {benchmark.minutes:g} minutes")
    return "\n".join(lines)


def run_quick() -> list[str]:
    """Reruns the quick benchmarks; returns the commands that failed."""
    failed, data = [], os.environ.get("BERT_JAX_DATA", "")
    for benchmark in BENCHMARKS:
        if not benchmark.is_quick:
            continue
        if "{data}" in benchmark.command and not data:
            print(f"skipped, set BERT_JAX_DATA: {benchmark.command}", flush=True)
            continue
        words = [sys.executable if word == "python" else word for word in shlex.split(benchmark.command)]
        words = ["env", *(word.replace("{data}", data) for word in words)]  # assignments may precede the program
        print(shlex.join(words), flush=True)
        if subprocess.run(words, cwd=REPOSITORY, check=False).returncode:
            failed.append(benchmark.command)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="first reruns the quick benchmarks")
    failed = run_quick() if parser.parse_args().run else []
    print(overview())
    for command in failed:
        print(f"failed: {command}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
