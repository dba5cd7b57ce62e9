"""A study: many runs, one table. Each row is an encoder, each column a score of a task that it is fine-tuned on.

    bert-jax study configs/studies/table5.py --workdir=runs/table5 \\
      --config.pretraining.data.path=DATASET --config.task_data=FOLDER --config.finetuning.num_epochs=3

`config_keys.py` has the types of rows and tasks. `--config.pretraining.KEY` applies to all rows,
`--config.finetuning.KEY` to all tasks. Every run has its own workdir inside the study's and resumes from its
checkpoint, so that the same command resumes a stopped study:

WORKDIR/pretraining/ROW                    pre-training of the first row with these settings
WORKDIR/finetuning/ROW/encoder.json        the encoder that these fine-tuning runs started from
WORKDIR/finetuning/ROW/TASK/lr-R-seed-S    a trial of the search of one cell
WORKDIR/programs                           compilation cache shared by all runs
WORKDIR/table.md, table.json, table.png    results so far, written after each pre-training and each cell
WORKDIR/provenance.json                    software, devices and given checkpoints of each start of the study
"""

import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from etils import epath

from bert_jax.config import load_config
from bert_jax.config_keys import FinetuneConfig, PretrainConfig, StudyConfig, StudyTask
from bert_jax.data.corpora.tfds_corpus import is_tfds
from bert_jax.errors import InputError
from bert_jax.files import atomic, provenance, remote
from bert_jax.files.format_versions import read_json, write_json
from bert_jax.finetuning.checks import model_of
from bert_jax.finetuning.finetune import SEARCH_FILE, planned_runs, search
from bert_jax.finetuning.tasks.kinds import read_task
from bert_jax.model import BertConfig
from bert_jax.parallel.mesh import make_mesh
from bert_jax.progress import Bars, silent
from bert_jax.runtime.compilation_cache import AUTO, kept_programs
from bert_jax.runtime.preemption import StopSignal
from bert_jax.runtime.processes import is_first
from bert_jax.sections import flatten, to_dict, with_values
from bert_jax.studies.study_table import PERPLEXITY, Cell, Table, write_table
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.tracking.metrics import read_metrics
from bert_jax.training.checkpoints import open_checkpoint
from bert_jax.training.initialization import fill_in_from_checkpoint
from bert_jax.training.phases import Phase, open_phases
from bert_jax.training.pretrain import pretrain
from bert_jax.training.run import describe_devices, workdir_path

log = logging.getLogger(__name__)

ENCODER_FILE = "encoder.json"
_ENCODER_VERSION = 1
_HARMLESS_IN_PHASES = (
    "data.path", "max_rows_per_device", "gradient_accumulation", "attention", "remat", "scan_layers", "mesh.",
    "gradient_reduce_dtype",
)  # fmt: skip
_FINETUNING_PREFIX = "finetuning."


@dataclass(frozen=True)
class PlannedRow:
    """A `StudyRow` with its encoder and the names of all its tasks.

    The encoder is pre-trained with the config `pretraining` in the study's folder `encoder`, or is the checkpoint
    `encoder`. `config`, unless empty, replaces the tasks' fine-tuning configs.
    """

    name: str
    pretraining: PretrainConfig | None
    encoder: str
    config: str
    finetuning: Mapping[str, Any]
    tasks: Sequence[str]
    paper: Mapping[str, float]


@dataclass(frozen=True)
class Study:
    """A validated study."""

    title: str
    note: str
    rows: Sequence[PlannedRow]
    tasks: Sequence[StudyTask]
    perplexity: bool
    task_data: str
    overrides: Sequence[tuple[str, str]]  # of every fine-tuning

    @property
    def columns(self) -> list[str]:
        """The table's columns, from left to right."""
        task_columns = [column for task in self.tasks for column in task.columns]
        return [PERPLEXITY, *task_columns] if self.perplexity else task_columns

    def tasks_of(self, row: PlannedRow) -> list[StudyTask]:
        """Returns the tasks that the row is fine-tuned on."""
        return [task for task in self.tasks if task.name in row.tasks]

    def config_of(self, row: PlannedRow, task: StudyTask, encoder: str) -> FinetuneConfig:
        """Returns the config of fine-tuning `row` on `task`. Precedence, lowest first: config, task, row, overrides.

        Raises InputError for an unknown key or an invalid value.
        """
        keys = {**task.finetuning, **row.finetuning, **dict(self.overrides)}
        where = f"row {row.name!r}, task {task.name!r}"
        config: FinetuneConfig = _with_context(where, load_config, row.config or task.config, keys, kind=FinetuneConfig)
        path = config.data.path
        if self.task_data and not is_tfds(path) and not remote.is_remote(path):
            path = os.path.join(self.task_data, path)
        config = with_values(config, {"data.path": path, "init": encoder})
        if config.search.learning_rates and "optimizer.learning_rate" in dict(self.overrides):
            raise InputError(
                f"{where}: optimizer.learning_rate has no effect in a search; set "
                "--config.finetuning.finetune.learning_rates=..."
            )
        _with_context(where, planned_runs, config)
        return config


def load_study(spec: str, overrides: Sequence[tuple[str, str]] = ()) -> Study:
    """Loads a study from a config named as for `load_config`; overrides of `finetuning.KEY` apply to every task.

    Raises:
      InputError: unknown keys or names, invalid values, missing datasets: all that can be detected before any run.
    """
    task_overrides = [
        (key.removeprefix(_FINETUNING_PREFIX), text) for key, text in overrides if key.startswith(_FINETUNING_PREFIX)
    ]
    own = [(key, text) for key, text in overrides if not key.startswith(_FINETUNING_PREFIX)]
    config = load_config(spec, own, kind=StudyConfig)
    tasks = config.tasks
    if not config.rows or not tasks:
        raise InputError("rows, tasks: expected a tuple of StudyRow and one of StudyTask; got none")
    rows = _rows(config, [task.name for task in tasks])
    _refuse_duplicates("tasks", [_slug(task.name) for task in tasks])
    plan = Study(
        config.title, config.note, _only("rows", rows, config.only_rows), _only("tasks", tasks, config.only_tasks),
        config.perplexity, config.task_data, task_overrides,
    )  # fmt: skip
    _refuse_duplicates("columns of tasks", plan.columns)
    for row in plan.rows:
        if unknown := set(row.paper) - {column for task in tasks for column in task.columns} - {PERPLEXITY}:
            raise InputError(f"row {row.name!r}: paper: unknown column {min(unknown)!r}")
        encoder = _with_context(f"row {row.name!r}", _encoder_config, row)
        for task in plan.tasks_of(row):
            cell_config = plan.config_of(row, task, row.encoder)
            _with_context(f"row {row.name!r}, task {task.name!r}", model_of, cell_config, encoder)
            path = cell_config.data.path
            if not is_tfds(path) and not remote.exists(remote.parse_path(path)):
                raise InputError(f"task {task.name!r}: {path} not found; set its folder with --config.task_data=FOLDER")
    _compilation_cache(plan)
    return plan


def _encoder_config(row: PlannedRow) -> BertConfig:
    """Returns the config of the row's present or future encoder. InputError if it is invalid."""
    if row.pretraining is None:
        return open_checkpoint(row.encoder).bert_config
    if not row.pretraining.data.path and not row.pretraining.phases:
        raise InputError("--config.pretraining.data.path=DIR: expected the output of `bert-jax prepare`, got nothing")
    return _first_phase(row.pretraining).model


def _compilation_cache(plan: Study) -> str:
    """Returns `compilation_cache` of the study's runs, which share one; "auto" if none sets it.

    Raises InputError if two runs set different ones.
    """
    tuned = (plan.config_of(row, task, row.encoder) for row in plan.rows for task in plan.tasks_of(row))
    configs = [*(row.pretraining for row in plan.rows if row.pretraining), *tuned]
    given = list(dict.fromkeys(config.compilation_cache for config in configs if config.compilation_cache != AUTO))
    if len(given) > 1:
        raise InputError(
            f"compilation_cache: the runs of a study share one, got {' and '.join(given)}; set "
            "pretraining.compilation_cache and finetuning.compilation_cache to the same"
        )
    return given[0] if given else AUTO


def study(plan: Study, workdir: str, *, stop: StopSignal | None = None, bars: Bars = silent) -> Table:
    """Runs every unfinished run of `plan` in `workdir`, and writes and returns the table.

    Args:
      plan: from `load_study`.
      workdir: the study's workdir.
      stop: an active `StopSignal`; by default one is active during this call.
      bars: creates the progress bars of each run.

    Raises as `pretrain` and `finetune` do; finished runs are kept.
    """
    folder = workdir_path(workdir)
    table = Table(plan.title, plan.note, plan.columns, [row.name for row in plan.rows])
    if is_first():
        atomic.make_folder(folder)
    table.paper = {row.name: dict(row.paper) for row in plan.rows}
    table.pretraining_seeds = {row.name: _pretraining_seeds(row) for row in plan.rows}
    with ExitStack() as stack:
        stop = stop or stack.enter_context(StopSignal())
        stack.enter_context(kept_programs(_compilation_cache(plan), folder))
        _read_tasks(plan, folder)
        if is_first():
            provenance.append(folder, provenance.record(_describe_inputs(plan), devices=describe_devices()))
        for row in plan.rows:
            encoder, tuned = row.encoder, _tuned(folder, row)
            _refuse_another_encoder(row, tuned)
            if row.pretraining is not None:
                encoder = str(folder / "pretraining" / row.encoder)
                pretrained = _pretrained(row, encoder, stop, bars)
                if not row.finetuning.get("from_scratch"):  # from_scratch uses only its sizes and vocabulary
                    table.pretraining[row.name] = pretrained
                    if plan.perplexity and PERPLEXITY in pretrained:
                        table.cells[row.name, PERPLEXITY] = Cell([pretrained[PERPLEXITY]])
                if is_first():
                    write_table(table, folder)
            if is_first():
                atomic.make_folder(tuned)
                write_json(tuned / ENCODER_FILE, {"format_version": _ENCODER_VERSION, **_started_from(row)})
            for task in plan.tasks_of(row):
                where = tuned / _slug(task.name)
                log.info("Fine-tuning row %r on task %r", row.name, task.name)
                found = search(plan.config_of(row, task, encoder), str(where), stop=stop, bars=bars)
                for column, wanted in task.columns.items():
                    values = {
                        seed: task.scale * _value(scores, wanted or f"/{found['metric']}", task.name)
                        for seed, scores in found["results"].items()
                    }
                    table.cells[row.name, column] = Cell(list(values.values()), list(values), found["learning_rate"])
                if is_first():
                    write_table(table, folder)
    return table


def _describe_inputs(plan: Study) -> dict[str, Any]:
    """Returns the folder of the tasks and the given checkpoints by row, for a provenance record."""
    given = {row.name: open_checkpoint(row.encoder).reference() for row in plan.rows if row.pretraining is None}
    return {"task_data": plan.task_data, "encoders": given}


def _tuned(folder: epath.Path, row: PlannedRow) -> epath.Path:
    """Returns the folder of a row's searches."""
    return folder / "finetuning" / _slug(row.name)


def _read_tasks(plan: Study, folder: epath.Path) -> None:
    """Raises InputError for a task with unreadable files, before days of pre-training."""
    read = set()
    for row in plan.rows:
        tokenizer = None
        for task in plan.tasks_of(row):
            config = plan.config_of(row, task, row.encoder)
            files = (config.data.path, config.task)
            if files in read or remote.exists(_tuned(folder, row) / _slug(task.name) / SEARCH_FILE):
                continue
            read.add(files)
            tokenizer = tokenizer or _tokenizer(row)
            _with_context(f"task {task.name!r}", read_task, config, tokenizer)


def _tokenizer(row: PlannedRow) -> Tokenizer:
    if row.pretraining is None:
        return open_checkpoint(row.encoder).tokenizer
    return _first_phase(row.pretraining).datasets[0].tokenizer


def _first_phase(pretraining: PretrainConfig) -> Phase:
    """Opens all phases, which checks them."""
    return open_phases(fill_in_from_checkpoint(pretraining), make_mesh(pretraining.mesh))[0]


def _pretrained(row: PlannedRow, encoder: str, stop: StopSignal, bars: Bars) -> dict[str, Any]:
    """Pre-trains the row unless it is finished, and returns its steps and losses."""
    assert row.pretraining is not None
    log.info("Pre-training row %r", row.name)
    pretrain(row.pretraining, encoder, stop=stop, bars=bars)
    evaluations = [line for line in read_metrics(remote.parse_path(encoder)) if line.get("split") == "eval"]
    return {"steps": row.pretraining.total_steps, **(_losses(evaluations[-1]) if evaluations else {})}


def _pretraining_seeds(row: PlannedRow) -> list[int | None]:
    """Returns the seeds of the pre-trainings behind a row's scores; None if its checkpoint does not record it."""
    if row.finetuning.get("from_scratch"):
        return []
    return [open_checkpoint(row.encoder).config.get("seed") if row.pretraining is None else row.pretraining.seed]


def _started_from(row: PlannedRow) -> dict[str, Any]:
    """Identifies the encoder that a row is fine-tuned from. Its path alone does not: a run may be trained further."""
    found: dict[str, Any] = {"encoder": row.encoder, "steps": row.pretraining and row.pretraining.total_steps}
    if row.finetuning.get("from_scratch"):  # which uses only its sizes and vocabulary
        return found
    if row.pretraining is None:
        given = open_checkpoint(row.encoder).reference()
        return {**found, "step": given["step"], "digest": given["digest"]}
    # Of the keys that may change in a run that resumes, those that its parameters depend on.
    phases = [
        {key: value for key, value in phase.items() if not key.startswith(_HARMLESS_IN_PHASES)}
        for phase in row.pretraining.phases
    ]
    settings = {key: value for key, value in flatten(row.pretraining) if key.startswith("optimizer.")}
    return {**found, **json.loads(json.dumps({**settings, "phases": phases}))}


def _refuse_another_encoder(row: PlannedRow, folder: epath.Path) -> None:
    """Raises InputError if the folder was fine-tuned from another encoder, or from one that was trained otherwise.

    Folders of earlier versions record less of it.
    """
    path, now = folder / ENCODER_FILE, _started_from(row)
    before = read_json(path, _ENCODER_VERSION) if remote.exists(path) else now
    changed = [f"{key} {before[key]!r} -> {now[key]!r}" for key in now if key in before and before[key] != now[key]]
    if changed:
        raise InputError(
            f"row {row.name!r}: {folder} was fine-tuned from another encoder ({'; '.join(changed)}); remove it to "
            "fine-tune again, or choose another --workdir"
        )


def _losses(evaluation: Mapping[str, Any]) -> dict[str, float]:
    wanted = ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy", "unigram_loss")
    found = {name: float(evaluation[name]) for name in wanted if evaluation.get(name) is not None}
    return {**found, PERPLEXITY: math.exp(found["mlm_loss"])} if "mlm_loss" in found else found


def _value(scores: Mapping[str, Mapping[str, float]], wanted: str, task: str) -> float:
    """Returns the score named by `wanted` as "SPLIT/METRIC"; without a split, that of the first split."""
    split, _, metric = wanted.partition("/")
    try:
        return float(scores[split or next(iter(scores))][metric])
    except KeyError:
        known = [f"{split}/{metric}" for split, split_scores in scores.items() for metric in split_scores]
        raise InputError(
            f"task {task!r}: columns: unknown score {wanted!r}; expected one of {', '.join(known)}"
        ) from None


# --- Reading the config ------------------------------------------------------------------------------------------


def _rows(config: StudyConfig, tasks: Sequence[str]) -> list[PlannedRow]:
    rows: list[PlannedRow] = []
    shared: dict[str, str] = {}  # a pre-training config, and the folder of the first row with it
    for row in config.rows:
        name, pretraining, encoder = row.name, None, row.checkpoint
        if encoder:
            given = to_dict(config.checkpoints)
            if row.pretraining is not None or encoder not in given:
                known = ", ".join(given)
                raise InputError(
                    f"row {name!r}: checkpoint={encoder!r}: expected one of {known}, and no pretraining in the row"
                )
            if not given[encoder] and name in (config.only_rows or (name,)):
                raise InputError(
                    f"row {name!r}: set --config.checkpoints.{encoder}=CHECKPOINT, or skip it with --config.only_rows"
                )
            encoder = given[encoder]
        else:
            pretraining = _with_context(f"row {name!r}", with_values, config.pretraining, row.pretraining or {})
            encoder = shared.setdefault(json.dumps(to_dict(pretraining)), _slug(name))
        row_tasks = row.tasks or tasks
        if unknown := [task for task in row_tasks if task not in tasks]:
            raise InputError(f"row {name!r}: tasks: unknown task {unknown[0]!r}; expected {', '.join(tasks)}")
        rows.append(PlannedRow(name, pretraining, encoder, row.config, row.finetuning, row_tasks, row.paper))
    _refuse_duplicates("rows", [_slug(row.name) for row in rows])
    return rows


def _only(what: str, given: Sequence[Any], names: Sequence[str]) -> list[Any]:
    known = [one.name for one in given]
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"only_{what}: unknown name {unknown[0]!r}; expected {', '.join(known)}")
    return [one for one in given if one.name in names or not names]


def _refuse_duplicates(what: str, names: Sequence[str]) -> None:
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{what}: duplicate name {duplicates[0]!r}")


def _slug(name: str) -> str:
    """Returns the folder name for `name`."""
    return re.sub(r"[\W_]+", "_", name.lower()).strip("_")


def _with_context(where: str, function: Any, *arguments: Any, **options: Any) -> Any:
    """Calls `function`, and prefixes its InputErrors with `where`."""
    try:
        return function(*arguments, **options)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
