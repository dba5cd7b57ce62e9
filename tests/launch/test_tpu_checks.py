"""Tests launch/tpu_checks.py: accepted input, and errors of one line."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support import helpers, sources

PATH = helpers.REPOSITORY / "launch" / "tpu_checks.py"
spec = importlib.util.spec_from_file_location("tpu_checks", PATH)
tpu_checks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tpu_checks)

DATA = "--config.data.path=/mnt/data"
PRETRAIN = ["bert-jax", "pretrain", "--config=bert_tiny", "--workdir=/mnt/run"]


@pytest.fixture(autouse=True)
def without_gcloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tpu_checks.shutil, "which", lambda name: None)
    monkeypatch.chdir(tmp_path)  # `main` goes to the clone


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture):
    """Calls `main`, which must refuse, and returns its line."""

    def call(*arguments: str) -> str:
        with pytest.raises(SystemExit) as raised:
            tpu_checks.main(arguments)
        assert raised.value.code == 2
        written = capsys.readouterr()
        assert written.out == ""
        (line,) = [line for line in written.err.splitlines() if line.startswith("launch/tpu_pod.sh: ")]
        return line

    return call


@pytest.mark.parametrize(
    "name", ["v2-8", "v3-2048", "v4-8", "v4-4096", "v5litepod-1", "v5litepod-256", "v5p-8", "v5p-12288", "v6e-256"]
)
def test_known_accelerator_types_and_sizes(name: str):
    tpu_checks.main([f"--accelerator-type={name}"])


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("v6e-999", ["v6e-128", "v6e-256"]), ("v6e-2", ["v6e-1", "v6e-4"]), ("v5p-96", ["v5p-64", "v5p-128"]),
        ("v5e-16", ["v5litepod-16"]), ("v6-8", ["v6e-8"]), ("v5litepod", ["v5litepod-1"]), ("h100-8", ["v4-64"]),
        ("v5p-24576", ["v5p-12288"]), ("tpu7x-128", ["launch/gke_jobset.sh"]), ("v6e-8x", ["v6e-8"]),
    ],
)  # fmt: skip
def test_other_accelerators_are_refused_with_those_near_them(name: str, near: list[str], refusal):
    line = refusal(f"--accelerator-type={name}")
    assert f"--accelerator-type={name}" in line
    assert all(word in line for word in near), line


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v5litepod-8", "v5e:2x4"), ("v5litepod-256", "v5e:16x16"), ("v6e-1", "v6e:1x1"), ("v6e-32", "v6e:4x8"),
        ("v5p-8", "v5p:2x2x1"), ("v5p-128", "v5p:4x4x4"), ("v5p-640", "v5p:4x4x20"), ("v5p-1536", "v5p:8x8x12"),
        ("v5p-12288", "v5p:16x16x24"), ("v4-4096", "v4:8x16x16"), ("v3-8", "v3:2x2"), ("v2-512", "v2:16x16"),
    ],
)  # fmt: skip
def test_topologies_of_accelerators(name: str, expected: str):
    assert tpu_checks.topology(name) == expected


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def clones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A repository with a branch and a tag, and a clone of it, in which the checks are made."""
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    origin.mkdir()
    git(origin, "init", "--quiet", "--initial-branch=main")
    git(origin, "commit", "--quiet", "--allow-empty", "--message=first")
    git(origin, "tag", "--annotate", "--message=tagged", "v1")
    git(origin, "commit", "--quiet", "--allow-empty", "--message=second")
    git(tmp_path, "clone", "--quiet", str(origin), "clone")
    monkeypatch.setattr(tpu_checks, "CLONE", clone)
    return origin, clone


def test_the_commit_of_a_branch_a_tag_or_a_hash_that_is_pushed(clones: tuple[Path, Path], capsys):
    origin, _ = clones
    first, second = git(origin, "rev-parse", "HEAD~1"), git(origin, "rev-parse", "HEAD")
    git(origin, "commit", "--quiet", "--allow-empty", "--message=third, which the clone has not")
    third = git(origin, "rev-parse", "HEAD")
    refs = {"main": third, "v1": first, first: first, second[:10]: second, "": second, third: third}
    for ref, commit in refs.items():
        tpu_checks.main([f"--repo={origin}", f"--ref={ref}"])
        assert capsys.readouterr().out == f"{commit}\n"


def test_unpushed_commit_is_refused_and_changes_are_listed(clones: tuple[Path, Path], refusal, capsys):
    origin, clone = clones
    (clone / "new.py").touch()
    tpu_checks.main([f"--repo={origin}", "--ref="])
    assert re.search(r"\b1 changed", capsys.readouterr().err)
    git(clone, "commit", "--quiet", "--allow-empty", "--message=not pushed")
    commit = git(clone, "rev-parse", "HEAD")
    assert commit in refusal(f"--repo={origin}", "--ref=")
    assert "--ref=0123456789" in refusal(f"--repo={origin}", "--ref=0123456789")
    assert "main" in refusal(f"--repo={origin}", "--ref=mian")
    assert "--repo=/nowhere" in refusal("--repo=/nowhere", "--ref=main")


@pytest.mark.parametrize(
    "command",
    [
        [*PRETRAIN, DATA],
        ["env", "JAX_COMPILATION_CACHE_DIR=gs://bucket/c", "A=1", *PRETRAIN, DATA],
        ["python", "-m", "bert_jax.cli", *PRETRAIN[1:], DATA],
        ["bert-jax", "pretrain", "--config=bert_large:lamb", "--workdir=/r", "--config.phases.0.data.path=gs://bucket/a",
         "--config.phases.1.data.path=gs://bucket/b"],
        ["bert-jax", "finetune", "--config=finetune/glue:sst2", "--workdir=/r", "--config.init=/i", DATA],
        ["bash", "-c", "whatever"],
    ],
)  # fmt: skip
def test_commands_that_would_start(command: list[str]):
    tpu_checks.main(["--", *command])


def test_a_config_that_a_checkpoint_fills_in_is_checked(
    vocabulary: list[str], dataset_dir: Path, tmp_path: Path, refusal
):
    command = ["bert-jax", "pretrain", "--config=continue", "--workdir=/r", f"--config.data.path={dataset_dir}"]
    assert "init is not set" in refusal("--", *command)
    sources.write_checkpoint(tmp_path / "init", vocabulary)
    command.append(f"--config.init={tmp_path / 'init'}")
    assert "optimizer.b1" in refusal("--", *command, "--config.optimizer.b1=2")
    tpu_checks.main(["--", *command])


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["bert-jax", "pretrian", "--config=nope"], "pretrian"),
        (["bert_jax", "pretrain"], "bert-jax"),
        (["bert-jax", "pretrain", "--config=nope", "--workdir=/r"], "=nope"),
        (["bert-jax", "pretrain", "--config=bert_tiny"], "--workdir"),
        ([*PRETRAIN], "data.path"),
        ([*PRETRAIN, DATA, "--config.total_stps=5"], "total_stps"),
        ([*PRETRAIN, DATA, "--config.total_steps=many"], "--config.total_steps"),
        ([*PRETRAIN, DATA, "--config.optimizer.b1=2"], "optimizer.b1"),
        ([*PRETRAIN, DATA, "--colour=red"], "--colour=red"),
        (["env", "A=1", *PRETRAIN, DATA, "--config.attention=flash"], "attention"),
        (["bert-jax", "pretrain", "--config=bert_large:lamb", "--workdir=/r"], "data.path"),
        ([*PRETRAIN[:-1], "--workdir=gs:/bucket/run", DATA], "gs:/bucket/run"),
        ([*PRETRAIN[:-1], "--workdir=gs://UPPER/run", DATA], "gs://UPPER/run"),
        ([*PRETRAIN[:-1], "--workdir=s3://bucket/run", DATA], "s3://bucket/run"),
        ([*PRETRAIN, "--config.data.path=gs://b"], "gs://b"),
        (["bert-jax", "finetune", "--config=finetune/glue:sst3", "--workdir=/r"], "sst3"),
        (["bert-jax", "finetune", "--config=finetune/text", "--workdir=/r", "--config.num_epochs=0"], "num_epochs"),
    ],
)
def test_commands_that_would_fail_at_once_are_refused_in_one_line(command: list[str], says: str, refusal):
    assert says in refusal("--", *command)


def test_workdir_on_the_tpus_disk_is_warned_of(capsys):
    tpu_checks.main(["--", *PRETRAIN[:-1], "--workdir=runs/tiny", DATA])
    assert "--workdir=runs/tiny" in capsys.readouterr().err


@pytest.fixture
def buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of buckets, `data` with a dataset and `runs` for workdirs, and a gcloud that knows no others."""
    folder = tmp_path / "cloud" / "buckets"
    (folder / "data" / "wiki").mkdir(parents=True)
    (folder / "data" / "wiki" / "dataset.json").touch()
    (folder / "runs").mkdir()
    program = tmp_path / "gcloud"
    script = Path(__file__).with_name("fake_gcloud.py")
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS {shlex.quote(str(script))} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(tpu_checks.shutil, "which", lambda name: str(program))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_CLOUD", str(tmp_path / "cloud"))
    return folder


def on_buckets(workdir: str, data: str) -> list[str]:
    return ["--", *PRETRAIN[:-1], f"--workdir={workdir}", f"--config.data.path={data}"]


@pytest.mark.parametrize(("options", "wrote"), [([], True), (["--dry-run"], False)])
def test_buckets_are_read_written_and_cleaned_up(options: list[str], wrote: bool, buckets: Path):
    tpu_checks.main([*options, *on_buckets("gs://runs/large", "gs://data/wiki")])
    assert not [path for path in (buckets / "runs").rglob("*") if path.is_file()]
    calls = (buckets.parent / "calls").read_text()
    assert ("gs://runs/large/.tpu_pod_check" in calls) == wrote


def test_buckets_that_cannot_be_used_are_refused(buckets: Path, refusal):
    assert "gs://data/books/dataset.json" in refusal(*on_buckets("gs://runs/large", "gs://data/wiki,gs://data/books"))
    assert "gs://nowhere" in refusal(*on_buckets("gs://nowhere/large", "gs://data/wiki"))
    (buckets / "runs" / ".read_only").touch()
    assert "--workdir=gs://runs/large" in refusal(*on_buckets("gs://runs/large", "gs://data/wiki"))


def test_compile_needs_something_to_compile(refusal):
    assert "--compile" in refusal("--compile", "--accelerator-type=v6e-8", "--", "bert-jax", "inspect", "data")


def test_compile_says_what_does_not_fit(refusal, monkeypatch: pytest.MonkeyPatch):
    called = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        called.append(command)
        return subprocess.CompletedProcess(command, 2, None, "a log line\nbert-jax compile: 3 GiB too much\n")

    monkeypatch.setattr(tpu_checks.subprocess, "run", run)
    line = refusal("--compile", "--accelerator-type=v6e-8", "--node-count=2", "--", *PRETRAIN, DATA)
    assert "3 GiB too much" in line
    assert called[0][3:7] == ["compile", "--config=bert_tiny", "--topology=v6e:2x4", "--num_slices=2"]
    assert called[0][-1] == DATA
