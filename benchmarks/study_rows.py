"""Runs the rows of a study one by one, each pre-training seed a process on a core of its own, into a record.

`modernbert_ladder.py` and `recipe_trials.py` are such studies. Finished rows are in the record, and a run that is
stopped continues after them, also without its folder. A row with one seed is a study by itself:

    PYTHONPATH=benchmarks bert-jax study benchmarks/modernbert_ladder.py:FOLDER --workdir=FOLDER/row \\
      --config.task_data=FOLDER/tasks --config.only_rows="('+ rotary',)" --config.pretraining_seeds="(0,)"
"""

import itertools
import json
import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import Any

import reference_cpu
import small_study
from ml_collections import ConfigDict
from processes import data_folder, python_path
from record import Record, make_parser

from bert_jax.config_keys import PretrainConfig
from bert_jax.model import BertConfig
from bert_jax.sections import to_dict, with_values
from bert_jax.studies.study import PERPLEXITY, Cell, Table
from bert_jax.tracking.throughput import training_flops

HERE = Path(__file__).parent
VOCAB_SIZE = 8_192
SEEDS = (0, 1, 2)
LOSS = "MLM loss"
MEASURES = (
    "bert_jax/model", "bert_jax/training", "bert_jax/finetuning", "benchmarks/reference_cpu.py",
    "benchmarks/small_study.py", "benchmarks/study_rows.py",
)  # fmt: skip


def flops_per_token(config: PretrainConfig, tokens: int) -> float:
    """Returns the model FLOPs of a step per token, in sequences of `tokens`."""
    model = BertConfig(**{**to_dict(config.model), "vocab_size": VOCAB_SIZE})
    predictions = tokens if config.objective.lm == "ltr" else round(config.objective.mask_rate * tokens)
    return training_flops(model, tokens, predictions) / tokens


def phases(
    config: PretrainConfig, first: PretrainConfig, folder: str, stages: Sequence[tuple[int, int, int]], *,
    clm: float = 0, lengths: bool = True, pairs: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Returns the keys that give `config` the FLOPs of the first row, in its phases, with the datasets in `folder`.

    Args:
      stages: steps, sequences and tokens of each phase of the first row.
      clm: share of the FLOPs, the first ones, that go into predicting the next token.
      lengths: False: all sequences have the tokens of the last phase.
      pairs: kind of the sentence pairs, if not next sentences.
    """
    budgets = [steps * rows * tokens * flops_per_token(first, tokens) for steps, rows, tokens in stages]
    if not lengths:
        budgets = [0.0] * (len(stages) - 1) + [sum(budgets)]
    left, made = clm * sum(budgets), []
    causal = {"objective.lm": "ltr", "objective.nsp": False}
    for budget, (_, rows, tokens) in zip(budgets, stages, strict=True):
        begin = min(left, budget)
        left -= begin
        for flops, keys in ((begin, causal), (budget - begin, {})):
            steps = round(flops / (rows * tokens * flops_per_token(with_values(config, keys), tokens)))
            path = f"{folder}/data{tokens}{pairs}"
            made += [{"steps": steps, "data.path": path, "global_batch_size": rows, **keys}] * (steps > 0)
    return {"phases": tuple(made), "total_steps": sum(phase["steps"] for phase in made)}


def pretraining() -> ConfigDict:
    """Returns the config of pre-training that rows change."""
    config = reference_cpu.get_config()
    config.optimizer.warmup_steps = 200
    return config


def tasks(names: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """Returns tasks of `small_study.py` with one learning rate and one seed: those of pre-training are what repeats."""
    once = {"search.learning_rates": (1e-3,), "search.seeds": (0,)}
    found = [task for task in small_study.TASKS if task["name"] in names]
    return tuple({**task, "finetuning": {**task["finetuning"], **once}} for task in found)


def run_row(script: Path, name: str, seed: int, output: Path, core: int) -> dict[str, Any]:
    """Runs the study of a row with one seed on a core; returns its row of `table.json`."""
    folder = output / "rows" / f"{name}, seed {seed}".replace(" ", "_").replace(",", "")
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": python_path()}
    with (folder / "log").open("a") as log:
        subprocess.run(
            [
                "taskset", "--cpu-list", str(core), "bert-jax", "study", f"{script}:{output}", f"--workdir={folder}",
                f"--config.only_rows=({name!r},)", f"--config.pretraining_seeds=({seed},)",
                f"--config.task_data={output / 'tasks'}",
            ],
            env=environment, stdout=log, stderr=log, check=True,
        )  # fmt: skip
    (row,) = json.loads((folder / "table.json").read_text())["rows"]
    return {"name": name, "seed": seed, "columns": {key: cell["values"] for key, cell in row["columns"].items()}}


def in_nats(columns: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Returns the scores with the logarithms of perplexities, the MLM losses, whose differences add up."""
    scores = {name: list(values) for name, values in columns.items()}
    return {LOSS: [math.log(value) for value in scores.pop(PERPLEXITY)], **scores}


def summarize(names: Sequence[str], runs: Sequence[Mapping[str, Any]], *, steps: bool) -> list[dict[str, Any]]:
    """Returns a row of the table for each of `names` whose seeds all have run, with the differences from the first.

    With `steps` the texts have the differences from the row above.
    """
    found = {(run["name"], run["seed"]): in_nats(run["columns"]) for run in runs}
    whole = [name for name in names if all((name, seed) in found for seed in SEEDS)]
    columns = list(next(iter(found.values()), {}))
    cells = {
        (f"{name} {seed}", column): Cell(values)
        for (name, seed), run in found.items() for column, values in run.items()
    }  # fmt: skip

    def compare(*names: str) -> list[dict[str, Any]]:
        repeated = {name: [f"{name} {seed}" for seed in SEEDS] for name in names}
        return Table("", "", columns, [], cells=cells, repeated=repeated).over_seeds()

    rows = []
    for number, row in enumerate(compare(*whole)):
        shown = compare(whole[number - 1], row["name"])[1] if steps and number else row
        texts = {}
        for column, cell in shown["columns"].items():
            digits = 3 if column == LOSS else 1
            texts[column] = f"{cell['mean']:.{digits}f} ± {cell['deviation']:.{digits}f}"
            if "low" in cell:
                texts[column] += " ({difference:+.{d}f}: {low:.{d}f} to {high:.{d}f})".format(**cell, d=digits)
        rows.append({"name": row["name"], "columns": row["columns"], **texts})
    return rows


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws each row's differences from the first one, with their intervals, in a panel for each column."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = list(rows[0]["columns"])
    figure, panels = plt.subplots(
        1, len(columns), sharey=True, figsize=(13, 1 + 0.35 * len(rows)), layout="constrained"
    )
    for column, panel in zip(columns, panels, strict=True):
        cells = [row["columns"][column] for row in rows[1:]]
        means = [cell["difference"] for cell in cells]
        sides = [[mean - cell["low"], cell["high"] - mean] for mean, cell in zip(means, cells, strict=True)]
        panel.axvline(0, color="0.6", linewidth=1)
        panel.errorbar(means, range(len(cells)), xerr=list(zip(*sides, strict=True)), fmt="o", color="C0", capsize=3)
        panel.set_title(f"{column}{', nats (lower is better)' if column == LOSS else ''}", fontsize=10)
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_yticks(range(len(rows) - 1), [row["name"] for row in rows[1:]])
    panels[0].set_ylim(len(rows) - 1.5, -0.5)
    figure.supxlabel(f"difference from {rows[0]['name']}: mean and 95% interval over pre-training seeds", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(file: str, description: str, config: ConfigDict, measures: Sequence[str] = (), *, steps: bool = False) -> None:
    """Runs the rows of the config of `file` with all seeds; with `steps` a row has the changes of those above it."""
    names, columns = [row.name for row in config.rows], [LOSS, *(task["name"] for task in config.tasks)]
    path = Path(file).resolve()
    parser = make_parser(description, path.stem)
    parser.add_argument("--output", type=Path, default=Path("runs/ladder"), metavar="FOLDER", help="datasets and runs")
    parser.add_argument("--jobs", type=int, default=2, help="rows at a time, each on one core (default: 2)")
    parser.add_argument(
        "--figure", type=Path, default=HERE.parent / "docs" / "images" / f"{path.stem}.png", metavar="FILE",
        help="output: the differences as an image, once two rows have all seeds",
    )  # fmt: skip
    options = parser.parse_args()
    data = data_folder()
    output = options.output.absolute()
    for command in ("prepare_english.sh", "prepare_english.sh sop", "prepare_tasks.sh"):
        script, *pairs = command.split()
        if not pairs or f"-{pairs[0]}" in str(config.rows):
            subprocess.run([HERE / script, data, output, *pairs], check=True)
    record = Record(options.json, (*MEASURES, *measures), command=f"python benchmarks/{path.name}")
    runs = record.earlier("runs")
    done = {(run["name"], run["seed"]) for run in runs}
    cores: Queue[int] = Queue()
    saving = Lock()  # two rows may end at once
    for core in list(os.sched_getaffinity(0))[: options.jobs]:
        cores.put(core)

    def save() -> None:
        record.set_table("runs", {"row": "{name}", "seed": "{seed}"}, runs)
        rows = summarize(names, runs, steps=steps)
        record.set_table("ladder", {"": "{name}"} | {column: f"{{{column}}}" for column in columns}, rows)
        if len(rows) > 1:
            draw(rows, options.figure)

    def run(cell: tuple[str, int]) -> None:
        core = cores.get()
        try:
            found = run_row(path, *cell, output, core) | record.stamp
        finally:
            cores.put(core)
        with saving:
            runs.append(found)
            save()
        print(found, flush=True)

    cells = [cell for cell in itertools.product(names, SEEDS) if cell not in done]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, cells))
    save()
    print(record.render("ladder"))
