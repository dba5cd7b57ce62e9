"""`bert-jax report`: one page with results, curves, fills and settings of runs beside each other.

A search adds the table of its trials, a study its table of scores. Metrics have their names of `metrics.jsonl`. Plotly
draws the page, which loads nothing.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from etils import epath

from bert_jax.config_keys import FinetuneConfig, PretrainConfig
from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.files.atomic import read_json
from bert_jax.sections import Section, flatten, from_mapping
from bert_jax.tracking.metrics import SAMPLES, read_metrics

MOST_POINTS = 200
"""Points of a curve; of more rows, each point is the mean of as many as needed."""
MOST_FILLS = 6
"""Evaluations whose fills are shown, the last one among them."""
_HEADINGS = {PretrainConfig: "Pre-training", FinetuneConfig: "Fine-tuning"}
_AXES = ("step", "tokens_seen", "hours")
_NO_SCORES = re.compile(r"split|step|hours|time|.*_seen|data|sequences")
_NO_CURVES = re.compile(rf"{_NO_SCORES.pattern}|epoch.*|nonfinite_streak|steps_averaged|examples_.*")
_SHARES = re.compile(r".*accuracy|mfu|.*_share")
"""Metrics from 0 to 1, whose axes are in percent."""
_LONGEST_NAME = 40  # characters of a name in the legend
_DASHES = {"training": "solid", "eval": "solid", "dev": "solid", "unigram baseline": "dash"}  # others are dotted
# No address may be loaded, whatever a file of a run contains. Plotly writes styles and makes images of plots.
_HEAD = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:\"><title>bert-jax report</title>"
    "<style>body { font: 15px/1.5 system-ui, sans-serif; margin: 16px; overflow-x: auto } "
    "th, td { border-bottom: 1px solid #ddd; padding: 3px 10px; text-align: right } "
    "th:first-child, td:first-child { text-align: left } "
    "@media (prefers-color-scheme: dark) { html { background: #111 } "
    "body { margin: 0; padding: 16px; background: #fff; filter: invert(0.93) hue-rotate(180deg) } }</style>"
)
_SEARCH, _STUDY, _COMPILED = "search.json", "table.json", ".json"
Table = tuple[str, list[str], list[list[Any]]]
"""Caption, heads and rows. A cell is a text, a number or None."""


@dataclass(frozen=True)
class ReportedRun:
    """A run.

    Attributes:
      kind: class of its config.
      splits: rows of its metrics, by split.
      config: values by dotted key; empty without a config.
      result: metrics of the last evaluation, or of that of `result.json`, and of the last training row.
    """

    name: str
    kind: type[Section]
    splits: Mapping[str, Sequence[Mapping[str, Any]]]
    config: Mapping[str, Any]
    result: Mapping[str, Any]


def read_runs(paths: Sequence[str]) -> list[ReportedRun]:
    """Reads the runs in workdirs, in searches, in studies and in folders of runs.

    Raises InputError for a path without any metrics or table of scores.
    """
    rows: dict[epath.Path, list[dict[str, Any]]] = {}
    for path in paths:
        if path.endswith(_COMPILED):
            continue
        folder = remote.absolute(path)
        inside = [] if read_metrics(folder) else [*remote.children(folder), *remote.children(folder / "pretraining")]
        with_metrics = {place: found for place in [folder, *inside] if (found := read_metrics(place))}
        if not with_metrics and not remote.exists(folder / _STUDY):
            raise InputError(f"{path} has no metrics; expected a workdir of `bert-jax pretrain`, `finetune` or `study`")
        rows |= with_metrics
    are_distinct = len({folder.name for folder in rows}) == len(rows)
    return [_read_run(folder.name if are_distinct else str(folder), folder, rows[folder]) for folder in rows]


def _read_run(name: str, folder: epath.Path, rows: Sequence[Mapping[str, Any]]) -> ReportedRun:
    kind = PretrainConfig if any({"mlm_loss", "unigram_loss"} & row.keys() for row in rows) else FinetuneConfig
    config, result = (
        read_json(file) if remote.exists(file) else {} for file in (folder / "config.json", folder / "result.json")
    )
    splits: dict[str, list[Mapping[str, Any]]] = {"training": [], "eval": [], SAMPLES: []}
    for row in rows:
        hours = (row.get("time", math.nan) - rows[0].get("time", math.nan)) / 3600
        values = {key: value for key, value in row.items() if key == SAMPLES or isinstance(value, (int, float))}
        splits[row.get("split", "training")].append({**values, "hours": hours})
    evaluations = [row for row in splits["eval"] if row["step"] == result.get("step")] or splits["eval"]
    final = {**(splits["training"] or [{}])[-1], **(evaluations or [{}])[-1]}
    return ReportedRun(name, kind, splits, dict(flatten(from_mapping(kind, config))) if config else {}, final)


def tables(path: str) -> Iterator[Table]:
    """Yields the table of the trials of a search, of the scores of a study, and of a file of `compile --json`."""
    folder = remote.absolute(path)
    if path.endswith(_COMPILED):
        phases = read_json(folder)["phases"]
        values = [{**phase, **(phase["estimate"] or {})} for phase in phases]
        keys = [key for key, value in values[0].items() if isinstance(value, (str, int, float))]
        heads = [f"steps {phase['first_step']}–{phase['last_step']}" for phase in phases]
        yield folder.name, ["", *heads], [[key, *(phase[key] for phase in values)] for key in keys]
    if remote.exists(folder / _SEARCH):
        search = read_json(folder / _SEARCH)
        trials = search["by_learning_rate"].items()
        seeds = list(dict.fromkeys(seed for _, trial in trials for seed in trial["scores"]))
        rows = [
            [rate, trial["median"], *(trial["scores"].get(seed) for seed in seeds)] for rate, trial in trials
        ]  # fmt: skip
        note = f"{folder.name}: {search['metric']} of each trial"
        yield note, ["learning_rate", "median", *(f"seed {seed}" for seed in seeds)], rows
    if remote.exists(folder / _STUDY):
        study = read_json(folder / _STUDY)
        heads, rows = ["row"], [[row["name"]] for row in study["rows"]]
        for column in study["columns"]:
            cells = [row["columns"][column] for row in study["rows"]]
            kinds = {column: "mean", "±": "deviation", "paper": "paper"}
            used = {
                head: kind for head, kind in kinds.items() if kind == "mean" or any(cell.get(kind) for cell in cells)
            }
            heads += used
            for row, cell in zip(rows, cells, strict=True):
                row += [cell.get(kind) for kind in used.values()]
        yield study["title"] or folder.name, heads, rows


def results(runs: Sequence[ReportedRun]) -> Table:
    """Returns the scores of each run at the step of its result, or else of its last evaluation."""
    scores = dict.fromkeys(key for run in runs for row in run.splits["eval"] for key in row)
    names = [key for key in scores if not _NO_SCORES.fullmatch(key)]
    known = {key for run in runs for key, value in run.result.items() if value is not None}
    keys = [
        key for key in dict.fromkeys(["step", "tokens_seen", "loss", *names, "tokens_per_second"]) if key in known
    ]  # fmt: skip
    note = "Results on held-out examples. unigram_loss is the loss of word frequencies alone."
    return note, ["run", *keys], [[run.name, *(run.result.get(key) for key in keys)] for run in runs]


def settings(runs: Sequence[ReportedRun]) -> Table:
    """Returns the keys that are not the default in some run, first those that differ between runs."""
    defaults = dict(flatten(runs[0].kind()))
    known = [run for run in runs if run.config]
    rows = []
    for key in dict.fromkeys([*defaults, *(key for run in known for key in run.config)]):
        default, *values = (json.dumps(of.get(key, defaults.get(key))) for of in ({}, *(run.config for run in known)))
        if {*values} - {default}:
            rows.append([f"{key} *" if len({*values}) > 1 else key, default, *values])
    rows.sort(key=lambda row: not row[0].endswith("*"))
    note = "Settings that differ from the defaults; those with * differ between runs."
    return note, ["key", "default", *(run.name for run in known)], rows


def fills(run: ReportedRun) -> Table:
    """Returns the most probable word for each mask of its texts, evaluation by evaluation."""
    found = run.splits[SAMPLES]
    shown = [found[place] for place in sorted({*np.linspace(0, len(found) - 1, MOST_FILLS).round().astype(int)})]
    masks = [[(text["text"], mask) for text in row[SAMPLES] for mask in text["masks"]] for row in shown]
    rows = [
        [column[0][0], column[0][1]["target"], *("{} {:.2f}".format(*mask["fills"][0]) for _, mask in column)]
        for column in zip(*masks, strict=True)
    ]
    return f"{run.name}: most probable fills by step", ["text", "target", *(str(row["step"]) for row in shown)], rows


def _html(table: Table) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.5g}" if abs(value) < 1000 else f"{value:,.0f}"
        return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)

    note, heads, rows = table
    if not rows:
        return ""
    head = "".join(f"<th>{escape(text)}" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell(value))}" for value in row) for row in rows)
    return f"<p>{escape(note)}</p><table><tr>{head}{body}</table>"


def curves(run: ReportedRun) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields panel, label and points [n, 4] of each curve: the values on the axes, then that of the metric."""
    for split in ("eval", "training"):
        rows = run.splits[split]
        for key in dict.fromkeys(key for row in rows for key in row):
            if _NO_CURVES.fullmatch(key):
                continue
            points = np.array([[row.get(axis, math.nan) for axis in (*_AXES, key)] for row in rows if key in row])
            parts = np.array_split(points, min(MOST_POINTS, len(points)))
            part, _, panel = key.rpartition("/")
            label = part or split
            if key == "unigram_loss":
                panel, label = "mlm_loss", "unigram baseline"
            yield panel, label, np.stack([part.mean(0) for part in parts])


def make_figure(runs: Sequence[ReportedRun]) -> Any:
    """Returns plotly's figure of runs: a panel for each metric, a color for each run."""
    from plotly.colors import qualitative
    from plotly.subplots import make_subplots

    drawn = [(run, *curve) for run in runs for curve in curves(run)]
    panels = list(dict.fromkeys(panel for _, panel, _, _ in drawn))
    down = -(-len(panels) // 2)
    figure = make_subplots(down, 2, subplot_titles=[escape(panel) for panel in panels], vertical_spacing=0.2 / down)
    palette = qualitative.D3 if len(runs) <= len(qualitative.D3) else qualitative.Dark24 + qualitative.Light24
    colors = {run.name: palette[number % len(palette)] for number, run in enumerate(runs)}
    named: set[str] = set()
    for run, panel, label, points in drawn:
        place, name = divmod(panels.index(panel), 2), escape(run.name)
        figure.add_scatter(
            x=points[:, 0].tolist(), y=points[:, -1].tolist(), name=_shortened(run.name), legendgroup=name,
            opacity=0.5 if label == "training" else 1.0, showlegend=name not in named,
            mode="lines" if label in ("training", "unigram baseline") and len(points) > 1 else "lines+markers",
            line={"color": colors[run.name], "dash": _DASHES.get(label, "dot")},
            marker_symbol="line-ew-open" if label == "unigram baseline" else "circle",
            hovertemplate=f"{name}, {escape(label)}: %{{y:.5g}} at %{{x:,}}<extra></extra>",
            row=place[0] + 1, col=place[1] + 1,
        )  # fmt: skip
        named.add(name)
    columns = {f"by {axis}": [points[:, column] for *_, points in drawn] for column, axis in enumerate(_AXES)}
    buttons = [
        {"label": label, "method": "restyle", "args": [{"x": [values.tolist() for values in column]}]}
        for label, column in columns.items() if not any(np.isnan(values).any() for values in column)
    ]  # fmt: skip
    menu = {"type": "buttons", "direction": "right", "x": 0, "y": 1 + 0.12 / down, "buttons": buttons}
    figure.update_xaxes(matches="x", showticklabels=True)
    for number, panel in enumerate(panels):
        values = np.concatenate([points[:, -1] for _, name, _, points in drawn if name == panel])
        least, most = np.nanmin(values), np.nanmax(values)
        figure.update_yaxes(
            tickformat="~%" if _SHARES.fullmatch(panel) and most <= 1 else "~g",
            # plotly shows a constant between -1 and 1 more
            range=sorted([0.9 * most, 1.1 * most]) if least == most != 0 else None,
            row=number // 2 + 1, col=number % 2 + 1,
        )  # fmt: skip
    figure.update_layout(
        template="plotly_white", height=90 + 300 * down, showlegend=True, legend={"font": {"size": 11}},
        updatemenus=[{**menu, "xanchor": "left", "yanchor": "bottom"}],
    )  # fmt: skip
    return figure


def _shortened(name: str) -> str:
    """Returns a name for the legend, in HTML; of a long one the beginning and the end."""
    half = _LONGEST_NAME // 2
    return escape(name if len(name) <= _LONGEST_NAME else f"{name[:half]}…{name[-half:]}")


def write_report(paths: Sequence[str], output: str) -> list[dict[str, Any]]:
    """Writes a page on runs to `output`, which ends with .html.

    Returns the results of each run by the heads of their table. Raises InputError for a path without runs, for a file
    of another structure, and for another ending.
    """
    if not output.lower().endswith(".html"):
        raise InputError(f"output={output}: must end with .html, such as report.html")
    parts, rows, has_script = [_HEAD], [], False
    try:
        runs = read_runs(paths)
        parts += [_html(table) for path in paths for table in tables(path)]
        for kind, heading in _HEADINGS.items():
            if group := [run for run in runs if run.kind is kind]:
                figure = make_figure(group).to_html(full_html=False, include_plotlyjs=not has_script)
                table, has_script = results(group), True
                samples = [_html(fills(run)) for run in group if run.splits[SAMPLES]]
                parts += [f"<h1>{heading}</h1>", _html(table), figure, *samples, _html(settings(group))]
                rows += [dict(zip(table[1], row, strict=True)) for row in table[2]]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"{', '.join(paths)}: unexpected contents ({type(error).__name__}: {error!s:.99})") from error
    atomic.check_file_output(output)
    atomic.write_whole(remote.parse_path(output), "".join(parts).encode())
    return rows
