"""Images of the curves of runs: of pre-training with the unigram baseline, or of fine-tuning with its scores."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from etils import epath

matplotlib.use("Agg")
from matplotlib import pyplot

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.tracking.metrics import OLD
from bert_jax.tracking.report.reported_runs import Rows, naming, read_rows

PRETRAINING = {
    "mlm_loss": "MLM loss (nats)", "mlm_accuracy": "MLM accuracy", "nsp_loss": "NSP loss (nats)",
    "nsp_accuracy": "NSP accuracy",
}  # fmt: skip
FINETUNING = {"loss": "training loss", "learning_rate": "learning rate", "grad_norm": "gradient norm"}
SCORES = {
    "accuracy": "accuracy", "f1": "F1", "f1_macro": "F1, mean over labels", "matthews": "Matthews correlation",
    "pearson": "Pearson correlation", "spearman": "Spearman correlation", "precision": "precision",
    "recall": "recall", "exact_match": "exact match (%)", "exact": "exact match (%)",
    "best_f1": "F1 at the best threshold (%)",
}  # fmt: skip
"""Panel titles by metric name; other scores are not drawn."""
SMOOTHING_ROWS = 10  # logged training rows that are averaged for a point


def plot_curves(workdirs: Sequence[str], output: str) -> None:
    """Draws the curves of one run, or of several side by side, into the image file `output` (.png, .svg, .pdf).

    Faint lines are training steps, solid lines their running mean. For pre-training, dots are evaluations, squares
    those on the old domain, the dashed line is the loss of the unigram baseline, and untrained heads have no panel.
    For fine-tuning, every score has a panel with a line for each split.

    Raises:
      InputError: a workdir has no metrics, or runs of pre-training and of fine-tuning are mixed.
    """
    with naming(", ".join(workdirs)):
        image = _image(workdirs, epath.Path(output).suffix.lower()[1:])
    atomic.write_whole(remote.parse_path(output), image)


def _literal(label: str) -> str:
    """Returns a label that matplotlib shows as it is: it sets formulas between $, and skips what begins with _."""
    return (" " if label.startswith("_") else "") + label.replace("$", r"\$")


def _image(workdirs: Sequence[str], image_format: str) -> bytes:
    runs = {workdir: read_rows(workdir) for workdir in workdirs}
    names = {workdir: remote.absolute(workdir).name for workdir in runs}
    are_different = len(set(names.values())) == len(names)
    labels = {workdir: _literal(name if are_different else workdir) for workdir, name in names.items()}
    panels = _panels(runs)
    across = 2 if len(panels) <= 4 else 3
    down = -(-len(panels) // across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(5.5 * across, 3.5 * down), sharex=True, squeeze=False, layout="constrained"
    )
    for panel in axes.flat[len(panels) :]:
        panel.set_visible(False)
    for panel, (name, title) in zip(axes.flat, panels.items(), strict=False):
        for color, (workdir, rows) in enumerate(runs.items()):
            _draw(panel, rows, name, f"C{color}", labels[workdir])
        if name == "nsp_accuracy":
            panel.axhline(0.5, color="gray", linestyle=":", label="chance")
        panel.set_label(name)
        panel.set_title(title)
        panel.set_xlabel("step")
        panel.tick_params(labelbottom=True)
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize="small")
    image = io.BytesIO()
    figure.savefig(image, format=image_format, dpi=110)
    pyplot.close(figure)
    return image.getvalue()


def _panels(runs: Mapping[str, Rows]) -> dict[str, str]:
    """Returns panel titles by metric, for metrics of at least one run. Raises InputError for runs of both kinds."""
    keys = {workdir: {key for row in rows for key in row} for workdir, rows in runs.items()}
    pretrained = [workdir for workdir in runs if keys[workdir] & {*PRETRAINING}]
    if pretrained and len(pretrained) < len(runs):
        other = next(workdir for workdir in runs if workdir not in pretrained)
        raise InputError(
            f"{pretrained[0]} is a run of pre-training and {other} is not; draw one kind at a time, or both with "
            "--output=report.html"
        )
    found = {key.rpartition("/")[2] for run_keys in keys.values() for key in run_keys}
    titles = PRETRAINING if pretrained else {**FINETUNING, **SCORES}
    return {name: title for name, title in titles.items() if name in found}


def _draw(panel: Any, rows: Rows, name: str, color: str, label: str) -> None:
    def points(key: str, *, evaluated: bool) -> tuple[list[int], list[float]]:
        found = [
            (row["step"], row[key]) for row in rows
            if (row.get("split") == "eval") == evaluated and row.get(key) is not None
        ]  # fmt: skip
        return [step for step, _ in found], [value for _, value in found]

    steps, values = points(name, evaluated=False)
    if values:
        panel.plot(steps, values, color=color, alpha=0.2)
        means = [
            sum(values[max(0, i + 1 - SMOOTHING_ROWS) : i + 1]) / min(i + 1, SMOOTHING_ROWS) for i in range(len(values))
        ]
        panel.plot(steps, means, color=color, label=f"{label}, training")
    if name in PRETRAINING:
        evaluations = points(name, evaluated=True)
        panel.plot(*evaluations, color=color, marker="o", markersize=4, linestyle="", label=f"{label}, eval")
        old = points(f"{OLD}{name}", evaluated=True)
        if old[0]:
            panel.plot(*old, color=color, marker="s", markersize=4, linestyle="", label=f"{label}, eval, old domain")
    if name == "mlm_loss":
        baseline = points("unigram_loss", evaluated=True)
        panel.plot(*baseline, color=color, linestyle="--", label=f"{label}, unigram baseline")
    scores = dict.fromkeys(key for row in rows for key in row if key.endswith(f"/{name}"))
    for key, style in zip(scores, ("-", "--", ":", "-.") * len(scores), strict=False):
        split = key.removesuffix(f"/{name}")
        panel.plot(*points(key, evaluated=True), color=color, marker="o", markersize=4, linestyle=style,
                   label=f"{label}, {split}")  # fmt: skip
