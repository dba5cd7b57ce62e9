"""A study: many runs, one table. Each row is an encoder, each column a score of a task that it is fine-tuned on.

    bert-jax study configs/studies/table5.py --workdir=runs/table5 \\
      --config.pretraining.data.path=DATASET --config.task_data=FOLDER --config.finetuning.num_epochs=3

`config_keys.py` has the types of rows and tasks. Every run has its own workdir inside the study's and resumes from its
checkpoint, so that the same command resumes a stopped study:

WORKDIR/pretraining/ROW                    pre-training of the first row with these settings
WORKDIR/finetuning/ROW/TASK/lr-R-seed-S    a trial of the search of one cell
WORKDIR/table.md, table.json               results so far, written after each pre-training and each cell
"""

import json
import logging
import math
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from etils import epath

from bert_jax.config import load_config, with_overrides
from bert_jax.config_keys import FinetuneConfig, PretrainConfig, StudyConfig, StudyRow, StudyTask
from bert_jax.errors import InputError, prefixed
from bert_jax.files import atomic, remote
from bert_jax.files.atomic import write_json
from bert_jax.finetuning.fine_tuned import read_task
from bert_jax.finetuning.finetune import SEARCH_FILE, planned_runs, search
from bert_jax.finetuning.run import model_of
from bert_jax.parallel.mesh import make_mesh
from bert_jax.progress import Bars, silent
from bert_jax.runtime.interpreter import StopSignal
from bert_jax.runtime.processes import is_first
from bert_jax.sections import to_dict, with_values
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.tracking.metrics import read_metrics
from bert_jax.training.checkpoints import open_checkpoint
from bert_jax.training.initialization import fill_in_from_checkpoint, open_init
from bert_jax.training.phases import open_phases
from bert_jax.training.pretrain import pretrain
from bert_jax.training.run import claim_workdir, workdir_path

log = logging.getLogger(__name__)

PERPLEXITY = "perplexity"
"""The name of the perplexity column."""


@dataclass(frozen=True)
class PlannedRow:
    """A row of the table.

    Attributes:
      keys: the row as the config has it.
      pretraining: the config of its encoder; None for a given checkpoint.
      encoder: the given checkpoint, or the workdir of the pre-training, which rows with one config share.
      finetuning: the config of each of its tasks.
      tokenizer: the encoder's.
    """

    keys: StudyRow
    pretraining: PretrainConfig | None
    encoder: str
    finetuning: Sequence[tuple[StudyTask, FinetuneConfig]]
    tokenizer: Tokenizer


# --- Checks, before any run -------------------------------------------------------------------------------------------


def plan_rows(config: StudyConfig, folder: epath.Path) -> list[PlannedRow]:
    """Returns the rows of a study in the workdir `folder`, with the configs of all runs.

    Raises InputError for unknown names, invalid values, missing datasets and missing folders of tasks, and as a
    pre-training does before its first step.
    """
    if not config.rows or not config.tasks:
        raise InputError("rows, tasks: expected a tuple of StudyRow and one of StudyTask; got none")
    rows, tasks = _only("rows", config.rows, config.only_rows), _only("tasks", config.tasks, config.only_tasks)
    _refuse_duplicates("pretraining_seeds", list(map(str, config.pretraining_seeds)))
    _refuse_duplicates("columns of tasks", [column for task in config.tasks for column in task.columns])
    encoders: dict[str, str] = {}  # the folder of the first row with a config of pre-training
    planned = []
    for row in config.rows:
        if unknown := set(row.tasks) - {task.name for task in config.tasks}:
            known = ", ".join(task.name for task in config.tasks)
            raise InputError(f"row {row.name!r}: tasks: unknown task {min(unknown)!r}; expected {known}")
        with prefixed(f"row {row.name!r}"):
            pretraining = None
            encoder = to_dict(config.checkpoints).get(row.checkpoint, row.checkpoint)
            if row.checkpoint and row.pretraining is not None:
                raise InputError(f"checkpoint={row.checkpoint!r}: the row has pretraining, too; set one of the two")
            for keys in _repeat(row, config.pretraining_seeds):
                if not keys.checkpoint:
                    pretraining = with_overrides(config.pretraining, keys.pretraining or {})
                    own = str(folder / "pretraining" / _slug(keys.name))
                    encoder = encoders.setdefault(json.dumps(to_dict(pretraining)), own)
                if row in rows:
                    planned.append(_plan_row(config, keys, pretraining, encoder, tasks))
    return planned


def _repeat(row: StudyRow, seeds: Sequence[int]) -> list[StudyRow]:
    """Returns a row for each seed of pre-training; the row itself if there are none, and for a given checkpoint."""
    if not seeds or row.checkpoint:
        return [row]
    if "seed" in (row.pretraining or {}):
        raise InputError("pretraining.seed: has no effect; set pretraining_seeds")
    return [
        replace(row, name=_name_of_seed(row.name, seed), pretraining={**(row.pretraining or {}), "seed": seed})
        for seed in seeds
    ]


def _name_of_seed(name: str, seed: int) -> str:
    return f"{name}, seed {seed}"


def _plan_row(
    config: StudyConfig, row: StudyRow, pretraining: PretrainConfig | None, encoder: str, tasks: Sequence[StudyTask]
) -> PlannedRow:
    if pretraining is None:
        if not encoder:
            raise InputError(f"set checkpoints.{row.checkpoint}=CHECKPOINT, or skip the row with only_rows")
        found = open_checkpoint(encoder)
        sizes, tokenizer = found.bert_config, found.tokenizer
    else:
        if not pretraining.data.path and not pretraining.phases:
            raise InputError("pretraining.data.path=: expected the output of `bert-jax prepare`")
        place = epath.Path(encoder)
        phases = open_phases(fill_in_from_checkpoint(pretraining, place), make_mesh(pretraining.mesh))
        if claim_workdir(place, phases) is None and pretraining.init:
            open_init(phases)
        sizes, tokenizer = phases[0].model, phases[0].datasets[0].tokenizer
    finetuning = []
    for task in tasks:
        if row.tasks and task.name not in row.tasks:
            continue
        with prefixed(f"task {task.name!r}"):
            tuned = _finetuning(config, row, task, encoder)
            model_of(tuned, sizes, make_mesh(tuned.mesh))
            if not remote.exists(remote.parse_path(tuned.data.path)):
                raise InputError(f"{tuned.data.path} not found; set its folder with task_data=FOLDER")
        finetuning.append((task, tuned))
    return PlannedRow(row, pretraining, encoder, finetuning, tokenizer)


def _finetuning(config: StudyConfig, row: StudyRow, task: StudyTask, encoder: str) -> FinetuneConfig:
    """Returns the config of a cell. Precedence, lowest first: config, task, row, keys of every task."""
    keys = {**task.finetuning, **row.finetuning, **config.finetuning}
    tuned = load_config(row.config or task.config, keys, kind=FinetuneConfig)
    path = tuned.data.path
    if config.task_data and not remote.is_remote(path):
        path = os.path.join(config.task_data, path)
    tuned = with_values(tuned, {"data.path": path, "init": encoder})
    for key, name in (("optimizer.learning_rate", "learning_rates"), ("seed", "seeds")):
        if getattr(tuned.search, name) and key in {**row.finetuning, **config.finetuning}:
            raise InputError(f"finetuning.{key}: has no effect; set finetuning.search.{name}")
    planned_runs(tuned)
    return tuned


def _read_tasks(rows: Sequence[PlannedRow], folder: epath.Path) -> None:
    """Reads each task of unfinished cells once.

    Raises InputError for unreadable files, a task without a dev file, and a column of another score.
    """
    read = set()
    for row in rows:
        for task, config in row.finetuning:
            key = (task.name, config.data.path, config.task)
            if key in read or remote.exists(_cell_folder(folder, row, task) / SEARCH_FILE):
                continue
            read.add(key)
            with prefixed(f"task {task.name!r}"):
                found, _, others = read_task(config, row.tokenizer, needs_scores=True)
                splits = [split.name for split in others if split.is_labelled]
                known = [f"{split}/{metric}" for split in splits for metric in found.metrics]
                for column, score in task.columns.items():
                    if score and score not in known and f"{splits[0]}{score}" not in known:
                        raise InputError(
                            f"columns: {column!r} has the unknown score {score!r}; expected one of {', '.join(known)}"
                        )


# --- The table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """The scores of one row in one column: one value per restart (seed)."""

    values: Sequence[float]
    seeds: Sequence[str] = ()
    learning_rate: float | None = None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """The standard deviation over restarts; None for a single restart."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass
class Table:
    """The results of a study so far; `cells` are by row and column, `paper` by row.

    `repeated` has the rows of each row of the config that is pre-trained with several seeds, in the order of the seeds.
    """

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[str]
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    repeated: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def over_seeds(self) -> list[dict[str, Any]]:
        """Returns the rows of `repeated` with the columns of which all seeds have a cell.

        Each has the mean over seeds of pre-training of the means over restarts, its standard deviation, and the
        `paired_interval` of its difference from the first row, which takes two seeds.
        """
        rows: list[dict[str, Any]] = []
        first: dict[str, list[float]] = {}
        for name, members in self.repeated.items():
            columns = {}
            for column in self.columns:
                cells = [self.cells[row, column] for row in members if (row, column) in self.cells]
                if len(cells) < len(members):
                    continue
                means = [cell.mean for cell in cells]
                deviation = statistics.stdev(means) if len(means) > 1 else None
                columns[column] = {"mean": statistics.fmean(means), "deviation": deviation}
                if rows and column in first and len(means) > 1:
                    bounds = paired_interval(means, first[column])
                    columns[column] |= dict(zip(("difference", "low", "high"), bounds, strict=True))
                elif not rows:
                    first[column] = means
            rows.append({"name": name, "columns": columns})
        return rows

    def as_json(self) -> dict[str, Any]:
        """Returns version, title, note, columns and `rows`: the scores of each cell, and the paper's."""
        rows = []
        for row in self.rows:
            columns = {}
            for column in self.columns:
                cell = self.cells.get((row, column))
                scores = {"mean": cell.mean, "deviation": cell.deviation, **asdict(cell)} if cell else {}
                columns[column] = {**scores, "paper": self.paper.get(row, {}).get(column)}
            rows.append({"name": row, "columns": columns})
        return {
            "format_version": 1, "title": self.title, "note": self.note, "columns": list(self.columns),
            "rows": rows, "over_seeds": self.over_seeds(),
        }  # fmt: skip


def paired_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Returns the mean difference of two rows, and the bounds of its 95% interval by Student's t.

    Both have a value for each of the same seeds, of which there are at least two. A bootstrap over as few as three
    seeds would give the least and the greatest difference, which hold the true one in three cases of four.
    """
    from scipy import stats  # takes half a second

    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    mean, count = statistics.fmean(differences), len(differences)
    half = float(stats.t.ppf(0.975, count - 1)) * statistics.stdev(differences) / math.sqrt(count)
    return mean, mean - half, mean + half


def render(table: Table) -> str:
    """Renders the table as Markdown: means, standard deviations, and the paper's numbers."""
    heads, lines = [""], [[row] for row in table.rows]
    for column in table.columns:
        digits = 2 if column == PERPLEXITY else 1
        papers = {row: numbers[column] for row, numbers in table.paper.items() if column in numbers}
        heads += [column, "paper"] if papers else [column]
        for line, row in zip(lines, table.rows, strict=True):
            cell = table.cells.get((row, column))
            numbers = [number for number in (cell.mean, cell.deviation) if number is not None] if cell else []
            line.append(" ± ".join(f"{number:.{digits}f}" for number in numbers))
            line += [f"{papers[row]:.{digits}f}" if row in papers else ""] if papers else []
    parts = [
        f"# {table.title}" if table.title else "# Study",
        "Mean ± standard deviation over restarts of fine-tuning, at the learning rate with the best median.",
        *([table.note] if table.note else []),
        _markdown(heads, lines),
    ]
    if table.repeated:
        parts += [
            "Mean ± standard deviation over seeds of pre-training; in brackets the difference from the first row, and "
            "its 95% interval by Student's t over pairs of seeds.",
            _markdown(["", *table.columns], [[row["name"], *_over_seeds(table, row)] for row in table.over_seeds()]),
        ]
    return "\n\n".join(parts) + "\n"


def _over_seeds(table: Table, row: Mapping[str, Any]) -> Iterator[str]:
    for column in table.columns:
        numbers = {key: f"{value:.{2 if column == PERPLEXITY else 1}f}" for key, value in
                   row["columns"].get(column, {}).items() if value is not None}  # fmt: skip
        text = " ± ".join(numbers[key] for key in ("mean", "deviation") if key in numbers)
        yield text + (" ({difference}: {low} to {high})".format(**numbers) if "low" in numbers else "")


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    cells = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |" for line in cells)


# --- Runs -------------------------------------------------------------------------------------------------------------


def study(config: StudyConfig, workdir: str, *, stop: StopSignal | None = None, bars: Bars = silent) -> Table:
    """Runs every unfinished run of a study in `workdir`, and writes and returns the table.

    Args:
      config: the study.
      workdir: the study's workdir.
      stop: an active `StopSignal`; by default one is active during this call.
      bars: creates the progress bars of each run.

    Raises:
      InputError: unknown keys or names, invalid values, missing files, columns and labels: before any run.

    Otherwise raises as `pretrain` and `finetune` do; finished runs are kept.
    """
    folder = workdir_path(workdir)
    rows = plan_rows(config, folder)
    tuned_on = {task.name for row in rows for task, _ in row.finetuning}
    columns = [column for task in config.tasks if task.name in tuned_on for column in task.columns]
    table = Table(
        config.title, config.note, [*([PERPLEXITY] if config.perplexity else []), *columns],
        [row.keys.name for row in rows], {row.keys.name: row.keys.paper for row in rows},
        repeated={row.name: [_name_of_seed(row.name, seed) for seed in config.pretraining_seeds] for row in config.rows
                  if config.pretraining_seeds and not row.checkpoint and row.name in (config.only_rows or (row.name,))},
    )  # fmt: skip

    def write() -> None:
        if is_first():
            atomic.write_whole(folder / "table.md", render(table).encode())
            write_json(folder / "table.json", table.as_json())

    with ExitStack() as stack:
        stop = stop or stack.enter_context(StopSignal())
        if is_first():
            atomic.make_folder(folder)
        _read_tasks(rows, folder)
        for row in rows:
            name = row.keys.name
            if row.pretraining is not None:
                log.info("Pre-training row %r", name)
                pretrain(row.pretraining, row.encoder, stop=stop, bars=bars)
                lines = [line for line in read_metrics(epath.Path(row.encoder)) if line.get("split") == "eval"][-1:]
                losses = [line[key] for line in lines for key in ("mlm_loss", "ltr_loss") if line.get(key) is not None]
                if config.perplexity and losses and not row.keys.finetuning.get("from_scratch"):
                    table.cells[name, PERPLEXITY] = Cell([math.exp(losses[-1])])
                write()
            for task, tuned in row.finetuning:
                log.info("Fine-tuning row %r on task %r", name, task.name)
                with prefixed(f"row {name!r}: task {task.name!r}"):
                    found = search(tuned, str(_cell_folder(folder, row, task)), stop=stop, bars=bars)
                for column, score in task.columns.items():
                    split, _, metric = (score or f"/{found['metric']}").partition("/")
                    values = {
                        seed: task.scale * float(scores[split or next(iter(scores))][metric])
                        for seed, scores in found["results"].items()
                    }
                    table.cells[name, column] = Cell(list(values.values()), list(values), found["learning_rate"])
                write()
    return table


def _cell_folder(folder: epath.Path, row: PlannedRow, task: StudyTask) -> epath.Path:
    return folder / "finetuning" / _slug(row.keys.name) / _slug(task.name)


# --- Names ------------------------------------------------------------------------------------------------------------


def _only(what: str, given: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Returns the rows or tasks of the given names, () for all. InputError for unknown and for duplicate names."""
    known = [entry.name for entry in given]
    _refuse_duplicates(what, [_slug(name) for name in known])
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"only_{what}: unknown name {unknown[0]!r}; expected {', '.join(known)}")
    return [entry for entry in given if entry.name in names or not names]


def _refuse_duplicates(what: str, names: Sequence[str]) -> None:
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{what}: duplicate name {duplicates[0]!r}")


def _slug(name: str) -> str:
    """Returns the folder name for `name`."""
    return re.sub(r"[\W_]+", "_", name.lower()).strip("_")
