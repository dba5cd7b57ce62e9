"""Measures the parts of a run's start, from the command to the end of its first step, cold and warm.

    BERT_JAX_DATA=FOLDER python benchmarks/startup.py [--models bert_mini bert_base] [--repeats 3]

FOLDER holds vocab/bert-base-uncased-vocab.txt and corpus/sample_text.txt, which is prepared once. A run of small
batches is started in a process of its own. Cold runs have an empty cache of programs, warm ones that of the cold
run. Cold and warm runs of all models take turns. Wall time grows with other work on the machine, CPU time hardly does:
parts are CPU seconds of the process, all threads included, while its main thread was in the part.
"""

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from processes import bert_jax, call, data_folder, prepare_dataset
from record import Record, make_parser, spread, with_range

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
    "all, CPU s": with_range("cpu_seconds", ".1f"),
    "wall, s": with_range("seconds", ".1f"),
    "programs compiled": "{compiled}",
}
HELP_COLUMNS = {"command": "{command}", "s": "{seconds:.2f}", "CPU s": "{cpu_seconds:.2f}"}


class StartedError(Exception):
    """Ends a run after its first step."""


class Stopwatch:
    """Adds up the CPU seconds of the parts of a run, by wrapping the functions that do them."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._inside = False

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


def start_run(model: str, data: str, cache: str, began: float) -> dict[str, Any]:
    """Runs `pretrain` in this process, which began then, until its first step is done, and returns its parts."""
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
        setattr(owner, name, watch.timed(getattr(owner, name), part))
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
            result.update(seconds=time.monotonic() - began, cpu_seconds=time.process_time())
            raise StartedError

    run_steps = loop.run_steps

    def timed_steps(run: Any, steps: Any, state: Any, hooks: Any) -> Any:
        start = time.process_time()
        try:
            return run_steps(run, steps, state, [FirstStep(), *hooks])
        finally:
            watch.seconds["step"] = result["cpu_seconds"] - start

    vars(pretrain)["run_steps"] = timed_steps
    settings = {
        "data.path": data, "total_steps": 1, "global_batch_size": BATCH, "optimizer.warmup_steps": 0,
        "eval_batches": 0, "compilation_cache": cache, "log_every_steps": 1,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as workdir, suppress(StartedError):
        pretrain.pretrain(load_config(model, settings), workdir)
    watch.seconds["rest"] = result["cpu_seconds"] - sum(watch.seconds.values())
    parts = {f"{part}_cpu_seconds": seconds for part, seconds in watch.seconds.items()}
    return {**result, **parts, "compiled": len(compiled) - len(hits)}


def make_row(model: str, cache: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the row of a model: medians of its runs, and the range of the total."""
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    totals = (spread(name, [run[name] for run in runs]) for name in ("seconds", "cpu_seconds"))
    return {"model": model, "cache": cache} | medians | next(totals) | next(totals)


def time_help() -> dict[str, Any]:
    """Times `bert-jax --help`, the median of five."""
    walls, cpus = [], []
    for _ in range(5):
        start, before = time.monotonic(), os.times()
        bert_jax("--help")
        after = os.times()
        walls.append(time.monotonic() - start)
        cpus.append(sum(after[2:4]) - sum(before[2:4]))  # user and system time of child processes
    wall, cpu = statistics.median(walls), statistics.median(cpus)
    return {"command": "`bert-jax --help`", "seconds": wall, "cpu_seconds": cpu}


def main() -> None:
    parser = make_parser(__doc__, "startup")
    parser.add_argument("--models", nargs="+", default=["bert_mini", "bert_base"], help="configs of pre-training")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    record, source = Record(options.json, MEASURES), data_folder()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = prepare_dataset(
            Path(folder), source / "corpus" / "sample_text.txt",
            ("--from", source / "vocab" / "bert-base-uncased-vocab.txt"),
            "--seq_len", SEQ_LEN, "--dupe_factor", 1, "--eval_fraction", 0.1,
        )  # fmt: skip
        for number, model, cache in itertools.product(range(options.repeats), options.models, ("cold", "warm")):
            began = time.monotonic()  # the machine's clock, shared by all processes
            run = call(start_run, model, data, f"{folder}/{model}-{number}", began)
            runs.setdefault((model, cache), []).append(run)
            print(json.dumps({"model": model, "cache": cache, **run}), file=sys.stderr, flush=True)
    record.set_table("parts", COLUMNS, [make_row(*key, found) for key, found in runs.items()])
    record.set_table("help", HELP_COLUMNS, [time_help()])
    record.set_values(repeats=options.repeats, batch_size=BATCH, seq_len=SEQ_LEN)
    print(record.render("parts"), record.render("help"), sep="\n\n")


if __name__ == "__main__":
    main()
