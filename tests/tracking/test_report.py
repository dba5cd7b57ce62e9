"""Reports: the images of curves, the tables and curves of the HTML page, and the page in a browser."""

import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable
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
from bert_jax.tracking.report import curve_images
from bert_jax.tracking.report.curve_data import MOST_POINTS
from bert_jax.tracking.report.report_page import write_report

Curves = dict[str, dict[str, tuple[list, list]]]
HOSTILE = "</script><img src=x onerror=alert(1)>&amp;"


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

    monkeypatch.setattr(curve_images.pyplot, "close", keep)
    return found


def write_rows(folder: Path, *rows: dict, config: dict[str, object] | None = None, spec: str = "bert_tiny") -> str:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config is not None:
        kind = FinetuneConfig if spec.startswith("finetune") else PretrainConfig
        loaded = load_config(spec, [(key, str(value)) for key, value in config.items()], kind=kind)
        (folder / "config.json").write_text(json.dumps(to_dict(loaded)))
    return str(folder)


def trained(step: int, **values: float) -> dict:
    return {"step": step, "loss": 1.0, "learning_rate": 2e-5, "grad_norm": 0.5, **values}


def evaluated(step: int, **values: float) -> dict:
    return {"step": step, "split": "eval", **{key.replace("__", "/"): value for key, value in values.items()}}


def sampled(step: int, *fills: str, text: str = "a [MASK] text") -> dict:
    masks = [{"target": "dark", "probability": 0.1, "fills": [[fill, 0.5], ["b", 0.25]]} for fill in fills]
    return {"step": step, "split": "samples", "samples": [{"text": text, "masks": masks}]}


# --- Images ------------------------------------------------------------------------------------------------------


def test_image_of_fine_tuning_plots_the_scores_of_each_split(drawn: Curves, tmp_path: Path):
    run = write_rows(
        tmp_path / "mnli", trained(5, accuracy=0.2), evaluated(5, dev__accuracy=0.5, test__accuracy=0.4),
        trained(10, accuracy=0.6), evaluated(10, dev__accuracy=0.75, dev__f1=0.7, test__accuracy=0.5),
    )  # fmt: skip
    write_report([run], str(tmp_path / "curves.svg"))
    assert list(drawn) == ["loss", "learning_rate", "grad_norm", "accuracy", "f1"]
    assert drawn["learning_rate"] == {"mnli, training": ([5, 10], [2e-5, 2e-5])}
    assert drawn["accuracy"]["mnli, dev"] == ([5, 10], [0.5, 0.75])
    assert drawn["accuracy"]["mnli, test"] == ([5, 10], [0.4, 0.5])
    assert drawn["accuracy"]["mnli, training"] == ([5, 10], [0.2, 0.4])
    assert drawn["f1"] == {"mnli, dev": ([10], [0.7])}
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")


def test_pre_training_without_nsp_has_no_panel_of_it(drawn: Curves, tmp_path: Path):
    rows = [trained(1, mlm_loss=9.0, mlm_accuracy=0.1), evaluated(1, mlm_loss=8.0, unigram_loss=7.0, mlm_accuracy=0.2)]
    without = write_rows(tmp_path / "no_nsp", *rows, sampled(1, "b"))
    write_report([without], str(tmp_path / "curves.png"))
    assert list(drawn) == ["mlm_loss", "mlm_accuracy"]
    assert drawn["mlm_loss"]["no_nsp, unigram baseline"] == ([1], [7.0])
    with_nsp = write_rows(tmp_path / "nsp", trained(1, mlm_loss=9.0, mlm_accuracy=0.1, nsp_loss=0.7, nsp_accuracy=0.5))
    write_report([without, with_nsp], str(tmp_path / "curves.png"))
    assert list(drawn) == ["mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"]
    assert drawn["nsp_loss"]["nsp, training"] == ([1], [0.7])


@pytest.mark.parametrize("name", ["_base", "lr$5_$6", "$"])
def test_image_names_workdirs_as_they_are(name: str, drawn: Curves, tmp_path: Path):
    workdir = write_rows(tmp_path / name, trained(1), evaluated(1, dev__accuracy=0.5))
    write_report([workdir], str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").stat().st_size > 1000
    shown = [label.replace(r"\$", "$").strip() for label in drawn["accuracy"]]
    assert shown == [f"{name}, dev"]


def test_image_of_both_kinds_is_refused(tmp_path: Path):
    runs = [write_rows(tmp_path / "a", trained(1, mlm_loss=9.0)), write_rows(tmp_path / "b", trained(1))]
    with pytest.raises(InputError, match=rf"{runs[0]} .* {runs[1]} .*\.html"):
        write_report(runs, str(tmp_path / "curves.png"))


# --- Inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["curves.png", "report.html"])
def test_a_folder_of_runs_names_one_of_them(output: str, tmp_path: Path):
    for name in ("study/pretraining/base", "study/finetuning/base/topic/lr-2e-05-seed-1"):
        write_rows(tmp_path / name, trained(1))
    first = tmp_path / "study/finetuning/base/topic/lr-2e-05-seed-1"
    with pytest.raises(InputError, match=rf"study\b.*\b2 .*{first}"):
        write_report([str(tmp_path / "study")], str(tmp_path / output))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=rf"{tmp_path / 'empty'}\b"):
        write_report([str(tmp_path / "empty")], str(tmp_path / output))
    assert not (tmp_path / output).exists()


@pytest.mark.parametrize("content", ["[]", "{", '{"other": 1}', None], ids=["list", "cut", "unknown", "missing"])
def test_another_file_is_refused(content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "compiled.json"
    if content:
        path.write_text(content)
    assert cli.main(["report", str(path), "--output", str(tmp_path / "report.html")]) == 2
    assert str(path) in capsys.readouterr().err


def test_output_of_another_type_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture):
    run = write_rows(tmp_path / "run", trained(1))
    assert cli.main(["report", run, "--output", str(tmp_path / "report.gif")]) == 2
    assert ".html" in capsys.readouterr().err


# --- The page ----------------------------------------------------------------------------------------------------


def page_of(tmp_path: Path, *paths: str) -> str:
    """Returns the page without plotly's script."""
    from plotly.offline import get_plotlyjs

    assert cli.main(["report", *paths, "--output", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count(get_plotlyjs()) == 1
    return page.replace(get_plotlyjs(), "")


def sections_of(page: str) -> dict[str, Any]:
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return {section["id"]: section for section in json.loads(data)["sections"]}


def test_page_has_a_section_for_each_kind_of_run(tmp_path: Path):
    pretrained = write_rows(
        tmp_path / "base",
        trained(1, mlm_loss=9.0, time=7200.0, tokens_seen=64, step_seconds_p50=0.5, nonfinite_steps=0),
        trained(2, mlm_loss=8.123456789, time=9000.0, tokens_seen=128, step_seconds_p50=0.25, nonfinite_steps=1),
        evaluated(2, mlm_loss=7.5, unigram_loss=7.0, mlm_accuracy=0.25, time=9360.0), sampled(2, "a"),
    )  # fmt: skip
    tuned = write_rows(tmp_path / "mnli", trained(5), evaluated(5, dev__accuracy=0.5, test__accuracy=0.4, dev__new=3.0))
    sections = sections_of(page_of(tmp_path, pretrained, tuned))
    assert list(sections) == ["pretraining", "finetuning"]
    panels = {name: [panel["id"] for panel in section["panels"]] for name, section in sections.items()}
    assert panels == {
        "pretraining": ["mlm_loss", "mlm_accuracy", "learning_rate", "grad_norm", "step_seconds", "nonfinite_steps"],
        "finetuning": ["loss", "accuracy", "new", "learning_rate", "grad_norm"],
    }
    [run] = sections["pretraining"]["runs"]
    assert run["name"] == "base"
    assert run["train"]["step"] == [1, 2]
    assert run["train"]["mlm_loss"] == [9.0, 8.12346]
    assert run["train"]["tokens_seen"] == [64, 128]
    assert (run["train"]["hours"], run["eval"]["hours"]) == ([0.0, 0.5], [0.6])
    assert run["eval"]["unigram_loss"] == [7.0]
    lines = {panel["id"]: panel["lines"] for section in sections.values() for panel in section["panels"]}
    assert [line["key"] for line in lines["mlm_loss"]] == ["mlm_loss", "mlm_loss", "unigram_loss"]
    assert [(line["split"], line["label"]) for line in lines["accuracy"]] == [
        ("train", "training"), ("eval", "dev"), ("eval", "test"),
    ]  # fmt: skip
    assert sections["finetuning"]["runs"][0]["eval"]["dev/accuracy"] == [0.5]


def cells(page: str, first: str) -> list[str]:
    """Returns the texts of the cells of the row whose first cell is `first`."""
    [row] = [row for row in re.findall(r"<tr>(.*?)</tr>", page) if re.sub("<.*?>", "", row).startswith(first)]
    return [re.sub("<.*?>", "", cell) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)]


def test_page_has_the_last_evaluation_beside_the_baseline(tmp_path: Path):
    run = write_rows(
        tmp_path / "base", trained(1, mlm_loss=9.0, tokens_per_second=10.0, nonfinite_steps=2),
        evaluated(1, mlm_loss=8.0, unigram_loss=7.0), evaluated(2, mlm_loss=2.0, unigram_loss=7.0, tokens_seen=1280),
    )  # fmt: skip
    assert cells(page_of(tmp_path, run), "base") == [
        "base", "2", "1,280", "2.0000", "7.0000", "+5.0000", "7.39", "–", "–", "–", "2", "10",
    ]  # fmt: skip


def test_page_has_the_config_beside_defaults_and_other_runs(tmp_path: Path):
    runs = [
        write_rows(tmp_path / name, trained(1, mlm_loss=9.0), config={"seed": seed, "data.path": HOSTILE})
        for name, seed in (("a", 0), ("b", 7))
    ]
    page = page_of(tmp_path, *runs)
    assert cells(page, "seed *") == ["seed *", "0", "0", "7"]
    hidden = load_config("bert_tiny").model.hidden_size
    assert cells(page, "model.hidden_size") == ["model.hidden_size", "768", str(hidden), str(hidden)]
    assert "<code>optimizer.b1</code>" not in page
    assert page.count("optimizer.b1 = 0.9") == 2


def test_page_marks_phases(tmp_path: Path):
    run = write_rows(tmp_path / "base", trained(1, mlm_loss=9.0), config={"total_steps": 10})
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["phases"] = [{"steps": 3}, {"steps": -1, "data.path": "long"}, {"steps": 2}]
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    phases = sections_of(page_of(tmp_path, run))["pretraining"]["runs"][0]["phases"]
    assert phases == [{"step": 3, "label": "phase 2: data.path=long"}, {"step": 8, "label": "phase 3"}]


def test_page_shows_the_words_filled_in_over_time(tmp_path: Path):
    rows = [sampled(step, "light" if step < 9 else "dark", text=f"a [MASK] {HOSTILE}") for step in range(1, 30)]
    run = write_rows(tmp_path / "base", trained(1, mlm_loss=9.0), *rows)
    page = page_of(tmp_path, run)
    assert len(cells(page, "1dark")) == 2 + 8  # the mask, its target, and some of the evaluations
    assert cells(page, "1dark")[2:4] == ["light 50%", "light 50%"]
    assert cells(page, "1dark")[-1] == "dark 50%"
    assert page.count('<td class="right"') == 6
    assert "step 29" in page


def test_long_runs_are_drawn_by_means(tmp_path: Path):
    rows = [trained(step, mlm_loss=float(step)) for step in range(1, 2 * MOST_POINTS + 2)]
    run = sections_of(page_of(tmp_path, write_rows(tmp_path / "long", *rows)))["pretraining"]["runs"][0]
    assert run["rows_a_point"] == 3
    assert run["train"]["step"][:2] == [3, 6]
    assert run["train"]["mlm_loss"][:2] == [2.0, 5.0]
    assert run["train"]["step"][-1] == 2 * MOST_POINTS + 1


def test_scores_of_a_run_that_kept_the_best_epoch_are_of_its_step(tmp_path: Path):
    rows = (trained(5), evaluated(5, dev__accuracy=0.75), trained(10), evaluated(10, dev__accuracy=0.5))
    best, unfinished = (write_rows(tmp_path / name, *rows) for name in ("best", "unfinished"))
    (tmp_path / "best" / "result.json").write_text(json.dumps({"task": "text", "step": 5, "scores": {}}))
    page = page_of(tmp_path, best, unfinished)
    assert (cells(page, "best")[2], cells(page, "best")[-1]) == ("5", "0.7500")
    assert (cells(page, "unfinished")[2], cells(page, "unfinished")[-1]) == ("10", "0.5000")


def test_search_has_a_table_and_its_trials(tmp_path: Path):
    results: dict[float, dict[int, Any]] = {}
    for rate, seed, score in ((2e-5, 0, 0.5), (2e-5, 1, 0.7), (5e-5, 0, 0.9), (5e-5, 1, 0.8)):
        write_rows(tmp_path / "rte" / f"lr-{rate:g}-seed-{seed}", trained(5), evaluated(5, dev__accuracy=score))
        results.setdefault(rate, {})[seed] = {"main_metric": "accuracy", "scores": {"dev": {"accuracy": score}}}
    (tmp_path / "rte" / "search.json").write_text(json.dumps(summarize(results)))
    page = page_of(tmp_path, str(tmp_path / "rte"))
    assert cells(page, "2e-05")[1:4] == ["2", "0.6000", "0.1414"]
    assert cells(page, "5e-05 (chosen)")[1:3] == ["2", "0.8500"]
    names = [run["name"] for run in sections_of(page)["finetuning"]["runs"]]
    assert names == ["lr-2e-05-seed-0", "lr-2e-05-seed-1", "lr-5e-05-seed-0", "lr-5e-05-seed-1"]


@pytest.mark.parametrize(
    "content",
    [
        {"columns": [], "rows": [-1]},
        {"columns": ["a"], "rows": [{"name": "r", "columns": [1]}]},
        {"metric": "f1", "learning_rate": "none", "by_learning_rate": {"2e-5": {}}},
        {"topology": "v5e:2x2", "phases": [{"steps": []}]},
    ],
    ids=["a study's row", "a study's cell", "a search", "a compiled step"],
)
def test_a_file_of_another_structure_is_named(content: dict, tmp_path: Path):
    (tmp_path / "found.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"found\.json: unexpected structure \("):
        write_report([str(tmp_path / "found.json")], str(tmp_path / "report.html"))


@pytest.mark.parametrize("kind", ["html", "svg"])
def test_a_run_with_a_row_of_another_structure_is_named(kind: str, tmp_path: Path):
    run = write_rows(tmp_path / "odd", trained(1, mlm_loss=9.0), {"step": 2, "split": "eval", "mlm_loss": {"a": 1}})
    with pytest.raises(InputError, match=r"odd: unexpected structure \("):
        write_report([run], str(tmp_path / f"curves.{kind}"))


def test_study_has_its_tables_and_the_pre_training_seeds_that_they_rest_on(tmp_path: Path):
    from bert_jax.studies.study_table import Cell, Table

    study = Table("Title", "", ["SST-2"], ["base", "no NSP", "given", "new"], pretraining_seeds={"new": []})
    for row, values in (("base", [90.0, 92.0]), ("no NSP", [89.0, 90.0, 91.0]), ("given", [80.0]), ("new", [70.0])):
        study.cells[row, "SST-2"] = Cell(values, [str(seed) for seed in range(len(values))], 2e-5)
    for number, (row, folder) in enumerate((("base", "base"), ("no NSP", "no_nsp"))):
        loss = 3.0 + number
        study.pretraining[row] = {"steps": 4, "mlm_loss": loss}
        rows = trained(4, mlm_loss=5.0), evaluated(4, mlm_loss=loss)
        write_rows(tmp_path / "study/pretraining" / folder, *rows, config={"seed": 5 + number})
    (tmp_path / "study" / "table.json").write_text(json.dumps(study.as_json()))
    page = page_of(tmp_path, str(tmp_path / "study"))
    tables = page.split("<table>")
    [scores] = [table for table in tables if "n=3" in table]
    assert cells(scores, "base") == ["base", "91.00 ± 1.41 n=2"]
    assert cells(scores, "given") == ["given", "80.00 n=1"]
    [seeds] = [table for table in tables if '<th scope="col">pre-training seeds' in table]
    assert cells(seeds, "base")[:3] == ["base", "1 (seed 5)", "4"]
    assert cells(seeds, "no NSP")[1] == "1 (seed 6)"
    assert cells(seeds, "given")[1] == "a given checkpoint"
    assert cells(seeds, "new")[1] == "none, from scratch"
    assert [run["name"] for run in sections_of(page)["pretraining"]["runs"]] == ["base", "no_nsp"]


def compiled_step(**values: object) -> dict[str, Any]:
    return {
        "topology": "v5e:4x4", "num_slices": 1, "devices": 16, "mesh": {"data": 16, "fsdp": 1, "tensor": 1},
        "steps": [1, 1000], "global_batch_size": 256, "seq_len": 128, "remat": "none", "fits": True,
        "peak_bytes": 3 << 29, "hbm_share": 0.0938, "roofline": None,
        "collectives": [{"kind": "all-reduce", "axes": ["data"], "dtype": "f32", "count": 2, "bytes": 1 << 20}],
        **values,
    }  # fmt: skip


def test_compiled_steps_have_a_table(tmp_path: Path):
    bounds = {"at_least_seconds": 0.02, "bound": "compute", "rows_per_second_at_most": 100.0}
    phases = [compiled_step(roofline=bounds), compiled_step(steps=[1001, 2000], fits=False, collectives=None)]
    (tmp_path / "compiled.json").write_text(json.dumps({**phases[0], "phases": phases}))
    page = page_of(tmp_path, str(tmp_path / "compiled.json"))
    assert sections_of(page) == {}
    first, collectives = page.split("<table>")[1:]
    assert cells(first, "1–1,000")[3:] == ["256", "128", "1.50", "9%", "yes", "20.0", "compute", "12,800"]
    assert cells(first, "1,001–2,000")[7:] == ["no", "–", "–", "–"]
    assert cells(collectives, "1–1,000")[1:] == ["all-reduce", "data", "f32", "2", "1.00"]


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
    assert "<img" not in page
    assert page.count("</script>") == 3
    assert HOSTILE in sections_of(page)["pretraining"]["runs"][0]["train"]
    assert not re.search(r"https?:|//[a-z]+\.[a-z]|@import|url\(", page)
    tags = Tags(page)
    assert not tags.names & {"link", "iframe", "object", "base", "img"}
    assert {value[:1] for name, value in tags.attributes if name in ("src", "href")} == {"#"}
    assert not {name for name, _ in tags.attributes if name.startswith("on")}
    assert "default-src 'none'" in page


def test_files_of_the_page_are_installed(monkeypatch: pytest.MonkeyPatch):
    arguments: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", lambda **given: arguments.update(given))
    runpy.run_path(str(helpers.REPOSITORY / "setup.py"))
    patterns = arguments["package_data"]["bert_jax.tracking.report"]
    files = [path for path in Path(curve_images.__file__).parent.iterdir() if path.suffix in (".css", ".js")]
    assert len(files) == 2
    assert all(any(path.match(pattern) for pattern in patterns) for path in files)


# --- In a browser ------------------------------------------------------------------------------------------------

MEASURE = """<script>
new MutationObserver(() => parent.postMessage(JSON.stringify({
  drawn: document.body.dataset.drawn, plots: document.querySelectorAll(".plot").length,
  curves: [...document.querySelectorAll(".plot")].filter((plot) => plot.querySelector("svg path.js-line")).length,
  wide: document.documentElement.scrollWidth - innerWidth, width: innerWidth,
  spilled: [...document.querySelectorAll(".plot")].filter((plot) => plot.scrollWidth > plot.clientWidth).length,
  color: getComputedStyle(document.body).backgroundColor, images: document.querySelectorAll("img").length,
}), "*")).observe(document.body, {attributes: true, attributeFilter: ["data-drawn"]});
</script>"""


@pytest.fixture(scope="module")
def browse() -> Callable[[Path, int, bool], dict[str, Any]]:
    """Opens a page in headless Chromium, in a frame of a width, and measures it once its curves are drawn."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("chromium is not installed")

    def measure(page: Path, width: int, dark: bool) -> dict[str, Any]:
        copy, frame = page.with_suffix(".copy.html"), page.with_suffix(".frame.html")
        copy.write_text(page.read_text().replace("<main>", f"{MEASURE}<main>", 1))
        frame.write_text(
            f'<pre id="measured"></pre><iframe src="{copy.name}" width="{width}" height="900"></iframe><script>'
            'addEventListener("message", (event) => { document.getElementById("measured").textContent = event.data; });'
            "</script>"
        )
        result = subprocess.run(
            [
                chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                f"--user-data-dir={page.parent / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=20000",
                f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--window-size={width + 100},1000",
                "--dump-dom", frame.as_uri(),
            ],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert not re.search(r"CONSOLE.*(Error|Refused|violates)", result.stderr), result.stderr
        [measured] = re.findall(r'<pre id="measured">(.*?)</pre>', result.stdout)
        assert measured, result.stderr
        return json.loads(measured)

    return measure


@pytest.mark.parametrize(
    ("width", "dark"),
    [pytest.param(400, True, marks=pytest.mark.long), (1400, False)],
    ids=["narrow-dark", "wide-light"],
)
def test_page_draws_its_curves_in_a_browser(width: int, dark: bool, browse: Any, tmp_path: Path):
    reference = str(helpers.REPOSITORY / "benchmarks" / "reference_cpu")
    tuned = write_rows(tmp_path / "tuned", trained(5), trained(9), evaluated(5, dev__f1=0.5), evaluated(9, dev__f1=0.6))
    page_of(tmp_path, reference, hostile_run(tmp_path), tuned)
    measured = browse(tmp_path / "report.html", width, dark)
    assert measured["drawn"] == "curves"
    assert measured["width"] == width
    assert measured["plots"] == measured["curves"] > 10
    assert measured["wide"] <= 0
    assert measured["spilled"] == 0
    assert measured["images"] == 0
    assert measured["color"] == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
