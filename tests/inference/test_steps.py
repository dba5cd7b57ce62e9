"""Steps that a run keeps: their scores, and models of them."""

import json
from pathlib import Path

import pytest
from support import helpers, sources

import bert_jax
from bert_jax import cli
from bert_jax.errors import InputError
from bert_jax.training.pretrain import pretrain

MILESTONES = {"total_steps": 3, "checkpoint__milestones": (0, 1), "checkpoint__keep": 1, "eval_batches": 0}


@pytest.fixture(scope="module")
def workdir(dataset_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the steps 0, 1 and 3."""
    folder = tmp_path_factory.mktemp("revisions") / "base"
    pretrain(helpers.small_config(dataset_dir, optimizer__warmup_steps=1, **MILESTONES), str(folder))
    return folder


def test_scores_of_every_step(workdir: Path, dataset_dir: Path, capsys: pytest.CaptureFixture):
    def scores(*more: str) -> dict:
        assert cli.main(["evaluate", "--checkpoint", str(workdir), "--data", str(dataset_dir), *more]) == 0
        return json.loads(capsys.readouterr().out)

    found = scores("--steps", "all")["steps"]
    assert [entry.pop("step") for entry in found] == [0, 1, 3]
    assert found[-1] == scores()
    assert found[0]["mlm_loss"] != found[-1]["mlm_loss"]
    assert scores("--steps", "3,0")["steps"] == [{"step": 0, **found[0]}, {"step": 3, **found[2]}]
    assert cli.main(["evaluate", "--checkpoint", str(workdir), "--data", str(dataset_dir), "--steps", "9"]) == 2


def test_load_takes_a_step(workdir: Path, vocabulary: list[str], tmp_path: Path):
    text = "the ship sees the storm ."
    vectors = [bert_jax.load(str(workdir), step=step).embed(text) for step in (0, 3)]
    assert (bert_jax.load(str(workdir)).embed(text) == vectors[1]).all()
    assert (vectors[0] != vectors[1]).any()
    with pytest.raises(InputError, match=r"step=2: .*0, 1, 3"):
        bert_jax.load(str(workdir), step=2)
    sources.write_checkpoint(tmp_path / "imported", vocabulary)
    with pytest.raises(InputError, match=r"step=2: .*imported"):
        bert_jax.load(str(tmp_path / "imported"), step=2)
