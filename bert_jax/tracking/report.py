"""`bert-jax report`: results, curves and settings of runs beside each other, as a page, Markdown or an image.

Metrics have their names of `metrics.jsonl`. Plotly draws the page, which loads nothing; matplotlib draws images.
"""

import io
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape, unescape
from typing import Any

import numpy as np
from etils import epath

from bert_jax.config_keys import FinetuneConfig, PretrainConfig
from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.files.format_versions import read_json
from bert_jax.sections import Section, flatten, flatten_mapping
from bert_jax.tracking.metrics import OLD, SAMPLES, read_metrics

MOST_POINTS = 200
"""Points of a curve; of more rows, each point is the mean of as many as needed."""
_HEADINGS = {PretrainConfig: "Pre-training", FinetuneConfig: "Fine-tuning"}
_AXES = ("step", "tokens_seen", "hours")
_FIRST = ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy", "loss")  # panels
_LAST = ("learning_rate", "grad_norm", "tokens_per_second", "step_seconds_p50", "mfu", "input_wait_share",
         "nonfinite_steps")  # fmt: skip
_NO_SCORES = re.compile(r"split|step|hours|time|.*_seen|(old_)?(data|sequences)")
_NO_CURVES = re.compile(
    rf"{_NO_SCORES.pattern}|epoch.*|nonfinite_streak|steps_averaged|examples_per_second|.*_p9.|old_unigram_.*"
)
_STYLES = {
    "training": ("lines", "solid"), "unigram baseline": ("lines", "dash"),
    "eval": ("lines+markers", "solid"), "dev": ("lines+markers", "solid"),
}  # fmt: skip
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f")
# No address may be loaded, whatever a file of a run contains. Plotly writes styles and makes images of plots.
_HEAD = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:\"><title>bert-jax report</title>"
    "<style>body { font: 15px/1.5 system-ui, sans-serif; margin: 16px; overflow-x: auto } "
    "th, td { border-bottom: 1px solid #ddd; padding: 3px 10px; text-align: right } "
    "th:first-child, td:first-child { text-align: left }</style>"
)
Table = tuple[str, list[str], list[list[Any]]]
"""Caption, heads and rows. A cell is a text, a number or None."""


@dataclass(frozen=True)
class ReportedRun:
    """A run.

    Attributes:
      kind: class of its config.
      splits: rows of its metrics, by split.
      config: values by dotted key; empty without a config.
      phases: the last step before each phase but the first.
      result: metrics of the last evaluation, or of that of `result.json`, and of the last training row.
    """

    name: str
    kind: type[Section]
    splits: Mapping[str, Sequence[Mapping[str, Any]]]
    config: Mapping[str, Any]
    phases: Sequence[int]
    result: Mapping[str, Any]


def read_runs(paths: Sequence[str]) -> list[ReportedRun]:
    """Reads the runs in workdirs, in searches, in studies and in folders of runs.

    Raises InputError for a path without any, and for a damaged file.
    """
    rows: dict[epath.Path, list[dict[str, Any]]] = {}
    for path in paths:
        folder = remote.absolute(path)
        inside = [] if read_metrics(folder) else [*remote.children(folder), *remote.children(folder / "pretraining")]
        with_metrics = {place: found for place in [folder, *inside] if (found := read_metrics(place))}
        if not with_metrics:
            raise InputError(f"{path} has no metrics; pass the --workdir of `bert-jax pretrain`, `finetune` or `study`")
        rows |= with_metrics
    names = [folder.name for folder in rows]
    names = names if len({*names}) == len(names) else [str(folder) for folder in rows]
    runs = []
    for name, (folder, found) in zip(names, rows.items(), strict=True):
        try:
            runs.append(_read_run(name, folder, found))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InputError(f"{folder}: unexpected contents ({type(error).__name__}: {error!s:.99})") from error
    return runs


def _read_run(name: str, folder: epath.Path, rows: Sequence[Mapping[str, Any]]) -> ReportedRun:
    kind = PretrainConfig if any({"mlm_loss", "unigram_loss"} & row.keys() for row in rows) else FinetuneConfig
    config, result = (
        read_json(file) if remote.exists(file) else {} for file in (folder / "config.json", folder / "result.json")
    )
    splits: dict[str, list[Mapping[str, Any]]] = {"training": [], "eval": [], SAMPLES: []}
    for row in rows:
        hours = (row.get("time", math.nan) - rows[0].get("time", math.nan)) / 3600
        numbers = {key: value for key, value in row.items() if isinstance(value, (int, float))}
        splits[row.get("split", "training")].append({**numbers, "hours": hours})
    evaluations = [row for row in splits["eval"] if row["step"] == result.get("step")] or splits["eval"]
    final = {**(splits["training"] or [{}])[-1], **(evaluations or [{}])[-1]}
    return ReportedRun(name, kind, splits, dict(flatten_mapping(kind, config)), _phase_starts(config), final)


def _phase_starts(config: Mapping[str, Any]) -> list[int]:
    steps = [phase["steps"] for phase in config.get("phases", ())]
    rest = config.get("total_steps", 0) - sum(count for count in steps if count != -1)
    return list(itertools.accumulate(rest if count == -1 else count for count in steps))[:-1]


# --- Tables ------------------------------------------------------------------------------------------------------


def results(runs: Sequence[ReportedRun]) -> Table:
    """Returns the scores of each run at the step of its result, or else of its last evaluation."""
    scores = dict.fromkeys(key for run in runs for row in run.splits["eval"] for key in row)
    names = [key for key in scores if not _NO_SCORES.fullmatch(key)]
    keys = list(dict.fromkeys(["step", "tokens_seen", "loss", *names, "tokens_per_second"]))
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
            differs = len({*values}) > 1
            rows.append([f"{key} *" if differs else key, default, *values])
    rows.sort(key=lambda row: not row[0].endswith("*"))
    note = "Settings that differ from the defaults; those with * differ between runs."
    return note, ["key", "default", *(run.name for run in known)], rows


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _markdown(table: Table) -> str:
    note, heads, rows = table
    lines = [heads, ["---"] * len(heads), *([_cell(value) for value in row] for row in rows)]
    text = "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)
    return f"{note}\n\n{text}\n"


def _html(table: Table) -> str:
    note, heads, rows = table
    head = "".join(f"<th>{escape(text)}" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(_cell(value))}" for value in row) for row in rows)
    return f"<p>{escape(note)}</p><table><tr>{head}{body}</table>"


# --- Curves ------------------------------------------------------------------------------------------------------


def curves(run: ReportedRun) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields panel, label and points [n, 4] of each curve: the values on the axes, then that of the metric."""
    for split, rows in [(split, run.splits[split]) for split in ("training", "eval")]:
        for key in dict.fromkeys(key for row in rows for key in row):
            if _NO_CURVES.fullmatch(key):
                continue
            points = np.array([[row.get(axis, math.nan) for axis in (*_AXES, key)] for row in rows if key in row])
            parts = np.array_split(points, min(MOST_POINTS, len(points)))
            part, _, panel = key.removeprefix(OLD).rpartition("/")
            label = "old data" if key.startswith(OLD) else part or split
            if key == "unigram_loss":
                panel, label = "mlm_loss", "unigram baseline"
            yield panel, label, np.stack([part.mean(0) for part in parts])


def make_figure(runs: Sequence[ReportedRun]) -> Any:
    """Returns plotly's figure of runs: a panel for each metric, a color for each run, its phases as dotted lines."""
    from plotly.subplots import make_subplots

    drawn = [(run, *curve) for run in runs for curve in curves(run)]
    known = dict.fromkeys(panel for _, panel, _, _ in drawn)
    middle = [panel for panel in known if panel not in (*_FIRST, *_LAST)]
    panels = [panel for panel in (*_FIRST, *middle, *_LAST) if panel in known]
    down = -(-len(panels) // 2)
    figure = make_subplots(down, 2, subplot_titles=[escape(panel) for panel in panels], vertical_spacing=0.2 / down)
    colors = {run.name: _COLORS[number % len(_COLORS)] for number, run in enumerate(runs)}
    for run, panel, label, points in drawn:
        place, name = panels.index(panel), escape(run.name)
        mode, dash = _STYLES.get(label, ("lines+markers", "dot"))
        figure.add_scatter(
            x=points[:, 0].tolist(), y=points[:, -1].tolist(), name=name, legendgroup=name,
            opacity=0.5 if label == "training" else 1.0,
            showlegend=all(trace.name != name for trace in figure.data),
            mode=mode, line={"color": colors[run.name], "dash": dash},
            hovertemplate=f"{name}, {escape(label)}: %{{y:.5g}} at %{{x:,}}<extra></extra>",
            row=place // 2 + 1, col=place % 2 + 1,
        )  # fmt: skip
    for run in runs:
        for number, step in enumerate(run.phases, 2):
            text = {"text": f"phase {number}", "textposition": "start", "textangle": 0, "xanchor": "left"}
            figure.add_vline(step, line_dash="dot", line_color=colors[run.name], label=text)
    shapes, losses = figure.layout.shapes, [number for number, panel in enumerate(panels, 1) if panel.endswith("loss")]
    choices: list[tuple[str, str, list[Any]]] = [
        (f"by {axis}", "update", [{"x": [points[:, column].tolist() for *_, points in drawn]},
                                  {"shapes": [] if column else shapes}])
        for column, axis in enumerate(_AXES) if not any(np.isnan(points[:, column]).any() for *_, points in drawn)
    ]  # fmt: skip
    for scale in ("linear", "log"):
        choices.append((f"{scale} losses", "relayout", [{f"yaxis{number}.type": scale for number in losses}]))
    buttons = [{"label": label, "method": method, "args": args} for label, method, args in choices]
    menu = {"type": "buttons", "direction": "right", "showactive": False, "x": 0, "y": 1 + 0.12 / down}
    figure.update_xaxes(matches="x", showticklabels=True)
    figure.update_yaxes(tickformat="~g")
    figure.update_layout(
        template="plotly_white", height=90 + 300 * down,
        legend={"orientation": "h", "yanchor": "bottom", "y": 1 + 0.25 / down},
        updatemenus=[{**menu, "xanchor": "left", "yanchor": "bottom", "buttons": buttons}],
    )  # fmt: skip
    return figure


def make_image(figure: Any, image_format: str) -> bytes:
    """Draws the curves of plotly's figure by matplotlib, which needs no browser."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = [unescape(note.text) for note in figure.layout.annotations]
    size = (12, 1 + 1.6 * len(titles))
    drawing, plots = pyplot.subplots(-(-len(titles) // 2), 2, figsize=size, squeeze=False, layout="constrained")
    for plot, title in itertools.zip_longest(plots.flat, titles):
        plot.set_title(title, parse_math=False)
        plot.grid(alpha=0.3)
        plot.set_visible(title is not None)
    lines: dict[str, Any] = {}
    for trace in figure.data:
        style = {"solid": "-", "dash": "--", "dot": ":"}[trace.line.dash] + ("o" if "markers" in trace.mode else "")
        plot = plots.flat[int(trace.yaxis[1:] or 1) - 1]
        [line] = plot.plot(trace.x, trace.y, style, color=trace.line.color, alpha=trace.opacity, markersize=4)
        lines.setdefault(" " + unescape(trace.name).replace("$", r"\$"), line)  # a name with _ would have no entry
    for shape in figure.layout.shapes:
        plots.flat[int(shape.xref[1:] or 1) - 1].axvline(shape.x0, color=shape.line.color, linestyle=":")
    drawing.legend(handles=list(lines.values()), labels=list(lines), loc="outside upper center", ncols=4)
    image = io.BytesIO()
    drawing.savefig(image, format=image_format, dpi=110)
    pyplot.close(drawing)
    return image.getvalue()


# --- Report ------------------------------------------------------------------------------------------------------


def write_report(paths: Sequence[str], output: str) -> list[dict[str, Any]]:
    """Writes a report on runs, as `output` ends: .html, .md without curves, or .png, .svg, .pdf with curves alone.

    Returns the results of each run by the heads of their table. Raises InputError for a path without runs, an image of
    both kinds of runs, and another ending.
    """
    suffix = epath.Path(output).suffix.lower()
    if suffix not in (".html", ".md", ".png", ".svg", ".pdf"):
        raise InputError(f"--output={output}: must end with .html, .md, .png, .svg or .pdf, got {suffix!r}")
    runs = read_runs(paths)
    groups = {name: found for kind, name in _HEADINGS.items() if (found := [run for run in runs if run.kind is kind])}
    tables = {heading: (results(found), settings(found)) for heading, found in groups.items()}
    if suffix == ".html":
        parts = [_HEAD]
        for heading, found in groups.items():
            figure = make_figure(found).to_html(full_html=False, include_plotlyjs=len(parts) == 1)
            parts.append(f"<h1>{heading}</h1>{_html(tables[heading][0])}{figure}{_html(tables[heading][1])}")
        content = "".join(parts).encode()
    elif suffix == ".md":
        texts = [f"# {heading}\n\n{_markdown(first)}\n{_markdown(last)}" for heading, (first, last) in tables.items()]
        content = "\n".join(texts).encode()
    elif len(groups) > 1:
        names = " and ".join(found[0].name for found in groups.values())
        raise InputError(f"{names} are of pre-training and of fine-tuning; use --output=report.html for both")
    else:
        content = make_image(make_figure(runs), suffix[1:])
    atomic.write_whole(remote.parse_path(output), content)
    return [dict(zip(heads, row, strict=True)) for (_, heads, rows), _ in tables.values() for row in rows]
