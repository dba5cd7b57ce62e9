"""Results of benchmarks: JSON with the environment, and the Markdown made of it."""

import json
import re
import sys
from pathlib import Path

import pytest
import record
from support.helpers import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_have_an_environment_and_rows_that_fill_their_columns(path: Path):
    content = json.loads(path.read_text())
    assert content["name"] == path.stem
    assert (REPOSITORY / next(word for word in content["command"].split() if "benchmarks/" in word)).exists()
    assert set(content["environment"]) - {"device"} == {"versions", "commit", "cpu", "cores"}
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
