"""Preparation with Beam's DirectRunner, in one or several processes, writes the same bytes as without Beam."""

import gzip
import json
import re
import sys
from unittest.mock import Mock

import pytest
from support import child_processes, helpers
from support.preparing import files

from bert_jax import cli
from bert_jax.data.corpora import corpus
from bert_jax.data.dataset import INFO_FILE
from bert_jax.data.preparation import shards, sorted_runs
from bert_jax.data.preparation.pipeline import PrepareOptions, prepare
from bert_jax.errors import InputError

pytest.importorskip("apache_beam")

import apache_beam
from apache_beam.options.pipeline_options import GoogleCloudOptions

from bert_jax.data.preparation import beam

DIRECT = {"runner": "DirectRunner", "beam_options": ["--prism_location=/nowhere"]}  # a runner that it would download
ON_DIRECT = ("--runner", "DirectRunner", "--", "--prism_location=/nowhere")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Text, compressed text and JSON lines, with duplicate documents and a repeated line."""
    folder = tmp_path_factory.mktemp("inputs")
    documents = helpers.make_corpus(documents=240).strip().split("\n\n")
    (folder / "a.txt").write_text("\n\n".join(documents[:100]))
    packed = [document + "\nthe old sailor hears ." * (n > 100) for n, document in enumerate(documents[90:180], 90)]
    (folder / "b.txt.gz").write_bytes(gzip.compress("\n\n".join(packed).encode(), mtime=0))
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents[170:]))
    (folder / "empty.txt").write_text("\n\n")
    return [str(folder / "*.*")]


def run(inputs, tokenizer, output, *, runner="local", beam_options=(), seed=0, **options):
    chosen = PrepareOptions(**{"seq_len": 64, "eval_fraction": 0.1, "sentences": "lines", **options})
    return prepare(inputs, tokenizer, str(output), chosen, seed=seed, runner=runner, beam_options=list(beam_options))


def command_line(inputs, vocabulary_file, output, *more):
    return [
        "prepare", "--input", *map(str, inputs), "--vocab", str(vocabulary_file), "--output", str(output),
        "--sentences", "lines", *more,
    ]  # fmt: skip


def fails(capsys, arguments, status, *words):
    assert cli.main(arguments) == status
    *log, message = capsys.readouterr().err.strip().split("\n")
    assert all("--runner=" in line for line in log)
    assert message.startswith("bert-jax prepare: ")
    for word in words:
        assert word in message
    return message


# --- The same bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 5, "bucket_tokens": 1024, "dupe_factor": 2},
        {"pairs": "none", "bucket_tokens": 4096},
        {"drop_duplicates": True, "max_line_repeats": 3, "bucket_tokens": 4096},
        pytest.param({"eval_fraction": 0.0, "sentences": "split"}, marks=pytest.mark.long),
        {"eval_fraction": 1e-20},  # two documents all the same
    ],
    ids="-".join,
)
def test_same_bytes(inputs, tokenizer, tmp_path, options, monkeypatch):
    local = run(inputs, tokenizer, tmp_path / "local", **options)
    monkeypatch.setattr(sorted_runs, "TOKENS_PER_RUN", 1000)  # several runs of a slice, several parts of a bucket
    info = run(inputs, tokenizer, tmp_path / "beam", **options, **DIRECT)
    assert files(tmp_path / "beam") == files(tmp_path / "local")
    assert info == local
    assert (tmp_path / "beam" / INFO_FILE).exists()
    if "drop_duplicates" in options:
        assert all(counts.tokens for counts in info.dropped.values())
    if options.get("bucket_tokens") == 1024:
        assert len(info.splits["train"].shards) > 15


@pytest.mark.long
def test_several_processes(inputs, vocabulary_file, tmp_path):
    options = ("--bucket_tokens", "4096", "--max_line_repeats", "3")
    processes = ("--direct_running_mode=multi_processing", "--direct_num_workers=2")
    beam_run = helpers.run_cli(
        *command_line(inputs, vocabulary_file, tmp_path / "beam", *options, "--json", *ON_DIRECT, *processes)
    )
    assert beam_run.returncode == 0, beam_run.stderr
    assert cli.main(command_line(inputs, vocabulary_file, tmp_path / "local", *options)) == 0
    assert files(tmp_path / "beam") == files(tmp_path / "local")
    assert json.loads(beam_run.stdout)["train"]["documents"] > 200


def test_a_dataset_in_a_store(inputs, tokenizer, tmp_path, store):
    """Workers share a folder beside the output, which does not stay."""
    run(inputs, tokenizer, "gs://bucket/to/beam", **DIRECT, max_line_repeats=3, bucket_tokens=4096)
    run(inputs, tokenizer, tmp_path / "local", max_line_repeats=3, bucket_tokens=4096)
    expected = files(tmp_path / "local")
    assert {name.removeprefix("to/beam/") for name in store.names()} == {*expected, "provenance.json"}
    assert all(store.read(f"to/beam/{name}") == content for name, content in expected.items())


def test_local_paths_are_those_of_the_command(inputs, tokenizer, tmp_path, monkeypatch):
    """Workers may have another working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("the ship .\n\nthe sea .")
    seen = []
    monkeypatch.setattr(beam, "map_tasks", lambda function, tasks, **_: seen.extend(tasks) or [[] for _ in tasks])
    with pytest.raises(InputError, match=r"a\.txt"):
        run(["a.txt"], tokenizer, tmp_path / "data", **DIRECT)
    assert [piece.path for _, pieces in seen for piece in pieces] == [str(tmp_path / "a.txt")]


# --- Failures ---------------------------------------------------------------------------------------------------


def test_broken_files(inputs, vocabulary_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(corpus, "SLICE_BYTES", 1)  # each file is a task
    (tmp_path / "latin.txt").write_bytes("the ship .\nthe café .\n".encode("latin-1"))
    names = [*inputs, tmp_path / "latin.txt"]
    message = fails(capsys, command_line(names, vocabulary_file, tmp_path / "data", *ON_DIRECT), 2)
    assert re.fullmatch(r"bert-jax prepare: .*latin\.txt:2: .*UTF-8.*", message)
    assert not (tmp_path / "data").exists()


def test_a_worker_fails(inputs, vocabulary_file, tmp_path, capsys, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "write_shard", fail)
    assert cli.main(command_line(inputs, vocabulary_file, tmp_path / "data", *ON_DIRECT)) == 1
    message = capsys.readouterr().err.strip().split("\n")[-1]  # Beam logs the traceback
    assert message.startswith("bert-jax prepare: --runner=DirectRunner: ")
    assert "No space left on device" in message
    assert not (tmp_path / "data").exists()


# --- Runners and their options ----------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch):
    """Replaces a remote runner: records its options and ends with `seen["end"]`."""
    seen = {"end": "DONE"}

    class Elsewhere(apache_beam.runners.runner.PipelineRunner):
        def run_pipeline(self, pipeline, options):
            seen["options"] = options
            return Mock(wait_until_finish=Mock(side_effect=[seen["end"]]))

    monkeypatch.setattr(apache_beam.runners.runner, "create_runner", lambda name: Elsewhere())
    monkeypatch.setattr(apache_beam.pipeline, "create_runner", lambda name: Elsewhere())
    return seen


def test_options_are_passed_on(inputs, vocabulary_file, tmp_path, capsys, elsewhere):
    flags = ["--project=here", "--region", "europe-west4", "--temp_location=gs://bucket/temp", "--seed=7"]
    arguments = command_line(inputs, vocabulary_file, tmp_path / "data", "--runner=FlinkRunner", "--", *flags)
    fails(capsys, arguments, 2, "--output", "--runner=FlinkRunner")
    cloud = elsewhere["options"].view_as(GoogleCloudOptions)
    assert (cloud.project, cloud.region, cloud.temp_location) == ("here", "europe-west4", "gs://bucket/temp")
    assert elsewhere["options"].get_all_options()["runner"] == "FlinkRunner"


@pytest.mark.parametrize("end", ["FAILED", RuntimeError("first\nlast")], ids=repr)
def test_failed_pipelines_are_reported(inputs, vocabulary_file, tmp_path, capsys, elsewhere, end):
    elsewhere["end"] = end
    arguments = command_line(inputs, vocabulary_file, tmp_path / "data", "--runner", "SparkRunner")
    words = ["--runner=SparkRunner: ", "last" if isinstance(end, RuntimeError) else str(end)]
    fails(capsys, arguments, 1, *words)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (["--runner", "NoRunner"], "--runner=NoRunner: "),
        (["--runner", "nowhere.Runner"], "--runner=nowhere.Runner: "),
        (["--runner", "json.Runner"], "--runner=json.Runner: "),
        (["--runner", "DataflowRunner"], "--runner=DataflowRunner: "),  # no apache-beam[gcp], or else no --project
        (["--runner", "DirectRunner", "--", "--direct_num_workers=many"], "direct_num_workers"),
        (["--", "--project=here"], "--project=here: "),
    ],
)
def test_refused(inputs, vocabulary_file, tmp_path, capsys, more, word):
    fails(capsys, command_line(inputs, vocabulary_file, tmp_path / "data", *more), 2, word)
    assert not (tmp_path / "data").exists()


def test_without_beam(inputs, vocabulary_file, tmp_path):
    arguments = command_line(inputs, vocabulary_file, tmp_path / "data", "--runner", "DirectRunner")
    code = f"""
import sys
from types import SimpleNamespace
sys.modules["apache_beam"] = None
from bert_jax import cli
sys.exit(cli.main({arguments!r}))
"""
    done = child_processes.run([sys.executable, "-c", code], timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("bert-jax prepare: --runner=DirectRunner: ")
    assert done.stderr.endswith("pip install 'bert-jax[beam]'\n")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "data").exists()
