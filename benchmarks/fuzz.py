"""Feeds damaged files to every reader of bert_jax, and keeps those that end in anything but a refusal of one line.

    python benchmarks/fuzz.py [--inputs 10_000_000] [--jobs 2] [--folder runs/fuzz] [--targets "task: CSV" ...]

An input is a valid small file with a few random changes: flipped bits, lost and repeated pieces, pieces of other files,
tokens of the formats, numbers that are too large, brackets nested 3,000 deep. A reader may accept it or refuse it with
BertJaxError. Findings are other exceptions, inputs that take longer than `--limit` seconds, and readers that need more
than `--memory` MiB beyond their start. FOLDER/findings has each with its traceback, one per place in the code.

`--engines random coverage` damages files at random in one round, and lets atheris, which has to be installed, choose
the damage by the lines that it reaches in the next. TensorFlow's index is read where TensorFlow is installed.

All targets get inputs for the same time, but at least `--least` inputs. Each finished round is a line of
FOLDER/rounds.jsonl: the same command continues until `--inputs` are done, of which those of earlier code count as well.
Ends with status 1 if there are findings in today's code.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from fuzzed.rounds import ENGINES, read_rounds, run_round
from fuzzed.targets import TARGETS
from record import Record, add_json_argument, code_digest

MEASURES = ("bert_jax", "benchmarks/fuzzed")
ROUND_SECONDS = 10.0
COLUMNS = {
    "reader": "{target}",
    "inputs": "{inputs:,}",
    "guided by coverage": "{guided:,}",
    "accepted": "{accepted_share:.0%}",
    "findings": "{findings}",
    "in earlier code": "{earlier_findings}",
    "slowest, ms": "{slowest_ms:,.0f}",
    "memory, MiB": "{memory_mib:,.0f}",
}


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    (options.folder / "findings").mkdir(parents=True, exist_ok=True)
    code, journal, record = code_digest(MEASURES), options.folder / "rounds.jsonl", Record(options.json, MEASURES)
    done = read_rounds(journal)
    context = multiprocessing.get_context("spawn")
    running: dict[Any, tuple[str, str, Any]] = {}
    while True:
        for process, (name, engine, pipe) in list(running.items()):
            if pipe.poll() or not process.is_alive():
                try:
                    row = pipe.recv()
                    process.join()
                except EOFError:
                    process.join()
                    row = _died(name, engine, process.exitcode)
                del running[process]
                done.append(row | {"code": code})
                with journal.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done[-1]) + "\n")
                print(_line(row, done), flush=True)
                record.set_table("readers", COLUMNS, summary(done, code))
        counts = {
            name: sum(row["inputs"] for row in done if row["target"] == name and row["code"] == code)
            for name in options.targets
        }
        seconds = {name: sum(row["seconds"] for row in done if row["target"] == name) for name in options.targets}
        busy = {name for name, _, _ in running.values()}
        wanted = [name for name in options.targets if name not in busy]
        is_done = sum(row["inputs"] for row in done) >= options.inputs and all(
            counts[name] >= options.least for name in wanted
        )
        if is_done and not running:
            break
        if not is_done and wanted and len(running) < options.jobs:
            name = min(wanted, key=lambda one: (counts[one] >= options.least, seconds[one]))
            number = sum(row["target"] == name for row in done)
            engine = options.engines[number % len(options.engines)]
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=run_round, args=(name, engine, number, options, sender))
            process.start()
            sender.close()
            running[process] = (name, engine, receiver)
        time.sleep(0.05)
    rows = summary(done, code)
    sums = ("inputs", "inputs_today", "guided", "findings", "earlier_findings")
    record.set_values(**{key: sum(row[key] for row in rows) for key in sums})
    record.set_table("readers", COLUMNS, rows)
    print(record.render("readers"))
    return int(any(row["findings"] for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000_000)
    parser.add_argument("--least", type=int, default=5_000, help="inputs of each target")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/fuzz"))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["random"], help="taken in turn (see above)")
    parser.add_argument("--seconds", type=float, default=ROUND_SECONDS, help="of a round of one target")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds of an input")
    parser.add_argument("--memory", type=float, default=512.0, help="MiB of a reader")
    add_json_argument(parser, "fuzz")
    return parser


def _died(name: str, engine: str, status: int | None) -> dict[str, Any]:
    """Returns the row of a round that a signal ended, which is a finding. RuntimeError if the target cannot be read."""
    if status is None or status >= 0:
        raise RuntimeError(f"{name}: a round ended with status {status}")
    print(f"{name}: a round was ended by signal {-status}", file=sys.stderr, flush=True)
    return {"target": name, "engine": engine, "inputs": 0, "accepted": 0, "findings": 1, "slowest_ms": 0.0,
            "memory_mib": 0.0, "seconds": ROUND_SECONDS}  # fmt: skip


def summary(done: Iterable[dict[str, Any]], code: str) -> list[dict[str, Any]]:
    """Returns a row per target; findings, time and memory are of the code with this digest, but `earlier_findings`."""
    rows = []
    for name in TARGETS:
        rounds = [row for row in done if row["target"] == name]
        today, earlier = ([row for row in rounds if (row["code"] == code) == is_today] for is_today in (True, False))
        if inputs := sum(row["inputs"] for row in rounds):
            rows.append(
                {
                    "target": name, "inputs": inputs, "inputs_today": sum(row["inputs"] for row in today),
                    "guided": sum(row["inputs"] for row in rounds if row["engine"] == "coverage"),
                    "findings": sum(row["findings"] for row in today),
                    "earlier_findings": sum(row["findings"] for row in earlier),
                    "accepted_share": sum(row["accepted"] for row in rounds) / inputs,
                    "slowest_ms": max(row["slowest_ms"] for row in today or rounds),
                    "memory_mib": max(row["memory_mib"] for row in today or rounds),
                }
            )  # fmt: skip
    return rows


def _line(row: dict[str, Any], done: list[dict[str, Any]]) -> str:
    total = sum(one["inputs"] for one in done)
    return f"{total:,}: {row['target']} ({row['engine']}), {row['inputs']:,} inputs, {row['findings']} findings"


if __name__ == "__main__":
    sys.exit(main())
