"""Tests launch/quickstart.sh: with a fake `bert-jax` that records its calls, and for real on a small text."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import helpers

from bert_jax import cli

SCRIPT = helpers.REPOSITORY / "launch" / "quickstart.sh"
SCORES = {"mlm_loss": 3.5, "unigram_loss": 6.25, "mlm_accuracy": 0.375, "nsp_accuracy": 0.75}
FAKE = """#!{python}
import json, os, sys
from pathlib import Path

with open("calls", "a") as calls:
    print(json.dumps(sys.argv[1:]), file=calls)
command, options = sys.argv[1], sys.argv[2:]
if command == os.environ.get("FAILS"):
    sys.exit(75)
if "--output" in options:
    output = Path(options[options.index("--output") + 1])
    made = dict(prepare=output / "dataset.json", export=output / "model.safetensors").get(command, output)
    made.parent.mkdir(parents=True, exist_ok=True)
    made.touch()
if command == "evaluate":
    print(os.environ["SCORES"])
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A working folder whose `bin` has a fake bert-jax."""
    (tmp_path / "bin").mkdir()
    for name, text in {
        "bert-jax": FAKE.format(python=sys.executable),
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    }.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run(folder: Path, *arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess, list[list[str]]]:
    """Returns the finished script and the calls of the fake, and forgets them."""
    done = subprocess.run(
        ["bash", SCRIPT, *arguments], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "SCORES": json.dumps(SCORES),
             "TEXT": "a.txt", **environment},
    )  # fmt: skip
    file = folder / "calls"
    calls = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    file.unlink(missing_ok=True)
    return done, calls


def test_a_second_call_reuses_results_and_resumes_training(fake: Path):
    first, calls = run(fake)
    assert first.returncode == 0, first.stderr
    commands = [call[0] for call in calls]
    assert commands == ["vocab", "prepare", "pretrain", "export", "fill-mask", "report", "evaluate"]
    for call in calls:
        assert cli.parse(call).command == call[0]
    second, again = run(fake)
    assert second.returncode == 0, second.stderr
    assert [call[0] for call in again] == ["pretrain", "fill-mask", "report", "evaluate"]
    assert [call for call in calls if call[0] == "pretrain"] == [call for call in again if call[0] == "pretrain"]


@pytest.mark.parametrize(
    ("newer", "again"),
    [
        ("a.txt", {"vocab", "prepare"}),
        ("quickstart/tokenizer.json", {"prepare"}),
        ("quickstart/run/checkpoints/20", {"export"}),
    ],
)
def test_what_is_older_than_its_input_is_made_again(fake: Path, newer: str, again: set[str]):
    for name in ("a.txt", "quickstart/run/checkpoints/10"):
        (fake / name).parent.mkdir(parents=True, exist_ok=True)
        (fake / name).touch()
    run(fake)
    time.sleep(0.01)
    (fake / newer).touch()
    done, calls = run(fake)
    assert done.returncode == 0, done.stderr
    assert {call[0] for call in calls} & {"vocab", "prepare", "export"} == again


@pytest.mark.parametrize(("mlm_loss", "status"), [(5.2, 0), (5.3, 1), (6.5, 1)])
def test_a_model_on_the_plateau_is_a_failure(fake: Path, mlm_loss: float, status: int):
    done, _ = run(fake, SCORES=json.dumps({**SCORES, "mlm_loss": mlm_loss}))
    assert done.returncode == status
    assert f"{mlm_loss:.2f}" in done.stdout
    assert ("got" in done.stderr) == bool(status)


def test_output_has_every_score_and_commands_that_work_as_typed(fake: Path):
    done, _ = run(fake, "a-folder")
    table = done.stdout.rpartition("==")[2]
    assert all(value in table for value in ("3.50", "6.25", "2.75", "37.5%", "75.0%"))
    assert max(map(len, done.stdout.splitlines())) <= 80
    lines = [line for line in done.stdout.replace("\\\n", "").splitlines() if line.startswith("  bin/")]
    assert len(lines) == 3
    for line in lines:
        program, *arguments = shlex.split(line)
        assert (fake / program).exists()
        assert cli.parse(arguments).command == arguments[0]


@pytest.mark.long
def test_the_whole_script_on_a_small_text(tmp_path: Path):
    (tmp_path / "text.txt").write_text(helpers.make_corpus(400))
    overrides = {
        "model.hidden_size": 64, "model.num_attention_heads": 4, "model.intermediate_size": 128,
        "total_steps": 500, "optimizer.warmup_steps": 50, "eval_every_steps": 0,
    }  # fmt: skip
    programs = Path(sys.executable).parent
    environment = helpers.child_environment(TEXT=str(tmp_path / "text.txt"), PATH=f"{programs}:{os.environ['PATH']}")
    command = ["bash", SCRIPT, tmp_path / "made", *helpers.flags(overrides)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    scores = json.loads((tmp_path / "made" / "evaluation.json").read_text())
    assert scores["unigram_loss"] - scores["mlm_loss"] > 1
    assert (tmp_path / "made" / "hf" / "model.safetensors").exists()
    assert (tmp_path / "made" / "report.html").exists()
