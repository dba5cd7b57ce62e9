"""Measures what a core-hour buys: loss and fine-tuned scores of the long run's milestones.

    python benchmarks/long_run_scores.py --output runs/long --tasks FOLDER

OUTPUT is that of `long_run.sh`, which may still run, and FOLDER that of `prepare_tasks.sh`. Each milestone at the peak
rate is a row; the first one, of step 0, is untrained. All have the same search, with five seeds: STS-B, and once a run
has ended, its first and its last step, rows of a table of their own, also SST-2 and MRPC. What is in the record is
kept, also if the run has gone: a run that starts anew repeats it.

Core-hours are those of the training steps, by the median time of a step in each phase: a run that is paused now and
then costs no more for it.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath
from processes import bert_jax
from record import Record, cell, make_parser

from bert_jax.config_keys import PretrainConfig, StudyRow
from bert_jax.configs.studies import default
from bert_jax.sections import from_mapping
from bert_jax.tracking.metrics import read_metrics
from bert_jax.training.phases import plan_phases

ALWAYS, ENDS = ("STS-B",), ("SST-2", "MRPC")
LENGTHS = (32, 128)
"""Tokens of a row, by phase."""
FINE_TUNING = {
    "optimizer.bias_correction": True, "optimizer.learning_rate": 3e-4, "num_epochs": 5, "data.sort_window": 16,
    "task.max_seq_len": 128, "checkpoint.every_steps": 100_000, "search.seeds": (0, 1, 2, 3, 4),
}  # fmt: skip
NO_DROPOUT = {"model.hidden_dropout_prob": 0.0, "model.attention_probs_dropout_prob": 0.0}  # MRPC is too small for it
TASKS = tuple(
    {
        "name": name, "config": f"finetune/glue:{config}", "columns": {name: measure},
        "finetuning": {**FINE_TUNING, "data.path": f"glue/{name}", **settings},
    }
    for name, config, measure, settings in (
        ("STS-B", "stsb", "dev/spearman", NO_DROPOUT),
        ("SST-2", "sst2", "dev/accuracy", {**NO_DROPOUT, "num_epochs": 1}),
        ("MRPC", "mrpc", "dev/f1", {}),
    )
)  # fmt: skip
MEASURES = ("bert_jax/model", "bert_jax/training", "bert_jax/finetuning", "benchmarks/long_run.py")
COLUMNS = {
    "million tokens": "{million_tokens:.0f}",
    "core-hours": "{core_hours:.1f}",
    "MLM loss, 32 tokens": "{mlm_loss_32:.3f}",
    "NSP accuracy": "{nsp_accuracy_32:.1%}",
    **{task: f"{{{task}_mean:.1f}} ± {{{task}_deviation:.1f}}" for task in ALWAYS},
}
COLUMNS_OF_ENDS = {
    **COLUMNS,
    "MLM loss, 128 tokens": "{mlm_loss_128:.3f}",
    **{task: f"{{{task}_mean:.1f}} ± {{{task}_deviation:.1f}}" for task in ENDS},
}


def read_config(run: Path) -> PretrainConfig:
    return from_mapping(PretrainConfig, json.loads((run / "config.json").read_text(encoding="utf-8")))


def milestones(run: Path) -> list[int]:
    """Returns the steps of the milestones that a run has on disk, and of its end."""
    config = read_config(run)
    steps = sorted(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdecimal())
    return [step for step in steps if config.checkpoint.is_milestone(step) or step == config.total_steps]


def get_config(folder: str = ""):
    config = default.get_config()
    run = Path(folder) / "run"
    steps = milestones(run) if folder else []
    has_ended = bool(steps) and steps[-1] == read_config(run).total_steps
    config.title = "The long run"
    config.rows = tuple(
        StudyRow(
            f"step {step}", checkpoint=str(run / "checkpoints" / str(step)),
            tasks=ALWAYS + ENDS * (has_ended and step in (steps[0], steps[-1])),
        )
        for step in steps
    )  # fmt: skip
    config.tasks = TASKS
    return config


def cost(metrics: Sequence[dict[str, Any]], config: PretrainConfig, step: int) -> dict[str, float]:
    """Returns the tokens, and the hours of training, that `step` steps took."""
    seconds = 0.0
    for plan in plan_phases(config):
        rows = [row for row in metrics if plan.start < row["step"] <= plan.stop]
        if times := [row["step_seconds"] for row in rows if "step_seconds" in row]:
            seconds += statistics.median(times) * max(0, min(step, plan.stop) - plan.start)
    seen = [row["tokens_seen"] for row in metrics if row["step"] <= step and "tokens_seen" in row]
    return {"million_tokens": max(seen, default=0) / 1e6, "hours": seconds / 3600}


def evaluate(output: Path, step: int, length: int) -> dict[str, float]:
    checkpoint = output / "run" / "checkpoints" / str(step)
    scores = json.loads(bert_jax("evaluate", "--checkpoint", checkpoint, "--data", output / f"data{length}"))
    names = ("mlm_loss", "mlm_accuracy", "nsp_accuracy")  # the last one with next sentences only
    return {f"{name}_{length}": scores[name] for name in names if name in scores}


def draw(
    rows: Iterable[dict[str, Any]], ends: Iterable[dict[str, Any]],
    curves: Mapping[int, Sequence[tuple[float, float]]], path: Path,
) -> None:  # fmt: skip
    """Draws the loss of the run's own evaluations, `curves` by tokens of a row, and STS-B, by core-hours."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (losses, scores) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for length, curve in curves.items():
        if curve:
            losses.plot([at for at, _ in curve], [loss for _, loss in curve], label=f"sequences of {length}")
    losses.set_title("held-out MLM loss, nats", fontsize=10)
    losses.legend(frameon=False)
    for label, drawn, form in (("at the peak rate", rows, "o-"), ("of the run that ended", ends, "o")):
        for task in ALWAYS:
            columns = ("core_hours", f"{task}_mean", f"{task}_deviation")
            if points := [[row[key] for key in columns] for row in drawn]:
                hours, means, deviations = zip(*points, strict=True)
                scores.errorbar(hours, means, yerr=deviations, fmt=form, capsize=3, label=label)
            scores.set_title(f"{task} on the dev set, with the deviation over seeds", fontsize=10)
    scores.legend(frameon=False)
    for panel in (losses, scores):
        panel.set_xlabel("core-hours of pre-training", fontsize=10)
        panel.set_xlim(left=0)
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = make_parser(__doc__, "long_run")
    parser.add_argument("--output", type=Path, default=Path("runs/long"), metavar="FOLDER", help="that of long_run.sh")
    parser.add_argument("--tasks", type=Path, required=True, metavar="FOLDER", help="that of prepare_tasks.sh")
    parser.add_argument("--cores", type=int, default=2, help="cores that the run had (default: 2)")
    parser.add_argument("--figure", type=Path, default=Path("docs/images/long_run.png"), help="output: the curves")
    parser.add_argument(
        "--only_tasks", nargs="+", default=(), metavar="TASK", help="those of new rows, such as STS-B (default: all)"
    )
    options = parser.parse_args()
    output = options.output.absolute()
    run, study = output / "run", output / "study"
    config, metrics = read_config(run), read_metrics(epath.Path(run))
    record = Record(options.json, MEASURES)
    tables = {name: {row["step"]: row for row in record.earlier(name)} for name in ("milestones", "ends")}
    found, tasks = milestones(run), options.tasks.absolute()
    ends = {found[0], found[-1]} if found[-1] == config.total_steps else set()
    wanted = [step for step in found if step not in (tables["ends"] if step in ends else tables["milestones"])]
    scores = {}
    if wanted:
        names = tuple(f"step {step}" for step in wanted)
        bert_jax(
            "study", f"{Path(__file__).absolute()}:{output}", f"--workdir={study}", f"--config.task_data={tasks}",
            f"--config.only_rows={names}", f"--config.only_tasks={tuple(options.only_tasks)}",
        )  # fmt: skip
        scores = {row["name"]: row["columns"] for row in json.loads((study / "table.json").read_text())["rows"]}
    for step in wanted:
        row, passed = record.stamp | {"step": step}, cost(metrics, config, step)
        for length in LENGTHS if step in ends else LENGTHS[:1]:
            row |= evaluate(output, step, length)
        row |= {"million_tokens": passed["million_tokens"], "core_hours": options.cores * passed["hours"]}
        scored = {task: score for task, score in scores[f"step {step}"].items() if score.get("values")}
        for task, score in scored.items():
            row |= {f"{task}_mean": score["mean"], f"{task}_deviation": score["deviation"], task: score["values"]}
        tables["ends" if step in ends else "milestones"][step] = row
    for name, columns in (("milestones", COLUMNS), ("ends", COLUMNS_OF_ENDS)):
        if rows := [row for _, row in sorted(tables[name].items())]:  # a shorter run has no milestone but its ends
            filled = {head: form for head, form in columns.items() if any(cell(form, row) for row in rows)}
            record.set_table(name, filled, rows)
    evaluations = [row for row in metrics if row.get("split") == "eval"]
    curves = {
        length: [
            (options.cores * cost(metrics, config, row["step"])["hours"], row["mlm_loss"])
            for row in evaluations if plan.start < row["step"] <= plan.stop
        ]
        for length, plan in zip(LENGTHS, plan_phases(config), strict=True)
    }  # fmt: skip
    draw(tables["milestones"].values(), tables["ends"].values(), curves, options.figure)
    print(*map(record.render, record.content["tables"]), sep="\n\n")


if __name__ == "__main__":
    main()
