"""Inputs of a report: runs, searches, studies and compiled steps, read from their folders and files."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from etils import epath

from bert_jax.config_keys import FinetuneConfig, PretrainConfig
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.files.format_versions import read_json
from bert_jax.sections import flatten_mapping
from bert_jax.tracking.metrics import SAMPLES, read_metrics

Rows = list[dict[str, Any]]

PRETRAINING, FINETUNING = "pretraining", "finetuning"
_PRETRAINING_METRICS = {"mlm_loss", "nsp_loss"}
_LEVELS = 4  # folder levels from a study down to its runs
# Files of other packages, which `tracking` may not import.
_NEWEST = 1  # their format version
_CONFIG, _RESULT, _SEARCH, _TABLE, _ENCODER = "config.json", "result.json", "search.json", "table.json", "encoder.json"


@dataclass(frozen=True)
class ReportedRun:
    """A run of pre-training or fine-tuning.

    Attributes:
      name: unique among the runs of a report.
      kind: PRETRAINING or FINETUNING.
      rows: its metrics, without text samples.
      samples: its rows of text samples.
      config: values by dotted key; empty if the folder has no config.
      result: contents of `result.json`; empty without it.
    """

    name: str
    kind: str
    rows: Rows
    samples: Rows
    config: Mapping[str, Any]
    result: Mapping[str, Any]

    def split(self, split: str | None) -> Rows:
        """Returns the rows of a split, None for training."""
        return [row for row in self.rows if row.get("split") == split]


@dataclass(frozen=True)
class ReportedStudy:
    """Contents of a study's `table.json`, and by row its pre-training seed; None for a given checkpoint."""

    name: str
    table: Mapping[str, Any]
    seeds: Mapping[str, int | None]


@dataclass
class Reported:
    """All that a report shows. Searches and compiled steps are (name, contents of their JSON file)."""

    runs: list[ReportedRun] = field(default_factory=list)
    searches: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    studies: list[ReportedStudy] = field(default_factory=list)
    compiled: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[ReportedRun]:
        """Returns the runs of a kind."""
        return [run for run in self.runs if run.kind == kind]


def read_reported(paths: Sequence[str]) -> Reported:
    """Reads workdirs of pre-training, fine-tuning, searches and studies, and JSON files of any but a run.

    A search stands for its trials as well, and a study for its pre-training runs. Raises InputError for a path that is
    none of these.
    """
    reported = Reported()
    runs: dict[str, epath.Path] = {}
    for path in dict.fromkeys(paths):
        folder = remote.parse_path(path)
        if path.endswith(".json"):
            _read_file(reported, path, folder)
        elif remote.exists(folder / _TABLE):
            _read_file(reported, path, folder / _TABLE)
            runs |= {f"{path}/{run.name}": run for run in _children_with_metrics(folder / "pretraining")}
        elif remote.exists(folder / _SEARCH):
            _read_file(reported, path, folder / _SEARCH)
            runs |= {f"{path}/{run.name}": run for run in _children_with_metrics(folder)}
        else:
            runs[path] = folder
    names = _short_names(runs)
    reported.runs = [_read_run(path, names[path], folder) for path, folder in runs.items()]
    return reported


def read_rows(workdir: str) -> Rows:
    """Returns the metrics of a workdir, without text samples. Raises InputError if it has none."""
    folder = remote.parse_path(workdir)
    if rows := [row for row in read_metrics(folder) if row.get("split") != SAMPLES]:
        return rows
    runs = [] if remote.is_remote(folder) else [str(run) for run in _runs_below(folder, _LEVELS)]
    if runs:
        raise InputError(
            f"{workdir} has no metrics of its own, but {len(runs)} runs with metrics; pass those to draw, "
            f"such as {runs[0]}"
        )
    raise InputError(f"{workdir} has no metrics; pass the --workdir of `bert-jax pretrain` or `bert-jax finetune`")


def kind_of(rows: Rows) -> str:
    """Returns PRETRAINING or FINETUNING."""
    return PRETRAINING if any(row.keys() & _PRETRAINING_METRICS for row in rows) else FINETUNING


def _read_run(path: str, name: str, folder: epath.Path) -> ReportedRun:
    rows = read_rows(path if folder == remote.parse_path(path) else str(folder))
    samples = [row for row in read_metrics(folder) if row.get("split") == SAMPLES]
    kind = kind_of(rows)
    keys = PretrainConfig if kind == PRETRAINING else FinetuneConfig
    config = _read_json(folder / _CONFIG) if remote.exists(folder / _CONFIG) else {}
    result = _read_json(folder / _RESULT) if remote.exists(folder / _RESULT) else {}
    return ReportedRun(name, kind, rows, samples, dict(flatten_mapping(keys, config)), result)


def _read_file(reported: Reported, path: str, file: epath.Path) -> None:
    """Adds a JSON file to the report, by its keys."""
    content = _read_json(file)
    name = remote.absolute(path).name
    if {"topology", "phases"} <= content.keys():
        reported.compiled.append((name, content))
    elif {"columns", "rows"} <= content.keys():
        with naming(path):
            reported.studies.append(ReportedStudy(name, content, _pretraining_seeds(file.parent, content)))
    elif "by_learning_rate" in content:
        reported.searches.append((name, content))
    else:
        raise InputError(
            f"{path}: unknown contents; expected the output of `bert-jax compile --json`, a study's {_TABLE} or a "
            f"search's {_SEARCH}"
        )


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Raises InputError, with the source's name, for contents that have another structure than the reader expects.

    Checksums notice damage; files that were edited or written by something else may have none.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"{source}: unexpected structure ({type(error).__name__}: {error!s:.120}); write it again"
        ) from error


def _read_json(path: epath.Path) -> dict[str, Any]:
    if not remote.exists(path):
        raise InputError(f"{path} not found; pass a workdir, or a JSON file of a study, a search or `compile --json`")
    return read_json(path, _NEWEST)


def _pretraining_seeds(folder: epath.Path, table: Mapping[str, Any]) -> dict[str, int | None]:
    """Returns the seed of each row's pre-training, found by the steps and losses that the table repeats."""
    runs = {}
    for run in _children_with_metrics(folder / "pretraining"):
        evaluations = [row for row in read_metrics(run) if row.get("split") == "eval"]
        if evaluations and remote.exists(run / _CONFIG):
            runs[evaluations[-1]["step"], evaluations[-1].get("mlm_loss")] = _read_json(run / _CONFIG).get("seed")
    found = {}
    for row in table["rows"]:
        pretraining = row.get("pretraining") or {}
        found[row["name"]] = runs.get((pretraining.get("steps"), pretraining.get("mlm_loss")))
    return found


def _children_with_metrics(folder: epath.Path) -> list[epath.Path]:
    return [child for child in remote.children(folder) if child.is_dir() and read_metrics(child)]


def _runs_below(folder: epath.Path, levels: int) -> Iterator[epath.Path]:
    """Yields the workdirs with metrics in a folder of a search or a study, by name."""
    if not levels or not folder.is_dir():
        return
    for child in sorted(folder.iterdir()):
        if child.is_dir() and read_metrics(child):
            yield child
        else:
            yield from _runs_below(child, levels - 1)


def _short_names(runs: Mapping[str, epath.Path]) -> dict[str, str]:
    """Returns a unique name of each run: the last parts of its path, as many as needed."""
    parts = {
        path: [part for part in remote.absolute(str(folder)).parts if part != "/"] for path, folder in runs.items()
    }
    for count in range(1, max(map(len, parts.values()), default=0) + 1):
        names = {path: "/".join(found[-count:]) for path, found in parts.items()}
        if len(set(names.values())) == len(names):
            return names
    return {path: path for path in runs}
