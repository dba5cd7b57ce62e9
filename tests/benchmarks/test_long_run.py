"""The long run of BERT-Tiny: its phases, and the script on a small text, stopped and continued."""

import gzip
import json
import os
import re
import sys
from pathlib import Path

import long_run_scores
import pytest
from processes import bert_jax
from support import child_processes, helpers

from bert_jax.config import load_config
from bert_jax.model import BertConfig
from bert_jax.sections import to_dict
from bert_jax.tracking.throughput import training_flops
from bert_jax.training.phases import plan_phases

PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
OVERRIDES = (
    "phases.0.steps=6", "optimizer.warmup_steps=2", "phases.0.global_batch_size=8", "phases.1.global_batch_size=8",
    "checkpoint.every_steps=3", "checkpoint.milestone_every_steps=4",
)  # fmt: skip
SCRIPT = helpers.REPOSITORY / "benchmarks" / "long_run.sh"


def test_phases_have_400_million_tokens_in_rows_of_32_and_128():
    plans = plan_phases(load_config(str(SCRIPT.with_suffix(".py"))))
    tokens = [
        (plan.stop - plan.start) * plan.config.global_batch_size * length
        for plan, length in zip(plans, (32, 128), strict=True)
    ]
    assert sum(tokens) == pytest.approx(400e6, rel=1e-4)
    assert tokens[0] == pytest.approx(3 * tokens[1], rel=1e-3)


def test_bert_mini_has_the_flops_of_the_run_that_ended():
    """Compares the two commands of the page."""
    page = (helpers.REPOSITORY / "docs" / "numbers" / "long_run.md").read_text()
    flops = []
    for command in re.findall(r"benchmarks/long_run\.sh runs/\w+ [^`]+", page):
        plans = plan_phases(load_config(str(SCRIPT.with_suffix(".py")), re.findall(r"--config\.(\S+)=(\S+)", command)))
        flops.append(0.0)
        for plan, length in zip(plans, (32, 128), strict=True):
            rows = (plan.stop - plan.start) * plan.config.global_batch_size
            model = BertConfig(**{**to_dict(plan.config.model), "vocab_size": 30_522})
            flops[-1] += rows * training_flops(model, length, round(plan.config.objective.mask_rate * length))
    assert len(flops) == 2
    assert flops[1] == pytest.approx(flops[0], rel=1e-3)


def test_a_pause_costs_nothing_and_each_phase_has_its_own_step_time():
    config = load_config(str(SCRIPT.with_suffix(".py")))
    boundary = plan_phases(config)[0].stop
    rows = [{"step": 50 * number, "step_seconds": 1.0, "tokens_seen": 8_192 * 50 * number} for number in (1, 2, 3)]
    rows[1]["step_seconds"] = 600.0  # paused
    rows += [{"step": boundary, "mlm_loss": 5.0}, {"step": boundary + 50, "step_seconds": 2.0, "tokens_seen": 3e8}]
    assert long_run_scores.cost(rows, config, 100) == {"million_tokens": 0.8192, "hours": 100 / 3600}
    assert long_run_scores.cost(rows, config, boundary + 50) == {
        "million_tokens": 300,
        "hours": (boundary + 100) / 3600,
    }


def test_the_study_of_milestones_needs_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    bert_jax("study", SCRIPT.with_name("long_run_scores.py"), f"--workdir={tmp_path}", statuses=[2])
    assert "rows, tasks: expected" in capfd.readouterr().err  # there are no milestones, but the config was read


@pytest.mark.long
def test_script_goes_on_where_it_stopped(tmp_path: Path):
    corpus, vocabulary = tmp_path / "data" / "corpus", tmp_path / "data" / "vocab"
    for folder in (corpus / "enwiki", corpus / "books", vocabulary):
        folder.mkdir(parents=True)
    text = "".join(f"the cat sat on the mat . it was number {number} .\n\n" for number in range(10))
    with gzip.open(corpus / "books" / "a.txt.gz", "wt") as out:
        out.write(text)
    with gzip.open(corpus / "enwiki" / "a.jsonl.gz", "wt") as out:
        out.writelines(json.dumps({"text": f"{text}{number}", "title": str(number)}) + "\n" for number in range(800))
    words = sorted({*text.split()})
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (vocabulary / "bert-base-uncased-vocab.txt").write_text("\n".join(pieces) + "\n")

    def run(*overrides: str) -> str:
        overrides = (*OVERRIDES, *overrides)
        environment = os.environ | {"BERT_JAX_DATA": str(tmp_path / "data"), "PATH": PATH}
        words = [SCRIPT, tmp_path / "out", *(f"--config.{override}" for override in overrides)]
        done = child_processes.run(words, env=environment, timeout=280)
        return done.stderr[-400:] if done.returncode else ""

    assert run("total_steps=20", "target.metric=mlm_loss", "target.value=100", "eval_every_steps=4") == ""
    assert run("total_steps=12") == ""
    checkpoints = {int(path.name) for path in (tmp_path / "out" / "run" / "checkpoints").iterdir()}
    assert {4, 8, 12} <= checkpoints
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["mlm_loss"] < 5
    assert long_run_scores.milestones(tmp_path / "out" / "run") == [0, 4, 8, 12]
    names = [row.name for row in long_run_scores.get_config(str(tmp_path / "out")).rows]
    assert names == ["step 0", "step 4", "step 8", "step 12"]
