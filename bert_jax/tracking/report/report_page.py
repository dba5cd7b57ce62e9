"""`bert-jax report`: one self-contained HTML file for runs, searches, studies and compiled steps, or an image.

The page loads nothing: plotly's script, the curves as JSON, `page.js` and `page.css` are in the file.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources

from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.tracking.metrics import finite_json
from bert_jax.tracking.report import report_tables as tables
from bert_jax.tracking.report.curve_data import make_curves, make_panels
from bert_jax.tracking.report.reported_runs import (
    FINETUNING,
    PRETRAINING,
    Reported,
    ReportedRun,
    naming,
    read_reported,
)

IMAGES = (".png", ".svg", ".pdf")
# No address may be loaded, whatever a file of a run contains. plotly writes styles and makes images of plots.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_OPEN_SAMPLES = 1  # runs whose samples are unfolded

Section = tuple[str, str, str]
"""Identifier, heading and HTML."""


def write_report(paths: Sequence[str], output: str) -> None:
    """Writes a report on runs, searches, studies and compiled steps, as `output` ends: .html, .png, .svg or .pdf.

    Images have the curves of runs alone. Raises InputError for a path without anything to report, and for another
    ending.
    """
    suffix = epath.Path(output).suffix.lower()
    if suffix in IMAGES:
        from bert_jax.tracking.report.curve_images import plot_curves  # matplotlib takes a second

        plot_curves(paths, output)
    elif suffix == ".html":
        atomic.write_whole(remote.parse_path(output), make_page(read_reported(paths)).encode())
    else:
        raise InputError(f"--output={output}: must end with .html, .png, .svg or .pdf, got {suffix!r}")


def make_page(reported: Reported) -> str:
    """Returns the report as an HTML document."""
    from plotly.offline import get_plotlyjs

    colors = {run.name: number for number, run in enumerate(reported.runs)}
    sections, plots = [], []
    for kind, heading, results in (
        (PRETRAINING, "Pre-training", tables.pretraining_results),
        (FINETUNING, "Fine-tuning", tables.finetuning_results),
    ):
        if runs := reported.of_kind(kind):
            with naming(", ".join(run.name for run in runs)):
                panels, curves = make_panels(runs), [make_curves(run, colors[run.name]) for run in runs]
                sections.append((kind, heading, _run_section(kind, runs, panels, results)))
            plots.append({"id": kind, "panels": panels, "runs": curves})
    searches = [(name, partial(tables.search_table, name, content)) for name, content in reported.searches]
    studies = [(study.name, partial(tables.study_tables, study)) for study in reported.studies]
    compiled = [(name, partial(tables.compiled_tables, name, content)) for name, content in reported.compiled]
    for identifier, heading, drawings in (
        ("searches", "Searches", searches), ("studies", "Studies", studies), ("compiled", "Compiled steps", compiled),
    ):  # fmt: skip
        parts = []
        for name, draw in drawings:
            with naming(name):
                parts.append(draw())
        if parts:
            sections.append((identifier, heading, "".join(parts)))
    title = "bert-jax report: " + (", ".join(run.name for run in reported.runs[:3]) or sections[0][1])
    if len(reported.runs) > 3:
        title += f" and {len(reported.runs) - 3} more"
    folder = resources.files("bert_jax.tracking.report")
    style, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    # "<" is escaped, so that no text of a file ends the script.
    data = finite_json({"sections": plots}, separators=(",", ":")).replace("<", "\\u003c")
    scripts = (
        f'<script type="application/json" id="data">{data}</script>\n<script>{get_plotlyjs()}</script>\n'
        f"<script>{script}</script>\n"
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{tables.escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<header><h1>{tables.escape(title)}</h1>{_contents(sections)}</header>\n"
        f"{_CONTROLS if plots else _THEME_ONLY}\n<main>\n{''.join(map(_section, sections))}</main>\n"
        f"{scripts}</body>\n</html>\n"
    )


def _contents(sections: Sequence[Section]) -> str:
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in sections)
    return f'<nav aria-label="Sections">{links}</nav>'


def _section(section: Section) -> str:
    name, heading, content = section
    return f'<section id="{name}"><h2>{heading}</h2>{content}</section>\n'


def _run_section(
    kind: str, runs: Sequence[ReportedRun], panels: Sequence[dict], results: Callable[[Sequence[ReportedRun]], str]
) -> str:
    titles = [tables.escape(panel["title"]) for panel in panels]
    plots = "".join(
        f'<figure class="panel"><figcaption>{title}</figcaption>'
        f'<div class="plot" id="{kind}-{number}" role="img" aria-label="{title}"></div></figure>'
        for number, title in enumerate(titles)
    )
    parts = [
        results(runs),
        f'<div class="legend" id="{kind}-legend" role="group" aria-label="Runs shown"></div>',
        f'<p class="key" id="{kind}-key"></p><div class="panels">{plots}</div>',
    ]
    if sampled := [run for run in runs if run.samples]:
        parts.append(
            "<h3>Words filled in over time</h3><p>Most probable word for each mask of fixed held-out texts.</p>"
        )
        parts += [
            f"<details{' open' if place < _OPEN_SAMPLES else ''}><summary>{tables.escape(run.name)}</summary>"
            f"{tables.samples_over_time(run)}</details>"
            for place, run in enumerate(sampled)
        ]
    parts.append(f"<h3>Config</h3>{tables.config_differences(runs, kind)}")
    parts += [tables.full_config(run) for run in runs if run.config]
    return "".join(parts)


_THEME = (
    '<label>Colors <select id="theme"><option value="auto">as the system</option><option value="light">light</option>'
    '<option value="dark">dark</option></select></label>'
)
_THEME_ONLY = f'<div class="controls">{_THEME}</div>'
_CONTROLS = (
    '<div class="controls"><label>X axis <select id="x"></select></label>'
    '<label>Y axis <select id="y"><option value="linear">linear</option><option value="log">logarithmic</option>'
    "</select></label>"
    '<label>Smoothing <input id="smoothing" type="range" min="1" max="100" value="10">'
    '<output id="smoothed" for="smoothing">10 rows</output></label>'
    f"{_THEME}</div><noscript><p>Curves need JavaScript; the tables do not.</p></noscript>"
)
