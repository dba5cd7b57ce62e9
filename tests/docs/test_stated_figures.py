"""Figures of the documentation: each is a number of a result, and each result is shown and can be rerun."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support import doc_pages
from support.helpers import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))
SCRIPTS = sorted(path for path in BENCHMARKS.glob("*.py") if 'add_json_argument(parser, "' in path.read_text())


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def overview() -> ModuleType:
    return importlib.import_module("overview")


def quickstart() -> dict:
    content = json.loads((BENCHMARKS / "results" / "quickstart_recipes.json").read_text())
    return next(row for row in content["tables"]["recipes"]["rows"] if row["recipe"] == "quickstart")


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
    page = (doc_pages.DOCS / "numbers" / "expected_numbers.md").read_text()
    section = page[page.index("## What pre-training is worth downstream") :]
    table = (BENCHMARKS / "small_study" / "table.md").read_text()
    stated = re.findall(r"\d+\.\d ± \d+\.\d", section)
    assert len(stated) > 5
    for figure in stated:
        assert figure in table


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_are_shown(path: Path):
    pages = [page.read_text() for page in doc_pages.DOCS.rglob("*.md") if "_generated" not in page.parts]
    name = "gpu.section" if path.stem.startswith("gpu_") else path.stem
    assert any(f"_generated/{name}." in page for page in pages)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_in_the_overview(path: Path, overview: ModuleType):
    assert path.stem in {name for benchmark in overview.BENCHMARKS for name in benchmark.files}


def test_the_overview_has_commands_that_exist(overview: ModuleType):
    names = [name for benchmark in overview.BENCHMARKS for name in benchmark.files]
    assert len(set(names)) == len(names)
    assert {path.stem for path in RESULTS} <= set(names)
    assert all((REPOSITORY / benchmark.script).exists() for benchmark in overview.BENCHMARKS)
    assert sum(benchmark.minutes for benchmark in overview.BENCHMARKS if benchmark.is_quick) < 15


def test_the_overview_tells_the_age_of_results(overview: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overview, "RESULTS", tmp_path)
    content = {
        "date": "2026-11-23", "code": {"measures": ["benchmarks/record.py"], "digest": "of other code"},
        "tables": {"speed": {"rows": [{}, {}]}},
    }  # fmt: skip
    file = tmp_path / "packing.json"
    file.write_text(json.dumps(content))
    assert overview.state("packing").startswith("2 of 2 rows")
    assert overview.state("restarts") == "no results"
    content["code"]["digest"] = importlib.import_module("record").code_digest(["benchmarks/record.py"])
    file.write_text(json.dumps(content))
    assert overview.state("packing").startswith("up to date")
    lines = overview.overview().splitlines()
    assert lines[-2].startswith("packing: up to date")
    assert all(benchmark.command in "\n".join(lines) for benchmark in overview.BENCHMARKS)


def test_quick_benchmarks_are_rerun_and_failures_are_named(
    overview: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "benchmarks").mkdir()
    script = tmp_path / "benchmarks" / "speed.py"
    script.write_text(
        "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(os.environ.get('FOLDER', '')); "
        "sys.exit('bad' in sys.argv[1])"
    )
    commands = {"python benchmarks/speed.py good": 1, "python benchmarks/speed.py bad": 2, "python x long": 20}
    reads_data = overview.Benchmark("FOLDER={data} python benchmarks/speed.py {data}/read", 1)
    entries = [overview.Benchmark(command, minutes) for command, minutes in commands.items()]
    monkeypatch.setattr(overview, "BENCHMARKS", (*entries, reads_data))
    monkeypatch.setattr(overview, "REPOSITORY", tmp_path)
    monkeypatch.delenv("BERT_JAX_DATA", raising=False)
    assert overview.run_quick() == ["python benchmarks/speed.py bad"]
    assert (tmp_path / "good").exists()
    assert not (tmp_path / "read").exists()
    monkeypatch.setenv("BERT_JAX_DATA", str(tmp_path))
    overview.run_quick()
    assert (tmp_path / "read").read_text() == str(tmp_path)


def test_the_list_is_printed_without_jax():
    program = "import sys; sys.modules['jax'] = None; import overview; print(overview.overview())"
    done = subprocess.run([sys.executable, "-c", program], cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    assert "quickstart_recipes: " in done.stdout
