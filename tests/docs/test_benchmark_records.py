"""Results of benchmarks: JSON with the environment, and the Markdown made of it."""

import gzip
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from support import helpers
from support.helpers import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))


@pytest.fixture(scope="module", autouse=True)
def _path():
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def record() -> ModuleType:
    return importlib.import_module("record")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_have_an_environment_and_rows_that_fill_their_columns(path: Path, record: ModuleType):
    content = json.loads(path.read_text())
    assert content["name"] == path.stem
    assert content["command"].split()[1].startswith("benchmarks/")
    assert (REPOSITORY / content["command"].split()[1]).exists()
    assert set(content["environment"]) - {"device"} == {"versions", "commit", "cpu", "cores"}
    assert content["environment"]["commit"] or "before results had a commit" in content["note"]
    assert all((REPOSITORY / name).exists() for name in content["code"]["measures"])
    for table in content["tables"].values():
        for row in table["rows"]:
            for heading, form in table["columns"].items():
                failed = row.get("outcome", "measured") != "measured"
                assert record.cell(form, row) or row.get("excess") or failed, (heading, row)
    assert not re.search(r"/(home|root|tmp|work)/", path.read_text())


def test_a_record_is_read_back_and_rendered(tmp_path: Path, record: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["/some/benchmarks/speed.py", "--input=/data/wiki.txt", "--rounds", "3"])
    written = record.Record(tmp_path / "speed.json", measures=["benchmarks/record.py"], packages=["torch-none"])
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
    content["tables"]["rates"]["rows"][0]["code"] = record.code_digest(["benchmarks/record.py"])
    assert record.outdated(content) == (1, 2)
    assert "1 of 2 rows" in record.provenance(content)


def test_a_record_has_device_command_and_commit_of_a_copy_without_git(
    tmp_path: Path, record: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(record, "REPOSITORY", tmp_path)
    monkeypatch.setenv("BERT_JAX_COMMIT", "0123456789abcdef")
    written = record.Record(tmp_path / "gpu.json", [], command="bash benchmarks/gpu.sh", device="NVIDIA H200")
    written.set_values(ratio=1.5)
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert content["command"] == "bash benchmarks/gpu.sh"
    assert content["environment"]["commit"] == "0123456789abcdef"
    assert content["seconds"] >= 0
    assert "NVIDIA H200" in record.provenance(content)
    monkeypatch.delenv("BERT_JAX_COMMIT")
    assert record.environment()["commit"] is None


def test_results_are_older_than_a_changed_script_and_their_commit_says_that_it_is_changed(
    tmp_path: Path, record: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    script = tmp_path / "benchmarks" / "speed.py"
    script.parent.mkdir()
    script.write_text("a = 1\n")
    results = script.parent / "results"
    results.mkdir()
    (results / "speed.json").write_text("{}")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(record, "REPOSITORY", tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    written = record.Record(results / "speed.json", [])
    written.set_table("rates", {"rate": "{rate}"}, [{"rate": 1}])
    assert not record.environment()["commit"].endswith("+")
    assert record.outdated(written.content) == (0, 1)
    script.write_text("a = 2\n")
    assert record.environment()["commit"].endswith("+")
    assert record.outdated(written.content) == (1, 1)


def test_code_digest_follows_the_files(tmp_path: Path, record: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(record, "REPOSITORY", tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("a = 1\n")
    before = record.code_digest(["code"])
    assert record.code_digest(["code"]) == before
    (tmp_path / "code" / "a.py").write_text('"""Prose."""\n\n# more\na = 1\n\n')
    assert record.code_digest(["code"]) == before
    (tmp_path / "code" / "a.py").write_text("a = 2\n")
    assert record.code_digest(["code"]) != before
    (tmp_path / "flags.sh").write_text("# one\n")
    flags = record.code_digest(["flags.sh"])
    (tmp_path / "flags.sh").write_text("# two\n")
    assert record.code_digest(["flags.sh"]) != flags


def test_topologies_continue_where_they_were_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    topologies = importlib.import_module("tpu_topologies")
    phase = {
        "devices": 8, "seq_len": 128, "rows_per_device": 64, "gradient_accumulation": 2, "peak_bytes": 1 << 30,
        "hbm_bytes": 1 << 34, "argument_bytes": 1 << 29, "temp_bytes": 1 << 29, "fits": True,
        "collectives": [{"kind": "all-reduce", "bytes": 1 << 20, "count": 1, "loops": 0}],
    }  # fmt: skip
    compiled = []

    def compile_(command: list[str], **_: object) -> SimpleNamespace:
        if len(compiled) == 2:
            raise KeyboardInterrupt
        compiled.append(next(word for word in command if word.startswith("--topology")))
        return SimpleNamespace(returncode=0, stdout=json.dumps({"phases": [phase, {**phase, "fits": False}]}))

    monkeypatch.setattr(topologies, "subprocess", SimpleNamespace(run=compile_, PIPE=subprocess.PIPE))
    monkeypatch.setattr(sys, "argv", ["tpu_topologies.py", "--json", str(tmp_path / "out.json")])
    with pytest.raises(KeyboardInterrupt):
        topologies.main()
    first = list(compiled)
    compiled.clear()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--only", "v5p"])
    topologies.main()
    assert len(compiled) == 2
    assert not set(compiled) & set(first)
    rows = json.loads((tmp_path / "out.json").read_text())["tables"]["topologies"]["rows"]
    assert [row["excess"] for row in rows] == ["", ": does not fit"] * 4
    assert len({row["code"] for row in rows}) == 1
    assert "| 1.00 / 16.00: does not fit |" in capsys.readouterr().out
    compiled.clear()
    topologies.main()
    assert not compiled


def test_fine_tuning_speed_is_reported(tmp_path: Path, record: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(sys, "argv", ["finetune_speed.py"])
    speed = importlib.import_module("finetune_speed")
    run = dict.fromkeys(speed.FIGURES, 2.0) | {
        "tokens_a_row": 60.0, "first_loss": 0.7, "last_loss": 0.6, "compiled": 9, "compile_seconds": 20.0,
    }  # fmt: skip
    runs = {side: [run, run | {"examples_per_second": 4.0}] for side in speed.SIDES}
    runs["cold"] = [run | {"examples_per_second": 6.0}] * 2
    speed.report(record.Record(tmp_path / "speed.json", speed.MEASURES), {60: runs}, {"task": "mrpc"})
    content = json.loads((tmp_path / "speed.json").read_text())
    assert content["values"]["programs"] == 9
    assert content["tables"]["sides"]["rows"][1]["examples_per_second_median"] == 3.0
    assert (
        content["tables"]["ratios"]["rows"][0] | {"speed_minimum": 1.5, "speed_maximum": 3.0}
        == (content["tables"]["ratios"]["rows"][0])
    )
    assert "| 2.25 (1.50-3.00) |" in capsys.readouterr().out


def test_korean_articles_are_held_out_as_prepare_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocabulary_file):
    korean = importlib.import_module("korean")
    monkeypatch.setattr(korean, "EVAL_FRACTION", 0.3)
    articles = [document.replace(" .", ".") + "\n " for document in helpers.make_corpus(60).split("\n\n")]
    with gzip.open(tmp_path / "wiki.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"id": "1", "text": text}) + "\n" for text in articles)
    held_out = korean.write_articles(tmp_path / "wiki.jsonl.gz", tmp_path)
    trained = [json.loads(line)["text"] for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert sorted(text.strip() for text in [*held_out, *trained]) == sorted(text.strip() for text in articles)
    info = helpers.prepare_dataset(tmp_path / "all.jsonl", vocabulary_file, tmp_path / "data", eval_fraction=0.3)
    assert info.splits["eval"].documents == len(held_out) > 5
    assert info.splits["eval"].sentences == sum(len(text.splitlines()) for text in held_out)


@pytest.mark.parametrize(("name", "work"), [("korean", "make_dataset"), ("continue_pretraining", "prepare")])
def test_runs_of_other_code_are_not_recorded(
    tmp_path: Path, record: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, work: str
):
    benchmark, folders = importlib.import_module(name), []

    def stop(folder: Path, _: object) -> None:
        folders.append(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, work, stop)
    monkeypatch.setattr(benchmark, "write_articles", lambda *_: [], raising=False)
    monkeypatch.setenv("BERT_JAX_DATA", str(tmp_path))
    options = ["--folder", str(tmp_path), "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", [name, *(["wiki.jsonl.gz"] if name == "korean" else []), *options])
    for digest in ("one", "one", "two"):
        monkeypatch.setattr(record, "code_digest", lambda _, digest=digest: digest)
        with pytest.raises(KeyboardInterrupt):
            benchmark.main()
    assert folders[0] == folders[1] != folders[2]


def test_an_unfinished_part_is_not_up_to_date(tmp_path: Path, record: ModuleType, monkeypatch: pytest.MonkeyPatch):
    overview = importlib.import_module("overview")
    monkeypatch.setattr(overview, "RESULTS", tmp_path)
    gpu = next(benchmark for benchmark in overview.BENCHMARKS if "gpu.sh" in benchmark.command)
    for name in gpu.files:
        written = record.Record(tmp_path / f"{name}.json", ["benchmarks/record.py"])
        written.content["complete"] = {}
        written.set_table("cases", {}, [{"outcome": "measured"}])
    assert overview.is_current(gpu)
    for outcome in ("running", "interrupted at the deadline", "measured"):
        del written.content["complete"]
        written.set_table("cases", {}, [{"outcome": outcome}])
        assert overview.state(gpu.files[-1]).startswith("unfinished")
        assert not overview.is_current(gpu)
        written.content["complete"] = {}


def test_step_programs_compile_again_what_has_changed_and_not_for_another_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    programs = importlib.import_module("step_programs")
    compiled = []

    def measure(variant: str, case: str) -> dict:
        if len(compiled) == 4:
            raise KeyboardInterrupt
        compiled.append((variant, case))
        return dict.fromkeys(
            ("rows", "microbatches", "estimated_ms", "peak_ms", "mfu", "peak_gib", "all_reduce", "all_gather", "other"),
        ) | {"variant": variant, "case": case, "reduce_scatter": "none"}  # fmt: skip

    monkeypatch.setattr(programs, "measure", measure)
    monkeypatch.setattr(programs, "VARIANTS", {"shard_map": print})
    monkeypatch.setattr(programs, "code_digest", lambda measures: "first")
    monkeypatch.setattr(sys, "argv", ["step_programs.py", "--json", str(tmp_path / "out.json")])
    with pytest.raises(KeyboardInterrupt):
        programs.main()
    assert len(json.loads((tmp_path / "out.json").read_text())["tables"]["steps"]["rows"]) == 4
    compiled.clear()
    programs.main()
    assert len(compiled) == 2
    compiled.clear()
    monkeypatch.setitem(programs.VARIANTS, "other", print)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--only", "data x"])
    programs.main()
    assert compiled == [("other", "16 chips, data x fsdp"), ("other", "16 chips, data x tensor")]
    assert "| shard_map | 1,024 chips |" in capsys.readouterr().out
    compiled.clear()
    monkeypatch.setattr(programs, "code_digest", lambda measures: "second")
    programs.main()
    assert len(compiled) == 4
