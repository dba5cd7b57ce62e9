"""The steps from BERT-Tiny to a ModernBERT of its size, at equal FLOPs: what is each of them worth?

    BERT_JAX_DATA=FOLDER python benchmarks/modernbert_ladder.py [--output runs/ladder] [--jobs 2]

Each row of `configs/studies/modernbert.py` is pre-trained with three seeds on a tenth of the steps of
`reference_cpu.py`, and each model fine-tuned on four tasks of `small_study.py` with one learning rate. A row whose
step takes more model FLOPs has fewer steps. FOLDER is that of `small_study.sh`. Each job runs on a core of its own. All
take hours; finished rows are in the record, and a run that is stopped continues after them, also without its folder. A
row with one seed is a study by itself:

    bert-jax study benchmarks/modernbert_ladder.py --workdir=FOLDER --config.only_rows="('+ rotary',)" ...
"""

import argparse
import importlib.util
import itertools
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import Queue
from types import ModuleType

from bert_jax.configs.studies import modernbert
from bert_jax.model import BertConfig
from bert_jax.studies.study import PERPLEXITY, Cell, Table
from bert_jax.tracking.throughput import training_flops

HERE = Path(__file__).parent
VOCAB_SIZE = 8_192
PHASES = ((800, 64, 32), (1_200, 16, 128))
"""Steps, sequences and tokens of each phase of the first row."""
TASKS = ("STS-B", "SST-2, 2,000 rows", "MRPC", "WNUT-17")
SEEDS = (0, 1, 2)
MEASURES = (
    "bert_jax/model", "bert_jax/training", "bert_jax/finetuning", "configs/studies/modernbert.py",
    "benchmarks/reference_cpu.py", "benchmarks/small_study.py",
)  # fmt: skip
COLUMNS = {"": "{name}"} | {column: f"{{{column}}}" for column in (PERPLEXITY, *TASKS)}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def steps_of_phases(model: BertConfig, mask_rate: float, first: BertConfig) -> list[int]:
    """Returns the steps with as many FLOPs as those of the first row, which predicts 15% of the tokens."""
    return [round(steps * flops(first, tokens, 0.15) / flops(model, tokens, mask_rate)) for steps, _, tokens in PHASES]


def flops(model: BertConfig, tokens: int, mask_rate: float) -> float:
    return training_flops(model, tokens, round(mask_rate * tokens))


def get_config():
    config = modernbert.get_config()
    pretraining = config.pretraining = load("reference_cpu").get_config()
    pretraining.phases = tuple(
        {"steps": steps, "data.path": "", "global_batch_size": sequences} for steps, sequences, _ in PHASES
    )
    sizes = {key: value for key, value in pretraining.model.items() if value is not None}
    first = BertConfig(**sizes | {"vocab_size": VOCAB_SIZE})
    rows = []
    for row in modernbert.rows(first.hidden_size):
        switches = {
            key.removeprefix("model."): value for key, value in row.pretraining.items() if key.startswith("model.")
        }
        steps = steps_of_phases(replace(first, **switches), row.pretraining.get("objective.mask_rate", 0.15), first)
        keys = {f"phases.{number}.steps": count for number, count in enumerate(steps)}
        rows.append(replace(row, pretraining={**row.pretraining, **keys, "total_steps": sum(steps)}))
    config.rows = tuple(rows)
    config.pretraining_seeds = SEEDS
    config.tasks = tuple(
        {**task, "finetuning": {**task["finetuning"], "search.learning_rates": (1e-3,), "search.seeds": (0,)}}
        for task in load("small_study").TASKS if task["name"] in TASKS
    )  # fmt: skip
    pretraining.optimizer.warmup_steps = 200
    return config


def run_row(name: str, seed: int, output: Path, core: int) -> dict:
    """Runs the study of a row with one seed on a core; returns its row of `table.json`."""
    folder = output / "rows" / f"{name}, seed {seed}".replace(" ", "_").replace(",", "")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("a") as log:
        subprocess.run(
            [
                "taskset", "--cpu-list", str(core), "bert-jax", "study", __file__, f"--workdir={folder}",
                f"--config.only_rows=({name!r},)",
                f"--config.pretraining_seeds=({seed},)", f"--config.task_data={output / 'tasks'}",
                f"--config.pretraining.phases.0.data.path={output / 'data32'}",
                f"--config.pretraining.phases.1.data.path={output / 'data128'}",
            ],
            env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=log, stderr=log, check=True,
        )  # fmt: skip
    (row,) = json.loads((folder / "table.json").read_text())["rows"]
    return {"name": name, "seed": seed, "columns": {key: cell["values"] for key, cell in row["columns"].items()}}


def summarize(runs: list[dict]) -> list[dict]:
    """Returns a row of the table for each row whose seeds all have run, with the differences from the first."""
    names = list(modernbert.SWITCHES)
    names = [names[0], *(f"+ {name}" for name in names[1:])]
    columns = list(COLUMNS)[1:]
    found = {(run["name"], run["seed"]): run["columns"] for run in runs}
    cells = {
        (f"{name} {seed}", column): Cell(values)
        for (name, seed), run in found.items() for column, values in run.items()
    }  # fmt: skip
    whole = [name for name in names if all((name, seed) in found for seed in SEEDS)]
    table = Table(
        "", "", columns, [], cells=cells, repeated={name: [f"{name} {seed}" for seed in SEEDS] for name in whole}
    )
    rows = []
    for row in table.over_seeds():
        digits = {column: 2 if column == PERPLEXITY else 1 for column in columns}
        texts = {}
        for column, cell in row["columns"].items():
            texts[column] = f"{cell['mean']:.{digits[column]}f} ± {cell['deviation']:.{digits[column]}f}"
            if "low" in cell:
                texts[column] += " ({difference:+.{d}f}: {low:.{d}f} to {high:.{d}f})".format(**cell, d=digits[column])
        rows.append({"name": row["name"], "columns": row["columns"], **texts})
    return rows


def draw(rows: list[dict], path: Path) -> None:
    """Draws each row's differences from the first one, with their intervals, in a panel for each column."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = list(COLUMNS)[1:]
    figure, panels = plt.subplots(
        1, len(columns), sharey=True, figsize=(13, 1 + 0.35 * len(rows)), layout="constrained"
    )
    for column, panel in zip(columns, panels, strict=True):
        cells = [row["columns"][column] for row in rows[1:]]
        means = [cell["difference"] for cell in cells]
        sides = [[mean - cell["low"], cell["high"] - mean] for mean, cell in zip(means, cells, strict=True)]
        panel.axvline(0, color="0.6", linewidth=1)
        panel.errorbar(means, range(len(cells)), xerr=list(zip(*sides, strict=True)), fmt="o", color="C0", capsize=3)
        panel.set_title(f"{column}{' (lower is better)' if column == PERPLEXITY else ''}", fontsize=10)
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_yticks(range(len(rows) - 1), [row["name"] for row in rows[1:]])
    panels[0].set_ylim(len(rows) - 1.5, -0.5)
    figure.supxlabel(f"difference from {rows[0]['name']}: mean and 95% interval over pre-training seeds", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    from record import Record, add_json_argument  # only as a script: `bert-jax study` reads this file as well

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/ladder"), metavar="FOLDER", help="datasets and runs")
    parser.add_argument("--jobs", type=int, default=2, help="rows at a time, each on one core (default: 2)")
    parser.add_argument(
        "--figure", type=Path, default=HERE.parent / "docs" / "images" / "modernbert_ladder.png", metavar="FILE",
        help="output: the differences as an image, once two rows have all seeds",
    )  # fmt: skip
    add_json_argument(parser, "modernbert_ladder")
    options = parser.parse_args()
    if not (data := os.environ.get("BERT_JAX_DATA")):
        parser.error("BERT_JAX_DATA is not set; set it to the folder of the corpora and tasks")
    output = options.output.absolute()
    for script in ("prepare_english.sh", "prepare_tasks.sh"):
        subprocess.run([HERE / script, data, output], check=True)
    record = Record(options.json, MEASURES, command="python benchmarks/modernbert_ladder.py")
    runs = record.earlier("runs")
    done = {(run["name"], run["seed"]) for run in runs}
    cores: Queue[int] = Queue()
    for core in list(os.sched_getaffinity(0))[: options.jobs]:
        cores.put(core)

    def save() -> None:
        record.set_table("runs", {"row": "{name}", "seed": "{seed}"}, runs)
        rows = summarize(runs)
        record.set_table("ladder", COLUMNS, rows)
        if len(rows) > 1:
            draw(rows, options.figure)

    def run(cell: tuple[str, int]) -> None:
        core = cores.get()
        try:
            found = run_row(*cell, output, core) | record.stamp
        finally:
            cores.put(core)
        runs.append(found)
        save()
        print(found, flush=True)

    names = [row.name for row in get_config().rows]
    cells = [cell for cell in itertools.product(names, SEEDS) if cell not in done]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, cells))
    save()
    print(record.render("ladder"))


if __name__ == "__main__":
    main()
