"""A run's curves as one picture: both losses and accuracies, training and evaluation, beside the unigram baseline."""

from collections.abc import Sequence
from typing import Any

import matplotlib
from etils import epath

matplotlib.use("Agg")
from matplotlib import pyplot

from bert_jax import remote, whole_files
from bert_jax.errors import InputError
from bert_jax.training.metrics import read_metrics

PANELS = (
    ("mlm_loss", "MLM loss (nats)"),
    ("mlm_accuracy", "MLM accuracy"),
    ("nsp_loss", "NSP loss (nats)"),
    ("nsp_accuracy", "NSP accuracy"),
)
SMOOTHING_ROWS = 10  # logged training rows averaged into a point


def plot_curves(workdirs: Sequence[str], output: str) -> None:
    """Draws the curves of one run, or of several side by side, into the image file `output` (.png, .svg, .pdf).

    Faint lines are training steps, solid ones their running mean, dots evaluations, the dashed line the loss of
    predicting words by their frequency. InputError for a workdir without metrics or a file type that is unknown.
    """
    runs = {workdir: _rows(workdir) for workdir in workdirs}
    names = {workdir: remote.absolute(workdir).name for workdir in runs}
    labels = names if len(set(names.values())) == len(names) else {workdir: workdir for workdir in runs}
    suffix = epath.Path(output).suffix.lower()
    if suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"--output: curves are drawn as .png, .svg or .pdf, not {suffix!r}")
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
    for panel, (name, title) in zip(axes.flat, PANELS, strict=True):
        for color, (workdir, rows) in enumerate(runs.items()):
            _draw(panel, rows, name, f"C{color}", labels[workdir])
        if name == "nsp_accuracy":
            panel.axhline(0.5, color="gray", linestyle=":", label="chance")
        panel.set_title(title)
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize="small")
    for panel in axes[1]:
        panel.set_xlabel("step")
    with whole_files.whole_file(remote.named(output)) as file:
        figure.savefig(file, format=suffix[1:], dpi=110)
    pyplot.close(figure)


def _rows(workdir: str) -> list[dict[str, Any]]:
    rows = read_metrics(remote.named(workdir))
    if not rows:
        raise InputError(f"{workdir} has no metrics: give the --workdir of `bert-jax pretrain`")
    return rows


def _draw(panel: Any, rows: list[dict[str, Any]], name: str, color: str, label: str) -> None:
    def points(split: str | None, key: str) -> tuple[list[int], list[float]]:
        found = [(row["step"], row[key]) for row in rows if row.get("split") == split and row.get(key) is not None]
        return [step for step, _ in found], [value for _, value in found]

    steps, values = points(None, name)
    panel.plot(steps, values, color=color, alpha=0.2)
    means = [
        sum(values[max(0, i + 1 - SMOOTHING_ROWS) : i + 1]) / min(i + 1, SMOOTHING_ROWS) for i in range(len(values))
    ]
    panel.plot(steps, means, color=color, label=f"{label}, training")
    panel.plot(*points("eval", name), color=color, marker="o", markersize=4, linestyle="", label=f"{label}, eval")
    if name == "mlm_loss":
        panel.plot(*points("eval", "unigram_loss"), color=color, linestyle="--", label=f"{label}, unigram baseline")
