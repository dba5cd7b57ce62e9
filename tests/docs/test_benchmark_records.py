"""Results of benchmarks: JSON with the environment, and the Markdown made of it."""

import json
import re
import sys
from pathlib import Path

import pytest
import record
from support import docs
from support.helpers import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_have_an_environment_and_rows_that_fill_their_columns(path: Path):
    content = json.loads(path.read_text())
    assert content["name"] == path.stem
    assert (REPOSITORY / next(word for word in content["command"].split() if "benchmarks/" in word)).exists()
    assert {*content["environment"]} - {"device", "instructions"} == {"versions", "commit", "cpu", "cores"}
    assert content["environment"]["commit"] or "before results had a commit" in content["note"]
    for table in content["tables"].values():
        for row in table["rows"]:
            for heading, form in table["columns"].items():
                failed = row.get("outcome", "measured") != "measured"
                assert record.cell(form, row) or row.get("excess") or failed, (heading, row)
    assert not re.search(r"/(home|root|tmp|work)/", path.read_text())


def test_a_record_is_read_back_and_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["/some/benchmarks/speed.py", "--input=/data/wiki.txt", "--rounds", "3"])
    written = record.Record(
        tmp_path / "speed.json", ["benchmarks/record.py", "benchmarks/gone.py"], ["torch-none"], device="NVIDIA H200"
    )
    written.set_values(ratio=1.5)
    written.set_table("rates", {"side": "{side}", "per second": "{rate:,.1f}", "MB": "{mb}"}, [
        {"side": "ours", "rate": 1234.56, "mb": None}, {"side": "theirs", "rate": 2},
    ])  # fmt: skip
    content = json.loads((tmp_path / "speed.json").read_text())
    assert content["command"] == "python benchmarks/speed.py --input=wiki.txt --rounds 3"
    assert content["values"] == {"ratio": 1.5}
    assert content["environment"]["versions"]["torch-none"] == "not installed"
    assert written.render("rates").splitlines() == [
        "| side | per second | MB |",
        "| --- | --- | --- |",
        "| ours | 1,234.6 | ? |",
        "| theirs | 2.0 |  |",
    ]
    assert record.outdated(content) == (0, 2)
    content["code"]["digest"] = "of other code"
    assert record.outdated(content) == (2, 2)
    content["tables"]["rates"]["rows"][0]["code"] = record.code_digest(content["code"]["measures"])
    assert record.outdated(content) == (1, 2)
    assert "1 of 2 rows" in record.provenance(content)
    assert "NVIDIA H200" in record.provenance(content)


# --- Figures of the documentation --------------------------------------------------------------------------------


def quickstart() -> dict:
    content = json.loads((BENCHMARKS / "results" / "quickstart.json").read_text())
    return content["tables"]["scores"]["rows"][0]


@pytest.mark.parametrize(
    ("page", "figures"),
    [
        ("README.md", ("{steps:,} steps", "{mlm_loss:.2f} nats", "{unigram_loss:.2f} nats", "{mlm_accuracy:.1%}",
                       "{nsp_accuracy:.1%}")),
        ("docs/index.md", ("{mlm_loss:.2f} nats", "{mlm_accuracy:.1%}")),
        ("configs/quickstart.py", ("MLM loss {mlm_loss:.2f}", "baseline {unigram_loss:.2f}", "{mlm_accuracy:.1%}",
                                   "{nsp_accuracy:.1%}")),
    ],
)  # fmt: skip
def test_figures_of_the_quickstart_are_those_of_its_record(page: str, figures: tuple[str, ...]):
    text = (REPOSITORY / page).read_text()
    for figure in figures:
        assert figure.format_map(quickstart()) in text


def test_figures_of_the_long_runs_are_those_of_their_records():
    rows, (mini,) = (
        json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())["tables"]["ends"]["rows"]
        for name in ("long_run", "long_run_mini")
    )
    text = (REPOSITORY / "README.md").read_text()
    assert "from {million_tokens:.0f} M tokens".format_map(rows[-1]) in text
    assert "after {core_hours:.1f} core-hours".format_map(rows[-1]) in text
    for row in (rows[0], rows[-1], mini):
        cells = [f"{row[f'{task}_mean']:.1f} ± {row[f'{task}_deviation']:.1f}" for task in ("STS-B", "SST-2", "MRPC")]
        assert f"| {row['mlm_loss_128']:.2f} nats | {' | '.join(cells)} |" in text


def test_figures_of_the_run_without_next_sentences_are_those_of_its_record():
    names = ("long_run_mini", "long_run_mini_no_nsp")
    (mini,), (without,) = (
        json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())["tables"]["ends"]["rows"] for name in names
    )
    page = (docs.DOCS / "numbers" / "long_run.md").read_text()
    assert f"without them it has {without['STS-B_mean']:.1f} points" in page
    assert f"\n  {mini['STS-B_mean']:.1f} and the untrained" in page
    assert f"MLM loss is {mini['mlm_loss_128'] - without['mlm_loss_128']:.2f} nats lower" in page


def test_figures_of_the_reference_run_are_those_of_its_evaluation():
    values = json.loads((BENCHMARKS / "reference_cpu" / "evaluation.json").read_text())
    text = (REPOSITORY / "configs" / "bert_tiny.py").read_text()
    for figure in ("MLM loss of {mlm_loss:.2f}", "baseline {unigram_loss:.2f}", "accuracy of {nsp_accuracy:.1%}"):
        assert figure.format_map(values) in text


def test_differences_of_the_study_are_those_of_its_table():
    page = (docs.DOCS / "numbers" / "expected_numbers.md").read_text()
    section = page[page.index("## What pre-training is worth downstream") :]
    table = (BENCHMARKS / "small_study" / "table.md").read_text()
    stated = re.findall(r"\d+\.\d ± \d+\.\d", section)
    assert len(stated) > 5
    for figure in stated:
        assert figure in table


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_are_shown(path: Path):
    pages = [page.read_text() for page in docs.DOCS.rglob("*.md") if "_generated" not in page.parts]
    name = "gpu.section" if path.stem.startswith("gpu_") else path.stem
    assert any(f"_generated/{name}." in page for page in pages)
