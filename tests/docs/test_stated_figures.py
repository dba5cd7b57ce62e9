"""Figures of the documentation: each is a number of a result, and each result is shown."""

import json
import re
from pathlib import Path

import pytest
from support import docs
from support.helpers import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))


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
