"""Measures the parts of a run's start, from the command to the end of its first step, cold and warm.

    BERT_JAX_DATA=FOLDER python benchmarks/startup.py [--models bert_mini bert_base] [--repeats 3]

FOLDER holds vocab/bert-base-uncased-vocab.txt and corpus/sample_text.txt, which is prepared once. A run of small
batches is started in a process of its own. Cold runs have an empty cache of programs, warm ones that of the cold
run. Cold and warm runs of all models take turns. Wall time grows with other work on the machine, CPU time hardly does:
parts are CPU seconds of the process, all threads included, while its main thread was in the part.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from record import Record, add_json_argument

MEASURES = (
    "bert_jax/runtime", "bert_jax/training", "bert_jax/model", "bert_jax/data", "bert_jax/files", "bert_jax/cli.py",
)  # fmt: skip
BATCH, SEQ_LEN = 8, 128
PARTS = {
    "imports": "imports",
    "data": "datasets and checks",
    "plan": "plan of the state",
    "state": "initialization",
    "open": "workdir, trackers",
    "step": "first step",
    "rest": "other",
}
COLUMNS = {
    "model": "{model}",
    "cache": "{cache}",
    **{heading: f"{{{part}_cpu_seconds:.1f}}" for part, heading in PARTS.items()},
    "all, CPU s": "{cpu_seconds:.1f} ({cpu_seconds_minimum:.1f}-{cpu_seconds_maximum:.1f})",
    "wall, s": "{seconds:.1f} ({seconds_minimum:.1f}-{seconds_maximum:.1f})",
    "programs compiled": "{compiled}",
}
HELP_COLUMNS = {"command": "{command}", "s": "{seconds:.2f}", "CPU s": "{cpu_seconds:.2f}"}


def prepare(folder: Path, data: Path) -> Path:
    """Writes the dataset of all runs."""
    vocabulary = folder / "tokenizer.json"
    commands = (
        ("vocab", "--from", data / "vocab" / "bert-base-uncased-vocab.txt", "--output", vocabulary),
        ("prepare", "--input", data / "corpus" / "sample_text.txt", "--vocab", vocabulary, "--output", folder / "data",
         "--seq_len", SEQ_LEN, "--dupe_factor", 1, "--eval_fraction", 0.1),
    )  # fmt: skip
    for command in commands:
        words = [sys.executable, "-m", "bert_jax.cli", *map(str, command)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return folder / "data"


class StartedError(Exception):
    """Ends a run after its first step."""


class Stopwatch:
    """Adds up the CPU seconds of the parts of a run, by wrapping the functions that do them."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._inside = False

    def wrap(self, module: Any, name: str, part: str) -> None:
        function = getattr(module, name)
        setattr(module, name, self.timed(function, part))

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside, start = True, time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds[part] += time.process_time() - start

        return wrapped


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """Runs `pretrain` in this process until its first step is done, and returns its parts."""
    from bert_jax.runtime.interpreter import tune_malloc

    tune_malloc()
    import jax

    from bert_jax.config import load_config
    from bert_jax.training import loop, pretrain, run

    watch = Stopwatch()
    watch.seconds["imports"] = time.process_time()
    for owner, name, part in (
        (pretrain, "open_phases", "data"), (run, "make_mesh", "data"), (run.Run, "enter_workdir", "open"),
        (run.Run, "open", "open"), (pretrain, "claim_workdir", "open"), (pretrain, "Checkpointer", "open"),
        (pretrain, "plan_step", "plan"), (pretrain, "_make_evaluate", "open"),
    ):  # fmt: skip
        watch.wrap(owner, name, part)
    compiled: list[float] = []
    hits: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(seconds) if event.endswith("backend_compile_duration") else None
    )
    jax.monitoring.register_event_listener(
        lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None
    )
    plan_step, result = pretrain.plan_step, {}

    def timed_plan(*args: Any) -> Any:
        spec, step = plan_step(*args)
        initialize = watch.timed(lambda *given: jax.block_until_ready(spec.initialize(*given)), "state")
        return replace(spec, initialize=initialize), step

    pretrain.plan_step = timed_plan

    class FirstStep(loop.Hook):
        """Ends the run when the metrics of the first step are read."""

        def metrics(self, step: int, values: Any) -> None:
            result.update(seconds=time.monotonic() - options.began, cpu_seconds=time.process_time())
            raise StartedError

    run_steps = pretrain.run_steps

    def timed_steps(run: Any, steps: Any, state: Any, hooks: Any) -> Any:
        start = time.process_time()
        try:
            return run_steps(run, steps, state, [FirstStep(), *hooks])
        finally:
            watch.seconds["step"] = result["cpu_seconds"] - start

    pretrain.run_steps = timed_steps
    settings = {
        "data.path": options.data, "total_steps": 1, "global_batch_size": BATCH, "optimizer.warmup_steps": 0,
        "eval_batches": 0, "compilation_cache": options.cache, "log_every_steps": 1,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as workdir, suppress(StartedError):
        pretrain.pretrain(load_config(options.child, settings), workdir)
    watch.seconds["rest"] = result["cpu_seconds"] - sum(watch.seconds.values())
    parts = {f"{part}_cpu_seconds": seconds for part, seconds in watch.seconds.items()}
    return {**result, **parts, "compiled": len(compiled) - len(hits)}


def start_child(model: str, data: Path, cache: Path) -> dict[str, Any]:
    """Runs one start in a process of its own."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    began = time.monotonic()  # the machine's clock, shared by all processes
    command = [sys.executable, __file__, "--child", model, "--data", data, "--cache", cache, "--began", began]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.strip().split("\n")[-1])


def make_row(model: str, cache: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the row of a model: medians of its runs, and the minimum and maximum of the total."""
    row: dict[str, Any] = {"model": model, "cache": cache}
    row |= {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    for name in ("seconds", "cpu_seconds"):
        values = [run[name] for run in runs]
        row |= {f"{name}_minimum": min(values), f"{name}_maximum": max(values)}
    return row


def time_help() -> dict[str, Any]:
    """Times `bert-jax --help`, the median of five."""
    walls, cpus = [], []
    for _ in range(5):
        start, before = time.monotonic(), os.times()
        subprocess.run([sys.executable, "-m", "bert_jax.cli", "--help"], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        walls.append(time.monotonic() - start)
        cpus.append(
            after.children_user + after.children_system - before.children_user - before.children_system
        )  # fmt: skip
    return {
        "command": "`bert-jax --help`", "seconds": statistics.median(walls), "cpu_seconds": statistics.median(cpus),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("BERT_JAX_DATA"), help="default: $BERT_JAX_DATA")
    parser.add_argument("--models", nargs="+", default=["bert_mini", "bert_base"], help="configs of pre-training")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    add_json_argument(parser, "startup")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_child(options)))
        return
    if options.data is None:
        parser.error("--data is missing; set it, or BERT_JAX_DATA, to the folder of corpus/ and vocab/")
    record = Record(options.json, MEASURES)
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        data = prepare(Path(temporary), options.data)
        for number in range(options.repeats):
            for model in options.models:
                for cache in ("cold", "warm"):
                    run = start_child(model, data, Path(temporary) / f"{model}-{number}")
                    runs.setdefault((model, cache), []).append(run)
                    print(json.dumps({"model": model, "cache": cache, **run}), file=sys.stderr, flush=True)
    record.set_table("parts", COLUMNS, [make_row(*key, found) for key, found in runs.items()])
    record.set_table("help", HELP_COLUMNS, [time_help()])
    record.set_values(repeats=options.repeats, batch_size=BATCH, seq_len=SEQ_LEN)
    print(record.render("parts"), record.render("help"), sep="\n\n")


if __name__ == "__main__":
    main()
