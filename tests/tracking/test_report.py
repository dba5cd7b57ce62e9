"""Reports: the HTML page with its curves and tables, and images of curves."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support import helpers

from bert_jax import cli
from bert_jax.config import FinetuneConfig, PretrainConfig, load_config
from bert_jax.errors import InputError
from bert_jax.finetuning.search import summarize
from bert_jax.sections import to_dict
from bert_jax.tracking import report
from bert_jax.tracking.report import MOST_POINTS, write_report

HOSTILE = "</script><img src=x onerror=alert(1)>&amp;"


def write_rows(folder: Path, *rows: dict, config: dict[str, object] | None = None, spec: str = "bert_tiny") -> str:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config is not None:
        kind = FinetuneConfig if spec.startswith("finetune") else PretrainConfig
        (folder / "config.json").write_text(json.dumps(to_dict(load_config(spec, config, kind=kind))))
    return str(folder)


def trained(step: int, **values: float) -> dict:
    return {"step": step, "loss": 1.0, "learning_rate": 2e-5, "grad_norm": 0.5, **values}


def evaluated(step: int, **values: float) -> dict:
    return {"step": step, "split": "eval", **{key.replace("__", "/"): value for key, value in values.items()}}


def sampled(step: int, *fills: str, text: str = "a [MASK] text") -> dict:
    masks = [{"target": "dark", "probability": 0.1, "fills": [[fill, 0.5], ["b", 0.25]]} for fill in fills]
    return {"step": step, "split": "samples", "samples": [{"text": text, "masks": masks}]}


def page_of(tmp_path: Path, *paths: str) -> str:
    """Returns the page without plotly's script."""
    from plotly.offline import get_plotlyjs

    assert cli.main(["report", *paths, "--output", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count(get_plotlyjs()) == 1
    return page.replace(get_plotlyjs(), "")


def figures_of(page: str) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Returns the traces and the layout of each figure."""
    found = []
    for match in re.finditer(r'Plotly\.newPlot\(\s*"[^"]+",\s*', page):
        traces, end = json.JSONDecoder().raw_decode(page, match.end())
        start = re.compile(r",\s*").match(page, end)
        assert start
        found.append((traces, json.JSONDecoder().raw_decode(page, start.end())[0]))
    return found


def curves_of(page: str) -> dict[str, dict[str, tuple[list, list]]]:
    """Returns the points of each curve by panel and label, of all figures; faint curves are left out."""
    curves: dict[str, dict[str, tuple[list, list]]] = {}
    for traces, layout in figures_of(page):
        titles = [note["text"] for note in layout["annotations"]]
        for trace in traces:
            title = titles[int(trace["yaxis"][1:] or 1) - 1]
            label = trace["hovertemplate"].split(":")[0]
            if trace["opacity"] == 1.0:
                curves.setdefault(title, {})[label] = (trace["x"], trace["y"])
    return curves


def cells(page: str, first: str) -> list[str]:
    """Returns the texts of the cells of the row whose first cell is `first`."""
    [row] = [row for row in re.findall(r"<tr>(.*?)</tr>", page) if re.sub("<.*?>", "", row).startswith(first)]
    return [re.sub("<.*?>", "", cell) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)]


# --- Curves ------------------------------------------------------------------------------------------------------


def test_page_has_a_figure_for_each_kind_of_run(tmp_path: Path):
    pretrained = write_rows(
        tmp_path / "base",
        trained(1, mlm_loss=9.0, time=7200.0, tokens_seen=64, nonfinite_steps=0),
        trained(2, mlm_loss=8.0, time=9000.0, tokens_seen=128, nonfinite_steps=1),
        evaluated(2, mlm_loss=7.5, unigram_loss=7.0, mlm_accuracy=0.25, time=9360.0, tokens_seen=128),
        evaluated(3, mlm_loss=7.25, unigram_loss=7.0, old_mlm_loss=6.0, time=9370.0, tokens_seen=192),
    )
    tuned = write_rows(
        tmp_path / "mnli", trained(5, accuracy=0.2), evaluated(5, dev__accuracy=0.5, test__accuracy=0.4),
        trained(10, accuracy=0.6), evaluated(10, dev__accuracy=0.75, dev__f1=0.7, test__accuracy=0.5),
    )  # fmt: skip
    page = page_of(tmp_path, pretrained, tuned)
    assert curves_of(page) == {
        "Masked-LM loss (nats)": {
            "base, training": ([1, 2], [9.0, 8.5]), "base, eval": ([2, 3], [7.5, 7.25]),
            "base, old data": ([3], [6.0]), "base, unigram baseline": ([2, 3], [7.0, 7.0]),
        },
        "Masked-LM accuracy": {"base, eval": ([2], [0.25])},
        "Learning rate": {"mnli, training": ([5, 10], [2e-5, 2e-5])}
        | {"base, training": ([1, 2], [2e-5, 2e-5])},
        "Gradient norm, before clipping": {"base, training": ([1, 2], [0.5, 0.5])}
        | {"mnli, training": ([5, 10], [0.5, 0.5])},
        "Skipped steps, not finite": {"base, training": ([1, 2], [0, 1])},
        "Training loss": {"mnli, training": ([5, 10], [1.0, 1.0])},
        "accuracy": {
            "mnli, training": ([5, 10], [0.2, 0.4]), "mnli, dev": ([5, 10], [0.5, 0.75]),
            "mnli, test": ([5, 10], [0.4, 0.5]),
        },
        "f1": {"mnli, dev": ([10], [0.7])},
    }  # fmt: skip
    first, second = (layout["updatemenus"][0]["buttons"] for _, layout in figures_of(page))
    assert [button["label"] for button in first] == ["by step", "by tokens", "by hours"]
    assert [button["label"] for button in second] == ["by step"]
    by_tokens, by_hours = (button["args"][0]["x"] for button in first[1:])
    assert (by_tokens[0], by_tokens[-1]) == ([64, 128], [64, 128])
    assert by_hours[2] == [0.6, pytest.approx(2170 / 3600)]


def test_losses_can_have_a_logarithmic_axis(tmp_path: Path):
    run = write_rows(tmp_path / "base", trained(1, mlm_loss=9.0, mlm_accuracy=0.1), trained(2, mlm_loss=8.0))
    [(_, layout)] = figures_of(page_of(tmp_path, run))
    titles = [note["text"] for note in layout["annotations"]]
    linear, log = layout["updatemenus"][1]["buttons"]
    names = [f"yaxis{number or ''}.type" for number in (0, 2, 3, 4)]
    expected = [name for name, title in zip(names, titles, strict=True) if "loss" in title or "norm" in title]
    assert log["args"] == [dict.fromkeys(expected, "log")]
    assert linear["args"] == [dict.fromkeys(expected, "linear")]


def test_phases_are_marked(tmp_path: Path):
    run = write_rows(
        tmp_path / "base", trained(1, mlm_loss=9.0), trained(9, mlm_loss=9.0),
        config={"total_steps": 10, "phases": ({"steps": 3}, {"steps": -1, "data.path": "long"}, {"steps": 2})},
    )  # fmt: skip
    [(_, layout)] = figures_of(page_of(tmp_path, run))
    lines = {(shape["x0"], shape["label"]["text"]) for shape in layout["shapes"]}
    assert lines == {(3, "phase 2: data.path=long"), (8, "phase 3: ")}
    assert len(layout["shapes"]) == 2 * 3  # in each panel


def test_long_runs_are_drawn_by_means(tmp_path: Path):
    rows = [trained(step, mlm_loss=float(step)) for step in range(1, 2 * MOST_POINTS + 2)]
    run = write_rows(tmp_path / "long", *rows)
    traces, _ = figures_of(page_of(tmp_path, run))[0]
    assert traces[0]["x"][:2] == [3, 6]
    assert traces[0]["y"][:2] == [2.0, 5.0]
    assert traces[0]["x"][-1] == 2 * MOST_POINTS + 1


def test_runs_are_named_as_they_are_and_apart(tmp_path: Path):
    runs = [
        write_rows(tmp_path / name, trained(1, mlm_loss=1.0), trained(2, mlm_loss=1.0))
        for name in ("a/lr$5_$6", "b/lr$5_$6", "_base")
    ]
    page = page_of(tmp_path, *runs)
    assert list(curves_of(page)["Masked-LM loss (nats)"]) == [
        "a/lr$5_$6, training", "b/lr$5_$6, training", f"{tmp_path.name}/_base, training"
    ]  # fmt: skip
    shown = [trace["name"] for trace in figures_of(page)[0][0] if trace["showlegend"]]
    assert shown == ["a/lr$5_$6", "b/lr$5_$6", f"{tmp_path.name}/_base"]
    for name in ("a.png", "a.svg", "a.pdf"):
        write_report(runs, str(tmp_path / name))
        assert (tmp_path / name).stat().st_size > 1000


def test_image_has_the_curves_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from matplotlib import pyplot

    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    rows = trained(5), trained(10, loss=0.5), evaluated(5, dev__accuracy=0.5), evaluated(10, dev__accuracy=0.75)
    write_report([write_rows(tmp_path / "mnli", *rows)], str(tmp_path / "curves.svg"))
    plots = {plot.get_title(): plot for plot in figures[0].axes if plot.get_visible()}
    assert list(plots) == ["Training loss", "accuracy", "Learning rate", "Gradient norm, before clipping"]
    [line] = plots["accuracy"].lines
    assert (line.get_label(), list(line.get_xdata()), list(line.get_ydata())) == ("mnli, dev", [5, 10], [0.5, 0.75])
    assert [list(line.get_ydata()) for line in plots["Training loss"].lines] == [[1.0, 0.5], [1.0, 0.75]]
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")


# --- Inputs ------------------------------------------------------------------------------------------------------


def test_image_of_both_kinds_is_refused(tmp_path: Path):
    runs = [write_rows(tmp_path / "a", trained(1, mlm_loss=9.0)), write_rows(tmp_path / "b", trained(1))]
    with pytest.raises(InputError, match=r"^a and b .*\.html"):
        write_report(runs, str(tmp_path / "curves.png"))


@pytest.mark.parametrize("output", ["curves.png", "report.html"])
@pytest.mark.parametrize("path", ["empty", "missing"])
def test_a_folder_without_metrics_is_refused(path: str, output: str, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=rf"{tmp_path / path} has no metrics"):
        write_report([str(tmp_path / path)], str(tmp_path / output))
    assert not (tmp_path / output).exists()


def test_output_of_another_type_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture):
    run = write_rows(tmp_path / "run", trained(1))
    assert cli.main(["report", run, "--output", str(tmp_path / "report.gif")]) == 2
    assert ".html" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("table.json", {"columns": [], "rows": [-1]}),
        ("table.json", {"columns": ["a"], "rows": [{"name": "r", "columns": [1]}]}),
        ("search.json", {"metric": "f1", "learning_rate": "none", "by_learning_rate": {"2e-5": {}}}),
    ],
)
def test_a_file_of_another_structure_is_named(file: str, content: dict, tmp_path: Path):
    (tmp_path / file).write_text(json.dumps({"format_version": 1, **content}))
    with pytest.raises(InputError, match=rf"{file}: unexpected structure \("):
        write_report([str(tmp_path)], str(tmp_path / "report.html"))


@pytest.mark.parametrize("kind", ["html", "svg"])
def test_a_run_with_a_row_of_another_structure_is_named(kind: str, tmp_path: Path):
    run = write_rows(tmp_path / "odd", trained(1, mlm_loss=9.0), {"step": 2, "split": "eval", "mlm_loss": {"a": 1}})
    with pytest.raises(InputError, match=r"odd: unexpected structure \("):
        write_report([run], str(tmp_path / f"curves.{kind}"))


# --- Tables ------------------------------------------------------------------------------------------------------


def test_scores_are_of_the_last_evaluation_or_of_the_result(tmp_path: Path):
    rows = (trained(5), evaluated(5, dev__accuracy=0.75), trained(10, loss=0.5), evaluated(10, dev__accuracy=0.5))
    best, last = (write_rows(tmp_path / name, *rows) for name in ("best", "last"))
    (tmp_path / "best" / "result.json").write_text(json.dumps({"format_version": 1, "task": "text", "step": 5}))
    page = page_of(tmp_path, best, last)
    assert cells(page, "run") == ["run", "step", "tokens seen", "training loss", "dev/accuracy"]
    assert cells(page, "best") == ["best", "5", "–", "0.5", "0.75"]
    assert cells(page, "last") == ["last", "10", "–", "0.5", "0.5"]


def test_page_has_the_settings_beside_defaults_and_other_runs(tmp_path: Path):
    runs = [
        write_rows(tmp_path / name, trained(1, mlm_loss=9.0), config={"seed": seed, "data.path": HOSTILE})
        for name, seed in (("a", 0), ("b", 7))
    ]
    page = page_of(tmp_path, *runs)
    assert cells(page, "seed *") == ["seed *", "0", "0", "7"]
    hidden = load_config("bert_tiny").model.hidden_size
    assert cells(page, "model.hidden_size") == ["model.hidden_size", "768", str(hidden), str(hidden)]
    assert "<td>optimizer.b1</td>" not in page
    assert page.index("seed *") < page.index("model.hidden_size")


def test_page_shows_the_words_filled_in_over_time(tmp_path: Path):
    rows = [sampled(step, "light" if step < 9 else "dark", text=f"a [MASK] {HOSTILE}") for step in range(1, 30)]
    run = write_rows(tmp_path / "base", trained(1, mlm_loss=9.0), *rows)
    page = page_of(tmp_path, run)
    assert len(cells(page, "dark")) == 1 + 8  # the target, and some of the evaluations
    assert cells(page, "dark")[1:3] == ["light 50%", "light 50%"]
    assert cells(page, "dark")[-1] == "dark 50%"
    assert page.count('<td class="right"') == 6
    assert "step 29" in page


def test_search_has_a_table_and_its_trials(tmp_path: Path):
    results: dict[float, dict[int, Any]] = {}
    for rate, seed, score in ((2e-5, 0, 0.5), (2e-5, 1, 0.7), (5e-5, 0, 0.9), (5e-5, 1, 0.8)):
        write_rows(tmp_path / "rte" / f"lr-{rate:g}-seed-{seed}", trained(5), evaluated(5, dev__accuracy=score))
        results.setdefault(rate, {})[seed] = {"main_metric": "accuracy", "scores": {"dev": {"accuracy": score}}}
    (tmp_path / "rte" / "search.json").write_text(json.dumps({"format_version": 1, **summarize(results)}))
    page = page_of(tmp_path, str(tmp_path / "rte"))
    assert cells(page, "2e-05") == ["2e-05", "2", "0.6", "0.14142", "0.6", "0.5", "0.7"]
    assert cells(page, "5e-05 (chosen)")[1:3] == ["2", "0.85"]
    names = [f"lr-{rate}-seed-{seed}" for rate in ("2e-05", "5e-05") for seed in (0, 1)]
    assert [cells(page, name)[0] for name in names] == names


def test_study_has_its_table_and_its_pre_training_runs(tmp_path: Path):
    from bert_jax.studies.study_table import Cell, Table

    study = Table("Title", "", ["SST-2"], ["base", "given"])
    for row, values in (("base", [90.0, 92.0]), ("given", [80.0])):
        study.cells[row, "SST-2"] = Cell(values, [str(seed) for seed in range(len(values))], 2e-5)
    study.pretraining["base"] = {"steps": 4, "mlm_loss": 3.0}
    study.paper = {"base": {"SST-2": 93.5}}
    write_rows(tmp_path / "study/pretraining/base-run", trained(4, mlm_loss=5.0), evaluated(4, mlm_loss=3.0))
    (tmp_path / "study" / "table.json").write_text(json.dumps(study.as_json()))
    page = page_of(tmp_path, str(tmp_path / "study"))
    assert "<h2>Title</h2>" in page
    [scores] = [table for table in page.split("<table>") if "(n=2)" in table]
    assert cells(scores, "base") == ["base", "91.00 ± 1.41 (n=2)", "93.5", "4", "3"]
    assert cells(scores, "given") == ["given", "80.00 (n=1)", "–", "–", "–"]
    assert cells(page, "base-run")[:2] == ["base-run", "4"]


# --- Safety and a browser ----------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Elements and attributes of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.attributes |= {(name, value or "") for name, value in attrs}


def hostile_run(tmp_path: Path) -> str:
    """Returns a run whose name, config, samples and scores are HTML."""
    name = HOSTILE.replace("/", "")
    rows = trained(1, mlm_loss=9.0, **{HOSTILE: 1.0}), trained(2, mlm_loss=8.0), evaluated(1, mlm_loss=8.0)
    return write_rows(
        tmp_path / name, *rows, sampled(1, HOSTILE, text=f"[MASK] {HOSTILE}"), config={"data.path": HOSTILE}
    )


def test_page_escapes_texts_of_files_and_loads_nothing(tmp_path: Path):
    tuned = write_rows(tmp_path / "tuned", trained(1), {"step": 1, "split": "eval", f"dev/{HOSTILE}": 0.5})
    page = page_of(tmp_path, hostile_run(tmp_path), tuned)
    tags = Tags(page)
    assert not tags.names & {"link", "iframe", "object", "base", "img"}
    assert not {name for name, _ in tags.attributes if name.startswith("on") or name in ("src", "href")}
    assert "default-src 'none'" in page
    assert page.count("</script>") == page.count("<script")


def test_page_draws_its_curves_in_a_browser(tmp_path: Path):
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("chromium is not installed")
    reference = str(helpers.REPOSITORY / "benchmarks" / "reference_cpu")
    tuned = write_rows(tmp_path / "tuned", trained(5), trained(9), evaluated(5, dev__f1=0.5), evaluated(9, dev__f1=0.6))
    page = page_of(tmp_path, reference, hostile_run(tmp_path), tuned)
    result = subprocess.run(
        [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=20000",
            "--dump-dom", (tmp_path / "report.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert not re.search(r"CONSOLE.*(Error|Refused|violates)", result.stderr), result.stderr
    panels = sum(len(layout["annotations"]) for _, layout in figures_of(page))
    assert panels > 10
    assert len(re.findall(r'<g class="subplot \w+"', result.stdout)) == panels
    assert len(re.findall('class="js-line"', result.stdout)) >= panels
    assert "<img" not in result.stdout.replace(report.escape("<img"), "")
