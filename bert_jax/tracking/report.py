"""`bert-jax report`: one self-contained HTML page on runs, searches and studies, or an image of curves.

Plotly draws the page, which loads nothing; matplotlib draws images. Every text of a file is escaped.
"""

import io
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

from etils import epath

from bert_jax.config_keys import FinetuneConfig, PretrainConfig
from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.files.format_versions import read_json
from bert_jax.sections import flatten, flatten_mapping
from bert_jax.tracking.metrics import OLD, SAMPLES, read_metrics

MOST_POINTS = 2000
"""Training rows of a run that are drawn; of more, each point is the mean of as many rows as needed."""
SMOOTHED_ROWS = 10
"""Logged training rows whose running mean is drawn over them."""
IMAGES = (".png", ".svg", ".pdf")
PRETRAINING, FINETUNING = "pretraining", "finetuning"
_HEADINGS = {PRETRAINING: "Pre-training", FINETUNING: "Fine-tuning"}
_CUMULATIVE = ("step", "hours", "tokens_seen", "examples_seen", "nonfinite_steps")
_AXES = {"step": "step", "tokens_seen": "tokens", "examples_seen": "sequences", "hours": "hours"}
_NOT_SCORES = {"step", "split", "time", "data", "sequences", "tokens_seen", "examples_seen"}
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f")
_SHOWN_EVALUATIONS = 8  # columns of a table of samples
# No address may be loaded, whatever a file of a run contains. Plotly writes styles and makes images of plots.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1400px; margin: 0 auto; padding: 0 16px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 8px 0; }
th, td { border-bottom: 1px solid #ddd; padding: 3px 10px; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td.changed { background: #fff3c4; }
td.right { background: #d9f2d9; }
"""

Row = dict[str, Any]


@dataclass(frozen=True)
class ReportedRun:
    """A run: its `kind`, PRETRAINING or FINETUNING, the rows of its metrics, its config by key and its result."""

    name: str
    kind: str
    rows: list[Row]
    config: Mapping[str, Any]
    result: Mapping[str, Any]

    def split(self, name: str | None) -> list[Row]:
        """Returns the rows of a split; None is training."""
        return [row for row in self.rows if row.get("split") == name]


@dataclass(frozen=True)
class Line:
    """A curve of each run: a metric of a split. `style` is smoothed, plain, points or dashed."""

    key: str
    style: str = "smoothed"
    label: str = "training"
    split: str | None = None


@dataclass(frozen=True)
class Panel:
    """A plot. `log` panels can have a logarithmic axis."""

    title: str
    lines: Sequence[Line]
    log: bool = False


# --- Reading -----------------------------------------------------------------------------------------------------


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Raises InputError, with the source's name, for contents that have another structure than the reader expects."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"{source}: unexpected structure ({type(error).__name__}: {error!s:.120}); write it again"
        ) from error


def find_runs(path: str) -> list[epath.Path]:
    """Returns the workdirs of a path: itself, the trials of a search, or the pre-training runs of a study.

    Raises InputError if it has none, and is not a search or a study.
    """
    folder = remote.parse_path(path)
    if read_metrics(folder):
        return [folder]
    inside = folder / "pretraining" if remote.exists(folder / "table.json") else folder
    found = [child for child in remote.children(inside) if child.is_dir() and read_metrics(child)]
    if found or any(remote.exists(folder / file) for file in ("search.json", "table.json")):
        return found
    raise InputError(
        f"{path} has no metrics; pass the --workdir of `bert-jax pretrain`, `finetune` or `study`, or of a search"
    )


def read_run(name: str, folder: epath.Path) -> ReportedRun:
    """Reads the metrics of a workdir, its config and its result; the last two may be missing."""
    rows = read_metrics(folder)
    is_pretraining = any(row.keys() & {"mlm_loss", "unigram_loss"} for row in rows)
    keys: Any = PretrainConfig if is_pretraining else FinetuneConfig
    config, result = (
        read_json(file) if remote.exists(file) else {} for file in (folder / "config.json", folder / "result.json")
    )
    kind = PRETRAINING if is_pretraining else FINETUNING
    return ReportedRun(name, kind, rows, dict(flatten_mapping(keys, config)), result)


def _short_names(folders: Sequence[epath.Path]) -> list[str]:
    """Returns a unique name of each folder: the last parts of its path, as many as needed."""
    parts = [[part for part in remote.absolute(str(folder)).parts if part != "/"] for folder in folders]
    names: list[str] = []
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(found[-count:]) for found in parts]
        if len({*names}) == len(names):
            break
    return names


# --- Curves ------------------------------------------------------------------------------------------------------


def make_panels(runs: Sequence[ReportedRun]) -> list[Panel]:
    """Returns the panels of runs of one kind, with the lines that have a value in at least one run."""
    keys = {(row.get("split"), key) for run in runs for row in run.rows for key in row}
    panels = []
    if runs[0].kind == PRETRAINING:
        for key, title in (
            ("mlm_loss", "Masked-LM loss (nats)"), ("mlm_accuracy", "Masked-LM accuracy"),
            ("nsp_loss", "Next-sentence loss (nats)"), ("nsp_accuracy", "Next-sentence accuracy"),
        ):  # fmt: skip
            lines = [Line(key), Line(key, "points", "eval", "eval"), Line(f"{OLD}{key}", "points", "old data", "eval")]
            if key == "mlm_loss":
                lines.append(Line("unigram_loss", "dashed", "unigram baseline", "eval"))
            panels.append(Panel(title, lines, log=key.endswith("loss")))
    else:
        panels.append(Panel("Training loss", [Line("loss")], log=True))
        scores: dict[str, list[Line]] = {}
        for split, key in sorted((split, key) for split, key in keys if split == "eval" and "/" in key):
            of, _, metric = key.rpartition("/")
            scores.setdefault(metric, [Line(metric)]).append(Line(key, "points", of, split))
        panels += [Panel(metric, lines) for metric, lines in scores.items()]
    panels += [
        Panel("Learning rate", [Line("learning_rate", "plain")]),
        Panel("Gradient norm, before clipping", [Line("grad_norm")], log=True),
        Panel("Tokens per second", [Line("tokens_per_second")]),
        Panel("Seconds per step (median)", [Line("step_seconds_p50")], log=True),
        Panel("Model FLOPs utilization", [Line("mfu")]),
        Panel("Share of the time waiting for input", [Line("input_wait_share")]),
        Panel("Skipped steps, not finite", [Line("nonfinite_steps", "plain")]),
    ]
    shown = [
        Panel(one.title, [line for line in one.lines if (line.split, line.key) in keys], one.log) for one in panels
    ]
    return [panel for panel in shown if panel.lines]


def columns(run: ReportedRun, split: str | None) -> dict[str, list[Any]]:
    """Returns each metric of a split as a column, and `hours` since the first row; None where there is no value.

    Of more than `MOST_POINTS` rows each point is a mean, at the last step.
    """
    rows = run.split(split)
    first = min((row["time"] for row in run.rows if "time" in row), default=0.0)
    rows = [{**row, **({"hours": (row["time"] - first) / 3600} if "time" in row else {})} for row in rows]
    group = -(-len(rows) // MOST_POINTS) or 1
    parts = [rows[start : start + group] for start in range(0, len(rows), group)]
    names = dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, str | None))
    return {name: [_point([row.get(name) for row in part], name in _CUMULATIVE) for part in parts] for name in names}


def _point(values: Sequence[float | None], is_cumulative: bool) -> float | None:
    found = [value for value in values if value is not None and math.isfinite(value)]
    return None if not found else found[-1] if is_cumulative or len(found) == 1 else _mean(found)


def curve(table: Mapping[str, list[Any]], key: str) -> dict[str, list[Any]]:
    """Returns the points of a metric: its values as `y`, and the value on each x axis that all of them have."""
    places = [place for place, value in enumerate(table.get(key, ())) if value is not None]
    axes = {axis: [table[axis][place] for place in places] for axis in _AXES if axis in table}
    return {"y": [table[key][place] for place in places], **{k: v for k, v in axes.items() if None not in v}}


def running_mean(values: Sequence[float]) -> list[float]:
    """Returns the mean of each value and those before it, `SMOOTHED_ROWS` at most."""
    return [_mean(values[max(0, place + 1 - SMOOTHED_ROWS) : place + 1]) for place in range(len(values))]


def _mean(values: Sequence[float]) -> float:
    return float(f"{statistics.fmean(values):.6g}")


def phase_starts(config: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Returns the last step before each phase but the first, and a label with the keys that the phase changes."""
    phases, total = config.get("phases") or (), config.get("total_steps") or 0
    fixed = sum(phase["steps"] for phase in phases if phase["steps"] != -1)
    starts, step = [], 0
    for number, phase in enumerate(phases):
        changed = ", ".join(f"{key}={value}" for key, value in phase.items() if key != "steps")
        starts.append((step, f"phase {number + 1}: {changed}"))
        step += phase["steps"] if phase["steps"] != -1 else total - fixed
    return starts[1:]


def _figure(runs: Sequence[ReportedRun], panels: Sequence[Panel]) -> str:
    """Returns the curves of runs of one kind as HTML: a panel in each cell, a color for each run."""
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    down = -(-len(panels) // 2)
    figure = make_subplots(
        down, 2, subplot_titles=[escape(panel.title) for panel in panels], vertical_spacing=0.25 / down
    )
    places = [(number // 2 + 1, number % 2 + 1) for number in range(len(panels))]
    points: list[dict[str, list[Any]]] = []
    for number, run in enumerate(runs):
        color, name, is_named = _COLORS[number % len(_COLORS)], escape(run.name), False
        tables = {split: columns(run, split) for split in (None, "eval")}
        for panel, (row, column) in zip(panels, places, strict=True):
            for line in panel.lines:
                found = curve(tables[line.split], line.key)
                if not found["y"]:
                    continue
                y = found["y"]
                smooth = line.style == "smoothed" and len(y) > 1
                for values, opacity in [(y, 0.25), (running_mean(y), 1.0)] if smooth else [(y, 1.0)]:
                    figure.add_trace(
                        graph_objects.Scatter(
                            x=found["step"], y=values, opacity=opacity, legendgroup=name, name=name,
                            showlegend=not is_named and opacity == 1.0, line_color=color,
                            line_dash="dash" if line.style == "dashed" else None, mode=_mode(line),
                            hovertemplate=f"{name}, {escape(line.label)}: %{{y:.5g}} at %{{x:,}}<extra></extra>",
                        ),
                        row, column,
                    )  # fmt: skip
                    points.append(found)
                is_named = True
        for step, label in phase_starts(run.config):
            text = {"text": escape(label), "textangle": 90, "font": {"size": 9}}
            figure.add_vline(step, line_dash="dot", line_color=color, opacity=0.5, label=text)
    axes = [axis for axis in _AXES if all(axis in found for found in points)]
    figure.update_xaxes(matches="x", showticklabels=True)
    figure.update_layout(
        template="plotly_white", height=90 + 310 * down, hovermode="closest",
        legend={"orientation": "h", "y": 1.0 + 0.25 / down, "yanchor": "bottom"},
        updatemenus=[
            _buttons(0.0, down, [
                (f"by {_AXES[axis]}", "update",
                 [{"x": [found[axis] for found in points]}, {"shapes": figure.layout.shapes if axis == "step" else []}])
                for axis in axes
            ]),
            _buttons(0.5, down, [
                (f"{kind} scale", "relayout", [{
                    f"yaxis{number or ''}.type": kind
                    for number, panel in zip([0, *range(2, len(panels) + 1)], panels, strict=False) if panel.log
                }])
                for kind in ("linear", "log")
            ]),
        ],
    )  # fmt: skip
    return str(figure.to_html(full_html=False, include_plotlyjs=False))


def _mode(line: Line) -> str:
    return "markers+lines" if line.style == "points" else "lines"


def _buttons(x: float, down: int, choices: Iterable[tuple[str, str, list[Any]]]) -> dict[str, Any]:
    buttons = [{"label": label, "method": method, "args": args} for label, method, args in choices]
    place = {"x": x, "y": 1.0 + 0.12 / down, "xanchor": "left", "yanchor": "bottom"}
    return {"type": "buttons", "direction": "right", "buttons": buttons, **place}


# --- Tables ------------------------------------------------------------------------------------------------------


def table(heads: Sequence[object], rows: Iterable[Sequence[object]], note: str = "") -> str:
    """Returns a table in HTML below its note. Cells are texts or numbers; one that begins with `<td` is HTML."""

    def cell(value: object) -> str:
        if isinstance(value, str) and value.startswith("<td"):
            return value
        text = "–" if value is None else str(value)
        if isinstance(value, (int, float)):
            text = f"{value:,.5g}" if isinstance(value, float) else f"{value:,}"
        return f"<td>{escape(text)}</td>"

    head = "".join(f"<th>{escape(str(text))}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f'<p>{escape(note)}</p><div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def results(runs: Sequence[ReportedRun]) -> str:
    """Returns the scores of each run at the step of its result, or else of its last evaluation."""
    found = []
    for run in runs:
        evaluations = run.split("eval")
        of_result = [row for row in evaluations if row["step"] == run.result.get("step")]
        found.append([*evaluations, *of_result][-1] if evaluations else {})
    keys = list(dict.fromkeys(key for row in found for key in row if key not in _NOT_SCORES))
    rows = []
    for run, row in zip(runs, found, strict=True):
        last = (run.split(None) or [{}])[-1]
        numbers = [row.get("step", last.get("step")), row.get("tokens_seen", last.get("tokens_seen"))]
        rows.append([run.name, *numbers, last.get("loss"), *(row.get(key) for key in keys)])
    note = (
        "Scores on held-out examples, of the last evaluation or of the best (keep_best). unigram_loss is the baseline."
    )
    return table(["run", "step", "tokens seen", "training loss", *keys], rows, note)


def settings(runs: Sequence[ReportedRun], kind: str) -> str:
    """Returns the keys whose value is not the default in some run, first those that differ between runs."""
    if not (known := [run for run in runs if run.config]):
        return ""
    defaults = dict(flatten(PretrainConfig() if kind == PRETRAINING else FinetuneConfig()))
    rows = []
    for key in dict.fromkeys([*defaults, *(key for run in known for key in run.config)]):
        default, *values = (json.dumps(of.get(key, defaults.get(key))) for of in ({}, *(run.config for run in known)))
        differs = len({*values}) > 1
        if {*values} != {default}:
            cells = [f'<td class="changed">{escape(text)}</td>' if text != default else text for text in values]
            rows.append((not differs, [key + " *" * differs, default, *cells]))
    rows.sort(key=lambda row: row[0])
    note = "Keys that differ from the defaults; those with * differ between runs."
    return table(["key", "default", *(run.name for run in known)], [cells for _, cells in rows], note)


def samples(run: ReportedRun) -> str:
    """Returns a table for each masked text: a row for each mask, a column for each evaluation (evenly chosen)."""
    by_text: dict[str, list[tuple[int, Any]]] = {}
    for row in run.split(SAMPLES):
        for sample in row["samples"]:
            by_text.setdefault(sample["text"], []).append((row["step"], sample["masks"]))
    parts = []
    for text, fills in by_text.items():
        count = min(_SHOWN_EVALUATIONS, len(fills))
        chosen = [fills[round(place * (len(fills) - 1) / max(1, count - 1))] for place in range(count)]
        rows = [
            [mask["target"], *(_fill(masks[place]) for _, masks in chosen)] for place, mask in enumerate(chosen[0][1])
        ]
        parts.append(table(["target", *(f"step {step:,}" for step, _ in chosen)], rows, text))
    return f"<details><summary>Words filled in by {escape(run.name)}</summary>{''.join(parts)}</details>"


def _fill(mask: Mapping[str, Any]) -> str:
    word, probability = mask["fills"][0]
    kind = ' class="right"' if word == mask["target"] else ""
    return f"<td{kind}>{escape(word)} {probability:.0%}</td>"


def search_table(name: str, search: Mapping[str, Any]) -> str:
    """Returns the scores of a search by learning rate; the best median chooses the rate."""
    rows = []
    for rate, found in search["by_learning_rate"].items():
        scores = list(found["scores"].values())
        spread = statistics.stdev(scores) if len(scores) > 1 else None
        mark = " (chosen)" if float(rate) == float(search["learning_rate"]) else ""
        rows.append([rate + mark, len(scores), statistics.fmean(scores), spread, found["median"], *map(str, scores)])
    heads = ["learning rate", "seeds", "mean", "standard deviation", "median", "scores"]
    return f"<h2>Search {escape(name)}</h2>" + table(heads, rows, f"{search['metric']} on the first scored split.")


def study_table(name: str, study: Mapping[str, Any]) -> str:
    """Returns the scores of a study: mean ± standard deviation over n seeds of fine-tuning, and the paper's."""
    rows = []
    for row in study["rows"]:
        cells: list[Any] = [row["name"]]
        for column in study["columns"]:
            cell = row["columns"].get(column) or {}
            spread = "" if cell.get("deviation") is None else f" ± {cell['deviation']:.2f}"
            shown = None if cell.get("mean") is None else f"{cell['mean']:.2f}{spread} (n={len(cell['values'])})"
            cells += [shown, cell.get("paper")]
        pretraining = row.get("pretraining") or {}
        rows.append([*cells, pretraining.get("steps"), pretraining.get("mlm_loss")])
    heads = ["", *(head for column in study["columns"] for head in (column, "paper")), "steps", "MLM loss (nats)"]
    note = "Deviations are over seeds of fine-tuning alone: each row rests on one pre-training run."
    return f"<h2>{escape(study.get('title') or name)}</h2>" + table(heads, rows, note)


# --- The page and the image --------------------------------------------------------------------------------------


def make_page(paths: Sequence[str]) -> str:
    """Returns the report on workdirs, searches and studies as an HTML document. InputError for other paths."""
    from plotly.offline import get_plotlyjs

    parts, folders = [], []
    for path in paths:
        folder = remote.parse_path(path)
        for file, make in ((folder / "search.json", search_table), (folder / "table.json", study_table)):
            if remote.exists(file):
                with naming(str(file)):
                    parts.append(make(folder.name, read_json(file)))
        folders += find_runs(path)
    runs = [read_run(name, folder) for name, folder in zip(_short_names(folders), folders, strict=True)]
    for kind, heading in _HEADINGS.items():
        if of_kind := [run for run in runs if run.kind == kind]:
            with naming(", ".join(run.name for run in of_kind)):
                parts += [
                    f"<h2>{heading}</h2>", results(of_kind), _figure(of_kind, make_panels(of_kind)),
                    settings(of_kind, kind), *(samples(run) for run in of_kind if run.split(SAMPLES)),
                ]  # fmt: skip
    title = escape("bert-jax report: " + ", ".join([run.name for run in runs[:3]] or paths) + " ..." * (len(runs) > 3))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><title>{title}</title>'
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head>\n"
        f"<body><h1>{title}</h1>\n{''.join(parts)}</body></html>\n"
    )


def make_image(paths: Sequence[str], image_format: str) -> bytes:
    """Draws the curves of runs of one kind as an image. Raises InputError for runs of both kinds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folders = [folder for path in paths for folder in find_runs(path)]
    runs = [read_run(name, folder) for name, folder in zip(_short_names(folders), folders, strict=True)]
    if len({run.kind for run in runs}) > 1:
        names = " and ".join(next(run.name for run in runs if run.kind == kind) for kind in _HEADINGS)
        raise InputError(f"{names} are of pre-training and of fine-tuning; use --output=report.html for both")
    with naming(", ".join(paths)):
        panels = make_panels(runs)
        down = -(-len(panels) // 3)
        figure, plots = pyplot.subplots(down, 3, figsize=(16.5, 3.5 * down), squeeze=False, layout="constrained")
        for plot in plots.flat[len(panels) :]:
            plot.set_visible(False)
        for panel, plot in zip(panels, plots.flat, strict=False):
            plot.set_title(_literal(panel.title))
            plot.grid(alpha=0.3)
            for number, run in enumerate(runs):
                for line in panel.lines:
                    found = curve(columns(run, line.split), line.key)
                    if not found["y"]:
                        continue
                    style = {"points": "o-", "dashed": "--"}.get(line.style, "-")
                    label, color = _literal(f"{run.name}, {line.label}"), _COLORS[number % len(_COLORS)]
                    y = found["y"]
                    if line.style == "smoothed":
                        plot.plot(found["step"], y, style, color=color, alpha=0.25)
                        y = running_mean(y)
                    plot.plot(found["step"], y, style, color=color, label=label, markersize=4)
            plot.legend(fontsize="small")
        image = io.BytesIO()
        figure.savefig(image, format=image_format, dpi=110)
        pyplot.close(figure)
    return image.getvalue()


def _literal(label: str) -> str:
    """Returns a label that matplotlib shows as it is: it sets formulas between $, and skips what begins with _."""
    return (" " if label.startswith("_") else "") + label.replace("$", r"\$")


def write_report(paths: Sequence[str], output: str) -> None:
    """Writes a report on runs, searches and studies, as `output` ends: .html, .png, .svg or .pdf.

    Images have the curves of runs alone. Raises InputError for a path without anything to report, and for another
    ending.
    """
    suffix = epath.Path(output).suffix.lower()
    if suffix == ".html":
        content = make_page(paths).encode()
    elif suffix in IMAGES:
        content = make_image(paths, suffix[1:])
    else:
        raise InputError(f"--output={output}: must end with .html, .png, .svg or .pdf, got {suffix!r}")
    atomic.write_whole(remote.parse_path(output), content)
