"""Reports: the HTML page with its curves and tables."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support import child_processes, helpers

from bert_jax import cli
from bert_jax.errors import InputError
from bert_jax.tracking.report import MOST_POINTS, curves, read_runs, write_report

HOSTILE = "</script><img src=x onerror=alert(1)>&amp;"


def write_rows(folder: Path, *rows: dict) -> str:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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
    """Returns the points of each curve by panel and label, of all figures."""
    curves: dict[str, dict[str, tuple[list, list]]] = {}
    for traces, layout in figures_of(page):
        titles = [note["text"] for note in layout["annotations"]]
        for trace in traces:
            title = titles[int(trace["yaxis"][1:] or 1) - 1]
            label = trace["hovertemplate"].split(":")[0]
            curves.setdefault(title, {})[label] = (trace["x"], trace["y"])
    return curves


def cells(page: str, first: str) -> list[str]:
    """Returns the texts of the cells of the row whose first cell is `first`."""
    rows = [re.split("<t[hd]>", row)[1:] for row in re.split("<tr>|</table>", page)]
    [row] = [row for row in rows if row[:1] == [first]]
    return row


# --- Curves ------------------------------------------------------------------------------------------------------


def test_page_has_a_curve_for_each_metric_and_split_of_each_run(tmp_path: Path):
    pretrained = write_rows(
        tmp_path / "base",
        trained(1, mlm_loss=9.0, time=7200.0, tokens_seen=64, nonfinite_steps=0),
        trained(2, mlm_loss=8.0, nonfinite_steps=1),
        evaluated(2, mlm_loss=7.5, unigram_loss=7.0, mlm_accuracy=0.25),
        evaluated(3, mlm_loss=7.25, unigram_loss=7.0),
        sampled(3, "light"),
    )
    tuned = write_rows(
        tmp_path / "mnli", trained(5, accuracy=0.2), evaluated(5, dev__accuracy=0.5, test__accuracy=0.4),
        trained(10, accuracy=0.6), evaluated(10, dev__accuracy=0.75, dev__f1=0.7, test__accuracy=0.5),
    )  # fmt: skip
    page = page_of(tmp_path, pretrained, tuned)
    curves = curves_of(page)
    assert curves == {
        "mlm_loss": {
            "base, training": ([1, 2], [9.0, 8.0]), "base, eval": ([2, 3], [7.5, 7.25]),
            "base, unigram baseline": ([2, 3], [7.0, 7.0]),
        },
        "mlm_accuracy": {"base, eval": ([2], [0.25])},
        "loss": {"base, training": ([1, 2], [1.0, 1.0]), "mnli, training": ([5, 10], [1.0, 1.0])},
        "learning_rate": {"base, training": ([1, 2], [2e-5, 2e-5]), "mnli, training": ([5, 10], [2e-5, 2e-5])},
        "grad_norm": {"base, training": ([1, 2], [0.5, 0.5]), "mnli, training": ([5, 10], [0.5, 0.5])},
        "nonfinite_steps": {"base, training": ([1, 2], [0, 1])},
        "accuracy": {
            "mnli, training": ([5, 10], [0.2, 0.6]), "mnli, dev": ([5, 10], [0.5, 0.75]),
            "mnli, test": ([5, 10], [0.4, 0.5]),
        },
        "f1": {"mnli, dev": ([10], [0.7])},
    }  # fmt: skip
    [(traces, layout)] = figures_of(page)
    titles = [note["text"] for note in layout["annotations"]]
    assert titles == [
        "mlm_loss", "mlm_accuracy", "loss", "learning_rate", "grad_norm", "nonfinite_steps", "accuracy", "f1",
    ]  # fmt: skip
    [number] = [number for number, trace in enumerate(traces) if "unigram baseline" in trace["hovertemplate"]]
    assert {trace["marker"]["symbol"] for trace in traces if trace is not traces[number]} == {"circle"}
    assert traces[number]["marker"]["symbol"] == "line-ew-open"  # what is drawn of a single evaluation


def test_long_runs_are_drawn_by_means(tmp_path: Path):
    rows = [trained(step, mlm_loss=float(step)) for step in range(1, 2 * MOST_POINTS + 1)]
    steps, losses = curves_of(page_of(tmp_path, write_rows(tmp_path / "long", *rows)))["mlm_loss"]["long, training"]
    assert steps == losses == [2 * point + 1.5 for point in range(MOST_POINTS)]


def test_runs_are_named_as_they_are_and_apart(tmp_path: Path):
    runs = [
        write_rows(tmp_path / name, trained(1, mlm_loss=1.0), trained(2, mlm_loss=1.0))
        for name in ("a/lr$5_$6", "b/lr$5_$6", "_base")
    ]
    [(traces, _)] = figures_of(page_of(tmp_path, *runs))
    shown = [trace for trace in traces if trace["showlegend"]]
    assert [trace["name"][-9:] for trace in shown] == [run[-9:] for run in runs]
    assert all(trace["hovertemplate"].startswith(run) for trace, run in zip(shown, runs, strict=True))
    [(traces, _)] = figures_of(page_of(tmp_path, *runs[1:]))
    assert [trace["name"] for trace in traces if trace["showlegend"]] == ["lr$5_$6", "_base"]


# --- Inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["empty", "missing", "table.csv"])
def test_a_folder_without_metrics_is_refused(path: str, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "table.csv").write_text("step\n1\n")
    with pytest.raises(InputError, match=rf"{tmp_path / path} has no metrics"):
        write_report([str(tmp_path / path)], str(tmp_path / "report.html"))
    assert not (tmp_path / "report.html").exists()


def test_output_of_another_type_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture):
    run = write_rows(tmp_path / "run", trained(1))
    assert cli.main(["report", run, "--output", str(tmp_path / "report.png")]) == 2
    assert ".html" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["runs", "study/pretraining"])
def test_a_search_a_study_and_a_folder_are_their_runs(folder: str, tmp_path: Path):
    for name in ("a", "b"):
        write_rows(tmp_path / folder / name, trained(1))
    found = write_report([str(tmp_path / folder.split("/")[0])], str(tmp_path / "report.html"))
    assert [row["run"] for row in found] == ["a", "b"]


def test_a_file_of_another_structure_is_named(tmp_path: Path):
    run = write_rows(tmp_path / "odd", trained(1, mlm_loss=9.0), {"step": 2, "split": ["eval"]})
    with pytest.raises(InputError, match=rf"{run}.*: "):
        write_report([run], str(tmp_path / "report.html"))


def test_values_that_are_no_numbers_are_not_drawn(tmp_path: Path):
    run = write_rows(tmp_path / "odd", trained(1, mlm_loss=9.0), {"step": 2, "split": "eval", "mlm_loss": {"a": 1}})
    assert list(curves_of(page_of(tmp_path, run))["mlm_loss"]) == ["odd, training"]


# --- Tables ------------------------------------------------------------------------------------------------------


def test_results_are_of_the_last_evaluation(tmp_path: Path):
    rows = (trained(5), evaluated(5, dev__accuracy=0.75), trained(10, loss=0.5), evaluated(10, dev__accuracy=0.5))
    page = page_of(tmp_path, write_rows(tmp_path / "last", *rows), write_rows(tmp_path / "none", trained(3)))
    assert cells(page, "run") == ["run", "step", "dev/accuracy", "training loss"]
    assert cells(page, "last") == ["last", "10", "0.5", "0.5"]
    assert cells(page, "none") == ["none", "3", "–", "1"]


def test_a_loss_of_training_is_not_shown_as_held_out(tmp_path: Path):
    good = write_rows(tmp_path / "good", trained(5, loss=3.0), evaluated(5, loss=4.5))
    bad = write_rows(tmp_path / "bad", trained(5, loss=5.5), evaluated(5, loss=None))
    page = page_of(tmp_path, good, bad)
    assert cells(page, "run") == ["run", "step", "loss", "training loss"]
    assert cells(page, "good") == ["good", "5", "4.5", "3"]
    assert cells(page, "bad") == ["bad", "5", "–", "5.5"]


def test_results_have_no_score_of_training(tmp_path: Path):
    """A run that begins its masked phase beside a finished one, and one without evaluations."""
    begun = write_rows(
        tmp_path / "begun", trained(4, ltr_loss=5.0), evaluated(4, ltr_loss=6.0), trained(5, mlm_loss=9.0)
    )
    done = write_rows(tmp_path / "done", trained(8, mlm_loss=3.0), evaluated(8, mlm_loss=4.0))
    page = page_of(tmp_path, begun, done, write_rows(tmp_path / "none", trained(3, mlm_loss=2.0)))
    assert cells(page, "run") == ["run", "step", "ltr_loss", "mlm_loss", "training loss"]
    assert cells(page, "begun") == ["begun", "4", "6", "–", "1"]
    assert cells(page, "none") == ["none", "3", "–", "–", "1"]


def test_searches_studies_and_compiled_steps_have_tables(tmp_path: Path):
    trial = {"median": 0.75, "best": 0.8, "worst": 0.7, "scores": {"0": 0.7, "1": 0.8}}
    search = Path(write_rows(tmp_path / "search" / "lr-1e-5-seed-0", evaluated(5, dev__f1=0.5))).parent
    (search / "search.json").write_text(json.dumps({"metric": "f1", "by_learning_rate": {"1e-5": trial}}))
    cell = {"mean": 50.5, "deviation": 1.5, "paper": 84.4}
    study = {"title": "A table", "columns": ["topic"], "rows": [{"name": "MLM", "columns": {"topic": cell}}]}
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "table.json").write_text(json.dumps(study))
    phase = {"topology": "v5e:2x2", "first_step": 1, "last_step": 9, "fits": True, "estimate": {"seconds": 0.5}}
    (tmp_path / "step.json").write_text(json.dumps({"phases": [phase, {**phase, "estimate": None, "fits": False}]}))
    page = page_of(tmp_path, str(search), str(tmp_path / "study"), str(tmp_path / "step.json"))
    assert cells(page, "1e-5") == ["1e-5", "0.75", "0.7", "0.8"]
    assert cells(page, "row") == ["row", "topic", "±", "paper"]
    assert cells(page, "MLM") == ["MLM", "50.5", "1.5", "84.4"]
    assert cells(page, "seconds") == ["seconds", "0.5", "–"]
    assert cells(page, "fits") == ["fits", "True", "False"]


def test_steps_without_finite_losses_have_no_objective(tmp_path: Path):
    rows = (trained(1, ltr_loss=9.0), {"step": 2, "loss": None, "ltr_loss": None, "learning_rate": 1e-4})
    diverged = (evaluated(1, loss=8.0, ltr_loss=8.0, unigram_loss=7.0), evaluated(2, unigram_loss=7.0))
    [run] = read_runs([write_rows(tmp_path / "run", *rows, *diverged)])
    names = {(panel, label) for panel, label, _ in curves(run) if panel.endswith("loss")}
    assert names == {(name, split) for name in ("loss", "ltr_loss") for split in ("training", "eval")} | {
        ("ltr_loss", "unigram baseline")
    }


def test_axes_fit_their_values(tmp_path: Path):
    rows = [evaluated(step, dev__accuracy=0.91 + 0.001 * step, dev__f1=88.0) for step in (1, 2)]
    [(_, layout)] = figures_of(page_of(tmp_path, write_rows(tmp_path / "run", trained(1), trained(2), *rows)))
    axes = {
        note["text"]: layout[f"yaxis{n or ''}"] for n, note in zip((0, 2, 3, 4, 5), layout["annotations"], strict=True)
    }
    assert axes["accuracy"]["tickformat"] == "~%"
    assert axes["f1"]["tickformat"] == "~g"


def test_thirty_runs_have_thirty_colors(tmp_path: Path):
    for number in range(30):
        write_rows(tmp_path / "runs" / f"{number:02}{'x' * 50}", trained(1))
    [(traces, _)] = figures_of(page_of(tmp_path, str(tmp_path / "runs")))
    assert len({trace["line"]["color"] for trace in traces}) == 30
    assert max(len(trace["name"]) for trace in traces) <= 41


def test_results_are_json_as_well(tmp_path: Path, capsys: pytest.CaptureFixture):
    row = evaluated(2, mlm_loss=1.5, tokens_seen=12345, sequences=8)
    run = write_rows(tmp_path / "a", trained(2, mlm_loss=2.0, tokens_per_second=1234.5), row)
    output = tmp_path / "report.html"
    assert cli.main(["report", run, "--output", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "output": str(output), "workdirs": [run],
        "results": [{"run": "a", "step": 2, "tokens_seen": 12345, "training loss": 1.0, "mlm_loss": 1.5,
                     "tokens_per_second": 1234.5}],
    }  # fmt: skip


def test_page_has_the_fills_of_each_mask_over_time(tmp_path: Path):
    rows = [sampled(step, f"w{step}", f"v{step}") for step in range(21)]
    page = page_of(tmp_path, write_rows(tmp_path / "run", trained(1, mlm_loss=9.0), *rows))
    steps = (0, 4, 8, 12, 16, 20)
    assert cells(page, "text") == ["text", "target", *(str(step) for step in steps)]
    [first, second] = re.findall("<tr><td>a .MASK. text(.*?)(?=<tr>|</table>)", page)
    assert first.split("<td>")[1:] == ["dark", *(f"w{step} 0.50" for step in steps)]
    assert second.split("<td>")[1:] == ["dark", *(f"v{step} 0.50" for step in steps)]


def test_fills_are_those_of_the_last_texts(tmp_path: Path):
    """The second phase has another dataset, whose texts are others."""
    rows = [sampled(1, "w1", "v1", text="short [MASK]"), *(sampled(step, f"w{step}") for step in (2, 3))]
    page = page_of(tmp_path, write_rows(tmp_path / "run", trained(1), *rows))
    assert cells(page, "text") == ["text", "target", "2", "3"]
    assert cells(page, "a [MASK] text") == ["a [MASK] text", "dark", "w2 0.50", "w3 0.50"]


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
    """Returns a run whose name, samples and scores are HTML."""
    name = HOSTILE.replace("/", "")
    rows = trained(1, mlm_loss=9.0, **{HOSTILE: 1.0}), trained(2, mlm_loss=8.0), evaluated(1, mlm_loss=8.0)
    return write_rows(tmp_path / name, *rows, sampled(1, HOSTILE, text=f"[MASK] {HOSTILE}"))


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
    words = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=20000",
        "--dump-dom", (tmp_path / "report.html").as_uri(),
    ]  # fmt: skip
    result = child_processes.run(words, timeout=120)
    assert not re.search(r"CONSOLE.*(Error|Refused|violates)", result.stderr), result.stderr
    panels = sum(len(layout["annotations"]) for _, layout in figures_of(page))
    assert panels > 10
    assert len(re.findall(r'<g class="subplot \w+"', result.stdout)) == panels
    assert len(re.findall('class="js-line"', result.stdout)) >= panels
    assert "<img" not in result.stdout
