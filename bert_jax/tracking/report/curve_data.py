"""Curves of a report as JSON: the panels of each kind of run, and the columns of each run."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bert_jax.tracking.metrics import OLD
from bert_jax.tracking.report.reported_runs import PRETRAINING, ReportedRun, Rows

MOST_POINTS = 2000
"""Training rows of a run that are drawn; of more, each point is the mean of as many rows as needed."""
_DIGITS = 6  # significant digits of a value
_CUMULATIVE = ("step", "hours", "tokens_seen", "examples_seen", "nonfinite_steps")

Line = dict[str, Any]
"""A curve of each run in a panel: its `key` in the columns of a `split`, a `label`, and the `style` that `page.js`
draws: smoothed, plain, points (evaluations), dashed (a baseline, or a percentile) or steps (a count)."""
Panel = dict[str, Any]
"""A plot: `id`, `title`, `lines`, whether its y axis may be logarithmic (`log`) and is a share (`percent`), and the
`rule`, a constant with its label."""

SCORE_TITLES = {
    "accuracy": "Accuracy", "f1": "F1", "f1_macro": "F1, mean over labels", "matthews": "Matthews correlation",
    "pearson": "Pearson correlation", "spearman": "Spearman correlation", "precision": "Precision",
    "recall": "Recall", "exact_match": "Exact match (%)", "exact": "Exact match (%)",
    "best_f1": "F1 at the best threshold (%)", "best_exact": "Exact match at the best threshold (%)",
}  # fmt: skip


def _line(key: str, style: str = "smoothed", label: str = "", split: str = "train") -> Line:
    return {"key": key, "style": style, "label": label, "split": split}


def _evaluated(key: str) -> list[Line]:
    old = _line(f"{OLD}{key}", "points", "eval, old domain", "eval")
    return [_line(key, label="training"), _line(key, "points", "eval", "eval"), old]


def _panel(
    name: str, title: str, lines: Sequence[Line] = (), *, log: bool = False, percent: bool = False,
    rule: tuple[float, str] | None = None,
) -> Panel:  # fmt: skip
    return {
        "id": name, "title": title, "lines": list(lines) or [_line(name)], "log": log, "percent": percent,
        "rule": rule and {"y": rule[0], "label": rule[1]},
    }  # fmt: skip


_SHARED_PANELS = (
    _panel("learning_rate", "Learning rate", [_line("learning_rate", "plain")]),
    _panel("grad_norm", "Gradient norm, before clipping", log=True),
    _panel("tokens_per_second", "Throughput (tokens/s, with padding)"),
    _panel("real_tokens_per_second", "Throughput (tokens/s, without padding)"),
    _panel("examples_per_second", "Throughput (sequences/s)"),
    _panel(
        "step_seconds", "Step time (s)",
        [_line("step_seconds_p50", label="median"), _line("step_seconds_p99", "dashed", "99th percentile")], log=True,
    ),
    _panel("mfu", "Model FLOPs utilization", percent=True),
    _panel("input_wait_share", "Time waiting for input", percent=True),
    _panel("nonfinite_steps", "Skipped steps, not finite (cumulative)", [_line("nonfinite_steps", "steps")]),
)  # fmt: skip
_PRETRAINING_PANELS = (
    _panel(
        "mlm_loss", "Masked-LM loss (nats)",
        [*_evaluated("mlm_loss"), _line("unigram_loss", "dashed", "unigram baseline", "eval")], log=True,
    ),
    _panel("mlm_accuracy", "Masked-LM accuracy", _evaluated("mlm_accuracy"), percent=True),
    _panel("nsp_loss", "Next-sentence loss (nats)", _evaluated("nsp_loss"), log=True),
    _panel(
        "nsp_accuracy", "Next-sentence accuracy", _evaluated("nsp_accuracy"), percent=True, rule=(0.5, "chance")
    ),
    *_SHARED_PANELS,
)  # fmt: skip
_PERCENTAGES = ("exact_match", "exact", "best_f1", "best_exact")  # scores of SQuAD, which are from 0 to 100


def make_panels(runs: Sequence[ReportedRun]) -> list[Panel]:
    """Returns the panels of runs of one kind: those with a value in at least one run."""
    keys = {
        (row.get("split") or "train", key) for run in runs for row in run.rows for key, value in row.items()
        if isinstance(value, (int, float))
    }  # fmt: skip
    if all(run.kind == PRETRAINING for run in runs):
        panels: Sequence[Panel] = _PRETRAINING_PANELS
    else:
        panels = (_panel("loss", "Training loss", log=True), *_score_panels(runs), *_SHARED_PANELS)

    def is_shown(line: Line) -> bool:
        return (line["split"], line["key"]) in keys or not line["key"].startswith(OLD)

    panels = [{**panel, "lines": [line for line in panel["lines"] if is_shown(line)]} for panel in panels]
    return [panel for panel in panels if any((line["split"], line["key"]) in keys for line in panel["lines"])]


def _score_panels(runs: Sequence[ReportedRun]) -> list[Panel]:
    """Returns a panel for each score of fine-tuning, with a line for each split."""
    lines: dict[str, dict[str, Line]] = {}
    for key in (key for run in runs for row in run.split("eval") for key in row if "/" in key):
        split, _, metric = key.rpartition("/")
        lines.setdefault(metric, {})[key] = _line(key, "points", split, "eval")
    panels = []
    for metric, found in lines.items():
        trained = [_line(metric, label="training")] if metric == "accuracy" else []
        are_percentages = metric in _PERCENTAGES or any(
            (row.get(key) or 0) > 1 for key in found for run in runs for row in run.split("eval")
        )
        title = SCORE_TITLES.get(metric, metric)
        panels.append(_panel(metric, title, [*trained, *found.values()], percent=not are_percentages))
    return panels


def make_curves(run: ReportedRun, color: int) -> dict[str, Any]:
    """Returns the columns of a run by split, its phases, and the number of rows in a point of its training curves."""
    first = min((row["time"] for row in run.rows if "time" in row), default=None)
    training = run.split(None)
    group = -(-len(training) // MOST_POINTS) or 1
    return {
        "name": run.name, "kind": run.kind, "color": color, "rows_a_point": group,
        "train": _columns(training, first, group), "eval": _columns(run.split("eval"), first, 1),
        "phases": phase_starts(run.config),
    }  # fmt: skip


def _columns(rows: Rows, first: float | None, group: int) -> dict[str, list[Any]]:
    """Returns each metric as a column, and `hours` since the time `first`; means of `group` rows, at the last step."""
    keys = dict.fromkeys(key for row in rows for key, value in row.items() if isinstance(value, (int, float)))
    columns: dict[str, list[Any]] = {key: [row.get(key) for row in rows] for key in keys}
    if first is not None and (times := columns.pop("time", None)):
        columns["hours"] = [None if time is None else (time - first) / 3600 for time in times]
    if group > 1:
        parts = [slice(start, start + group) for start in range(0, len(rows), group)]
        columns = {
            key: [column[part][-1] if key in _CUMULATIVE else _mean(column[part]) for part in parts]
            for key, column in columns.items()
        }
    return {key: [_shortened(value) for value in column] for key, column in columns.items()}


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


def _shortened(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")


def phase_starts(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns `step`, the last step before it, and a `label` with the changed keys, of each phase but the first."""
    phases, total = config.get("phases") or (), config.get("total_steps") or 0
    fixed = sum(phase["steps"] for phase in phases if phase["steps"] != -1)
    starts, step = [], 0
    for number, phase in enumerate(phases):
        if number:
            changed = ", ".join(f"{key}={value}" for key, value in phase.items() if key != "steps")
            starts.append({"step": step, "label": f"phase {number + 1}" + (f": {changed}" if changed else "")})
        step += phase["steps"] if phase["steps"] != -1 else total - fixed
    return starts
