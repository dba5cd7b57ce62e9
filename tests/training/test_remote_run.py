"""A whole run in an object store, by the command line: killed, resumed, and read by every command."""

import json
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support import child_processes, gcs, helpers, sources
from support.runs import rows_without_times

import bert_jax
from bert_jax.cli import main
from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.interop import importing
from bert_jax.training.checkpoints import open_checkpoint

DATA, RUN = "gs://bucket/data", "gs://bucket/run"
SETTINGS = {
    "model.hidden_size": 32, "model.num_attention_heads": 4, "model.intermediate_size": 64,
    "model.max_position_embeddings": 64, "data.max_predictions": 10, "total_steps": 8, "global_batch_size": 16,
    "log_every_steps": 1, "eval_every_steps": 4, "eval_batches": 2, "checkpoint.every_steps": 4,
    "optimizer.warmup_steps": 2, "optimizer.learning_rate": 1e-2,
}  # fmt: skip


def pretrain(data: object, workdir: object, **overrides: object) -> list[str]:
    flags = helpers.flags({**SETTINGS, "data.path": data, **overrides})
    return ["pretrain", "--config=bert_tiny", f"--workdir={workdir}", *flags]


def run(*arguments: object) -> None:
    assert main([str(argument) for argument in arguments]) == 0


def put_folder(store: gcs.Emulator, folder: Path, name: str) -> None:
    for path in folder.iterdir():
        store.put(f"{name}/{path.name}", path.read_bytes())


@pytest.mark.long
def test_run_killed_during_a_save_to_a_store_resumes(store, dataset_dir, tmp_path, capsys):
    put_folder(store, dataset_dir, "data")
    run(*pretrain(dataset_dir, tmp_path / "run"))

    def kill(_: object, request: str) -> bool:
        if not request.startswith("POST") or "checkpoints/8/commit_success" not in request:
            return False
        process.send_signal(signal.SIGKILL)
        process.wait()
        return True

    store.faults.append(kill)
    command = helpers.command(*pretrain(DATA, RUN))
    process = child_processes.start(command, env=helpers.child_environment(8), stderr=subprocess.PIPE, text=True)
    said = process.communicate(timeout=200)[1]
    assert process.returncode == -signal.SIGKILL, said
    store.faults.clear()

    # What was being saved is not taken for a checkpoint, and all rows up to it are there.
    assert any(name.startswith("run/checkpoints/8/") for name in store.names())
    assert helpers.kept_steps(RUN)[-1] == 4
    assert open_checkpoint(RUN).step == 4
    with pytest.raises(InputError, match=f"{RUN}/checkpoints/8"):
        open_checkpoint(f"{RUN}/checkpoints/8")
    assert rows_without_times(RUN) == rows_without_times(tmp_path / "run")

    capsys.readouterr()
    run(*pretrain(DATA, RUN))
    assert "from step 4" in capsys.readouterr().err
    assert rows_without_times(RUN) == rows_without_times(tmp_path / "run")
    ends = [open_checkpoint(str(place)).load_parameters() for place in (RUN, tmp_path / "run")]
    sources.assert_same_parameters(*ends)

    # Every command reads and writes there, and says what it says of the run on the disk.
    said = {}
    for place, data in ((RUN, DATA), (tmp_path / "run", dataset_dir)):
        run("evaluate", "--checkpoint", place, "--data", data)
        said[str(place)] = json.loads(capsys.readouterr().out)
    assert said[RUN] == said[str(tmp_path / "run")]
    run("export", "--checkpoint", RUN, "--output", "gs://bucket/hf")
    run("export", "--checkpoint", tmp_path / "run", "--output", tmp_path / "hf")
    for path in (tmp_path / "hf").iterdir():
        exported = store.read(f"hf/{path.name}")
        # The card and the record name the run's folder and speed.
        assert exported == path.read_bytes() or path.name in ("README.md", "provenance.json"), path.name
    run("import", "--source", "gs://bucket/hf", "--output", "gs://bucket/imported")
    sources.assert_same_parameters(open_checkpoint("gs://bucket/imported").load_parameters(), ends[0])
    run("report", RUN, "--output", "gs://bucket/report.html")
    assert store.read("report.html").startswith(b"<!doctype html>")
    assert main(["export", "--checkpoint", RUN, "--output", "gs://bucket/hf"]) == 2
    assert "gs://bucket/hf" in capsys.readouterr().err


@pytest.mark.long
def test_milestones_are_kept_and_exported_in_a_store(store, dataset_dir, tmp_path, capsys):
    run(*pretrain(dataset_dir, RUN, **{"checkpoint.milestones": "0,3", "checkpoint.keep": 1}))
    run(*pretrain(dataset_dir, RUN, **{"checkpoint.keep": 1, "total_steps": 12}))
    assert helpers.kept_steps(RUN) == [0, 3, 12]
    assert json.loads(store.read("run/checkpoints/12/position/metadata"))["milestones"] == [0, 3]
    run("export", "--checkpoint", f"{RUN}/checkpoints/3", "--output", "gs://bucket/hf")
    loaded = bert_jax.load("gs://bucket/hf").embed("the ship .")
    np.testing.assert_array_equal(loaded, bert_jax.load(f"{RUN}/checkpoints/3").embed("the ship ."))


@pytest.mark.long
def test_text_goes_in_and_features_come_out(store, dataset_dir, corpus_file, tmp_path, capsys):
    store.put("corpus.txt", corpus_file.read_bytes())
    run("vocab", "--input", "gs://bucket/corpus.txt", "--output", "gs://bucket/tokenizer.json", "--size", "120")
    made = ["--vocab", "gs://bucket/tokenizer.json", "--output", DATA, "--seq_len", "64", "--sentences", "lines"]
    run("prepare", "--input", "gs://bucket/*.txt", *made, "--workers", "2", "--bucket_tokens", "8192")
    run("inspect", DATA)
    overrides = {"total_steps": 4, "eval_every_steps": 0, "eval_batches": 0, "checkpoint.every_steps": 2}
    run(*pretrain(DATA, RUN, **overrides))
    capsys.readouterr()
    run("fill-mask", "--checkpoint", RUN, "the [MASK] sees the ship .")
    assert len(capsys.readouterr().out.splitlines()) == 6
    lines = b"the ship sees the storm .\nthe fox ||| the cabin\n"
    store.put("lines.txt", lines)
    features = ["--layers", "-1", "--checkpoint", RUN, "--input", "gs://bucket/lines.txt"]
    for name in ("features.npz", "features.jsonl"):
        run("features", *features, "--output", f"gs://bucket/{name}")
    (tmp_path / "features.npz").write_bytes(store.read("features.npz"))
    arrays = np.load(tmp_path / "features.npz")
    given = [json.loads(line) for line in store.read("features.jsonl").splitlines()]
    assert [len(line["features"]) for line in given] == np.diff(arrays["offsets"]).tolist()


@pytest.mark.long
def test_run_survives_an_outage_of_seconds(store, dataset_dir):
    """Each kind of request fails once: those of gcsfs, which retries by itself, and those of TensorStore."""
    put_folder(store, dataset_dir, "data")
    for parts in (("GET", "ocdbt"), ("POST", "ocdbt"), ("POST", "metrics"), ("GET", "array_record", "alt=media")):
        store.fail(*parts, status=503, times=1)
    run(*pretrain(DATA, RUN, **{"total_steps": 4, "eval_batches": 0}))
    assert helpers.kept_steps(RUN)[-1] == 4
    assert [row["step"] for row in helpers.rows(RUN)] == [1, 2, 3, 4]


def test_store_without_checkpoint_support_is_refused(dataset_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(remote._PACKAGES, "s3", "json")  # which is installed
    monkeypatch.setattr(atomic, "is_taken", lambda _: False)
    monkeypatch.setattr(importing, "_locate", lambda path: (path, []))  # no model of other software either
    for command in (
        pretrain(dataset_dir, "s3://bucket/run"),
        ["evaluate", "--checkpoint", "s3://bucket/run", "--data", str(dataset_dir)],
        ["import", "--source", str(tmp_path), "--output", "s3://bucket/imported"],
    ):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "s3://bucket/" in error
        assert "gs://" in error


def test_workdir_without_write_access_is_refused_before_any_work(store, dataset_dir, capsys):
    put_folder(store, dataset_dir, "data")
    store.fail("POST", "run/", status=403)
    assert main(pretrain(DATA, RUN)) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("bert-jax "))
    assert "run/.write-check" in line
    assert store.count("POST", "run/") == 1
    assert not store.names("run/")
