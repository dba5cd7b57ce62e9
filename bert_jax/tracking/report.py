"""`bert-jax report`: one page with results, curves and fills of runs beside each other.

A search adds the table of its trials, a study its table of scores. Metrics have their names of `metrics.jsonl`. Plotly
draws the page, which loads nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.files.atomic import read_json
from bert_jax.tracking.metrics import SAMPLES, read_metrics

MOST_POINTS = 200
"""Points of a curve; of more rows, each point is the mean of as many as needed."""
MOST_FILLS = 6
"""Evaluations whose fills are shown, the last one among them."""
_NO_SCORES = re.compile(r"split|step|time|.*_seen|data|sequences")
_NO_CURVES = re.compile(rf"{_NO_SCORES.pattern}|epoch.*|nonfinite_streak|target_reached|steps_averaged|examples_.*")
_SHARES = re.compile(r".*accuracy|mfu|.*_share")
"""Metrics from 0 to 1, whose axes are in percent."""
_LONGEST_NAME = 40  # characters of a name in the legend: its last ones, in which the runs of a search differ
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
    """A run, and the rows of its metrics by split."""

    name: str
    splits: Mapping[str, Sequence[Mapping[str, Any]]]


def read_runs(paths: Sequence[str]) -> list[ReportedRun]:
    """Reads the runs in workdirs, in searches, in studies and in folders of runs.

    Raises InputError for a path without any metrics or table of scores.
    """
    rows: dict[epath.Path, list[dict[str, Any]]] = {}
    for folder in (remote.absolute(path) for path in paths if not path.endswith(_COMPILED)):
        inside = [] if read_metrics(folder) else [*remote.children(folder), *remote.children(folder / "pretraining")]
        with_metrics = {place: found for place in [folder, *inside] if (found := read_metrics(place))}
        if not with_metrics and not remote.exists(folder / _STUDY):
            raise InputError(f"{folder} has no metrics; expected the workdir of a run, a search or a study")
        rows |= with_metrics
    are_distinct = len({folder.name for folder in rows}) == len(rows)
    return [_read_run(folder.name if are_distinct else str(folder), rows[folder]) for folder in rows]


def _read_run(name: str, rows: Sequence[Mapping[str, Any]]) -> ReportedRun:
    splits: dict[str, list[Mapping[str, Any]]] = {"training": [], "eval": [], SAMPLES: []}
    for row in rows:
        values = {key: value for key, value in row.items() if key == SAMPLES or isinstance(value, (int, float))}
        splits[row.get("split", "training")].append(values)
    return ReportedRun(name, splits)


def tables(path: str) -> Iterator[Table]:
    """Yields the table of the trials of a search, of the scores of a study, and of a file of `compile --json`."""
    folder = remote.absolute(path)
    if path.endswith(_COMPILED):
        phases = read_json(folder)["phases"]
        values = [{**phase, **(phase["estimate"] or {})} for phase in phases]
        keys = [key for key, value in values[0].items() if isinstance(value, (str, int, float))]
        heads = [f"steps {phase['first_step']}–{phase['last_step']}" for phase in phases]
        yield folder.name, ["", *heads], [[key, *(phase.get(key) for phase in values)] for key in keys]
    if remote.exists(folder / _SEARCH):
        search = read_json(folder / _SEARCH)
        trials = search["by_learning_rate"].items()
        seeds = list(dict.fromkeys(seed for _, trial in trials for seed in trial["scores"]))
        rows = [[rate, trial["median"], *(trial["scores"].get(seed) for seed in seeds)] for rate, trial in trials]
        note = f"{folder.name}: {search['metric']} of each trial"
        yield note, ["learning_rate", "median", *(f"seed {seed}" for seed in seeds)], rows
    if remote.exists(folder / _STUDY):
        study = read_json(folder / _STUDY)
        heads, rows = ["row"], [[row["name"]] for row in study["rows"]]
        for column in study["columns"]:
            for head, kind in ((column, "mean"), ("±", "deviation"), ("paper", "paper")):
                values = [row["columns"][column].get(kind) for row in study["rows"]]
                if kind == "mean" or any(values):
                    heads.append(head)
                    rows = [[*row, value] for row, value in zip(rows, values, strict=True)]
        yield study["title"] or folder.name, heads, rows


def results(runs: Sequence[ReportedRun]) -> Table:
    """Returns the scores of each run at its last evaluation, and the loss and the rate of training."""
    of_training = {key: key for key in ("step", "tokens_seen", "tokens_per_second")} | {"training loss": "loss"}
    trained = [(run.splits["training"] or [{}])[-1] for run in runs]
    last = [
        {**{name: row[key] for name, key in of_training.items() if key in row}, **(run.splits["eval"] or [{}])[-1]}
        for run, row in zip(runs, trained, strict=True)
    ]
    names = [key for run in runs for row in run.splits["eval"] for key in row if not _NO_SCORES.fullmatch(key)]
    known = dict.fromkeys(["step", "tokens_seen", *names, *of_training])
    keys = [key for key in known if any(key in row for row in last)]
    note = "Results on held-out examples. unigram_loss is the loss of word frequencies alone."
    return note, ["run", *keys], [[run.name, *map(row.get, keys)] for run, row in zip(runs, last, strict=True)]


def fills(run: ReportedRun) -> Table:
    """Returns the most probable word for each mask of its last texts, evaluation by evaluation."""
    texts = [[text["text"] for text in row[SAMPLES]] for row in run.splits[SAMPLES]]  # a phase may have others
    found = [row for row, shown in zip(run.splits[SAMPLES], texts, strict=True) if shown == texts[-1]]
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
        return "–" if value is None else f"{value:,}" if type(value) is int else str(value)

    note, heads, rows = table
    if not rows:
        return ""
    head = "".join(f"<th>{escape(text)}" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell(value))}" for value in row) for row in rows)
    return f"<p>{escape(note)}</p><table><tr>{head}{body}</table>"


def curves(run: ReportedRun) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields panel, label and points [n, 2], steps and values, of each curve.

    If phases have different objectives, `loss` has a curve for each, whose label names it.
    """
    for split in ("eval", "training"):
        rows = run.splits[split]
        objectives = dict.fromkeys(filter(None, map(_objective, rows))) or [""]  # "": no loss has parts
        for key in dict.fromkeys(key for row in rows for key in row):
            if _NO_CURVES.fullmatch(key):
                continue
            part, _, panel = key.rpartition("/")
            for name in objectives if key in ("loss", "unigram_loss") else [None]:
                shown = [row for row in rows if key in row and name in (None, _objective(row))]
                if not shown:
                    continue
                label = f"{split}, {name}" if key == "loss" and len(objectives) > 1 else part or split
                if key == "unigram_loss":
                    panel, label = "ltr_loss" if "ltr_loss" in shown[0] else "mlm_loss", "unigram baseline"
                points = np.array([(row["step"], row[key]) for row in shown])
                pieces = np.array_split(points, min(MOST_POINTS, len(points)))
                yield panel, label, np.stack([piece.mean(0) for piece in pieces])


def _objective(row: Mapping[str, Any]) -> str:
    """Returns the objective of a row of metrics by the parts of its loss, such as "mlm + nsp"."""
    return " + ".join(name for name in ("ltr", "mlm", "nsp") if f"{name}_loss" in row)


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
        kind = label.partition(",")[0]
        figure.add_scatter(
            x=points[:, 0].tolist(), y=points[:, 1].tolist(), name=escape(run.name[-_LONGEST_NAME:]), legendgroup=name,
            opacity=0.5 if kind == "training" else 1.0, showlegend=name not in named,
            mode="lines" if kind in ("training", "unigram baseline") and len(points) > 1 else "lines+markers",
            line={"color": colors[run.name], "dash": _DASHES.get(kind, "dot")},
            marker_symbol="line-ew-open" if kind == "unigram baseline" else "circle",
            hovertemplate=f"{name}, {escape(label)}: %{{y:.5g}} at %{{x:,}}<extra></extra>",
            row=place[0] + 1, col=place[1] + 1,
        )  # fmt: skip
        named.add(name)
    figure.update_xaxes(matches="x", showticklabels=True)
    for number, panel in enumerate(panels):
        tick_format = "~%" if _SHARES.fullmatch(panel) else "~g"
        figure.update_yaxes(tickformat=tick_format, row=number // 2 + 1, col=number % 2 + 1)
    figure.update_layout(
        template="plotly_white", height=90 + 300 * down, showlegend=True, legend={"font": {"size": 11}}
    )
    return figure


def write_report(paths: Sequence[str], output: str) -> list[dict[str, Any]]:
    """Writes a page on runs to `output`, which ends with .html.

    Returns the results of each run by the heads of their table. Raises InputError for a path without runs, for a file
    of another structure, and for another ending.
    """
    if not output.lower().endswith(".html"):
        raise InputError(f"output={output}: must end with .html, such as report.html")
    try:
        runs = read_runs(paths)
        parts = [_HEAD, *(_html(table) for path in paths for table in tables(path))]
        _, heads, rows = table = results(runs)
        if runs:
            parts += [_html(table), make_figure(runs).to_html(full_html=False)]
            parts += [_html(fills(run)) for run in runs if run.splits[SAMPLES]]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"{', '.join(paths)}: unexpected contents ({type(error).__name__}: {error!s:.99})") from error
    atomic.check_file_output(output)
    atomic.write_whole(remote.parse_path(output), "".join(parts).encode())
    return [dict(zip(heads, row, strict=True)) for row in rows]
