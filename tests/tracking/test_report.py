"""The picture of a run's curves: which panels there are, and what is in them."""

import json
from pathlib import Path

import pytest

from bert_jax.errors import InputError
from bert_jax.tracking import report
from bert_jax.tracking.report import plot_curves

Curves = dict[str, dict[str, tuple[list, list]]]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Curves:
    """By panel and label, the points of each curve of the figure drawn last."""
    found: Curves = {}

    def keep(figure) -> None:
        found.clear()
        for panel in figure.axes:
            if panel.get_visible():
                lines = [line for line in panel.lines if not line.get_label().startswith("_")]
                found[panel.get_label()] = {
                    line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in lines
                }

    monkeypatch.setattr(report.pyplot, "close", keep)
    return found


def write_rows(folder: Path, *rows: dict) -> str:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def trained(step: int, **values: float) -> dict:
    return {"step": step, "loss": 1.0, "learning_rate": 2e-5, "grad_norm": 0.5, **values}


def evaluated(step: int, **values: float) -> dict:
    return {"step": step, "split": "eval", **{key.replace("__", "/"): value for key, value in values.items()}}


def test_report_of_fine_tuning_plots_the_scores_of_each_split(drawn: Curves, tmp_path: Path):
    run = write_rows(
        tmp_path / "mnli", trained(5, accuracy=0.2), evaluated(5, dev__accuracy=0.5, test__accuracy=0.4),
        trained(10, accuracy=0.6), evaluated(10, dev__accuracy=0.75, dev__f1=0.7, test__accuracy=0.5),
    )  # fmt: skip
    plot_curves([run], str(tmp_path / "curves.svg"))
    assert list(drawn) == ["loss", "learning_rate", "grad_norm", "accuracy", "f1"]
    assert drawn["learning_rate"] == {"mnli, training": ([5, 10], [2e-5, 2e-5])}
    assert drawn["accuracy"]["mnli, dev"] == ([5, 10], [0.5, 0.75])
    assert drawn["accuracy"]["mnli, test"] == ([5, 10], [0.4, 0.5])
    assert drawn["accuracy"]["mnli, training"] == ([5, 10], [0.2, 0.4])
    assert drawn["f1"] == {"mnli, dev": ([10], [0.7])}
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")


def test_pre_training_without_nsp_has_no_panel_of_it(drawn: Curves, tmp_path: Path):
    rows = [trained(1, mlm_loss=9.0, mlm_accuracy=0.1), evaluated(1, mlm_loss=8.0, unigram_loss=7.0, mlm_accuracy=0.2)]
    without = write_rows(tmp_path / "no_nsp", *rows)
    plot_curves([without], str(tmp_path / "curves.png"))
    assert list(drawn) == ["mlm_loss", "mlm_accuracy"]
    assert drawn["mlm_loss"]["no_nsp, unigram baseline"] == ([1], [7.0])
    with_nsp = write_rows(tmp_path / "nsp", trained(1, mlm_loss=9.0, mlm_accuracy=0.1, nsp_loss=0.7, nsp_accuracy=0.5))
    plot_curves([without, with_nsp], str(tmp_path / "curves.png"))
    assert list(drawn) == ["mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"]
    assert drawn["nsp_loss"]["nsp, training"] == ([1], [0.7])


def test_a_folder_of_runs_names_one_of_them(tmp_path: Path):
    for name in ("study/pretraining/base", "study/finetuning/base/topic/lr-2e-05-seed-1"):
        write_rows(tmp_path / name, trained(1))
    first = tmp_path / "study/finetuning/base/topic/lr-2e-05-seed-1"
    with pytest.raises(InputError, match=rf"study\b.*\b2 .*{first}"):
        plot_curves([str(tmp_path / "study")], str(tmp_path / "curves.png"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=rf"{tmp_path / 'empty'}\b"):
        plot_curves([str(tmp_path / "empty")], str(tmp_path / "curves.png"))


def test_pre_training_and_fine_tuning_are_drawn_apart(tmp_path: Path):
    runs = [write_rows(tmp_path / "a", trained(1, mlm_loss=9.0)), write_rows(tmp_path / "b", trained(1))]
    with pytest.raises(InputError, match=rf"{runs[0]} .* {runs[1]}"):
        plot_curves(runs, str(tmp_path / "curves.png"))
