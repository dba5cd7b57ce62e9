"""`export --steps`: a folder per kept step, named as revisions on the Hub are."""

import json
import re
from pathlib import Path

import pytest
from support import helpers, sources

import bert_jax
from bert_jax import cli
from bert_jax.errors import InputError
from bert_jax.interop import huggingface
from bert_jax.training.checkpoints import open_checkpoint
from bert_jax.training.pretrain import pretrain

MILESTONES = {"total_steps": 3, "checkpoint__milestones": (0, 1), "checkpoint__keep": 1, "eval_batches": 0}


@pytest.fixture(scope="module")
def workdir(dataset_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the steps 0, 1 and 3."""
    folder = tmp_path_factory.mktemp("revisions") / "base"
    pretrain(helpers.small_config(dataset_dir, optimizer__warmup_steps=1, **MILESTONES), str(folder))
    return folder


def test_every_kept_step_has_a_folder(workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    output = tmp_path / "my-bert"
    command = ["export", "--checkpoint", str(workdir), "--output", str(output), "--steps", "all"]
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(entry["step"], Path(entry["folder"]).name) for entry in found["steps"]] == [
        (0, "step0"), (1, "step1"), (3, "step3")
    ]  # fmt: skip
    assert {path.name for path in output.iterdir()} == {"step0", "step1", "step3"}
    for step in (0, 1, 3):
        alone = tmp_path / f"alone{step}"
        huggingface.export(open_checkpoint(str(workdir), step), str(alone))
        assert {path.name for path in (output / f"step{step}").iterdir()} == {path.name for path in alone.iterdir()}
        for name in ("model.safetensors", "config.json", "vocab.txt", "tokenizer.json"):
            assert (output / f"step{step}" / name).read_bytes() == (alone / name).read_bytes()
        card = (output / f"step{step}" / "README.md").read_text()
        assert f'from_pretrained("USER/my-bert", revision="step{step}")' in card
        assert "# my-bert\n" in card
        assert "revision" not in (alone / "README.md").read_text()


def test_a_step_that_is_there_is_refused_before_anything_is_written(workdir: Path, tmp_path: Path):
    assert [entry["step"] for entry in huggingface.export_steps(str(workdir), str(tmp_path / "a"), "3,1")] == [1, 3]
    with pytest.raises(InputError, match=r"a/step1.*not empty"):
        huggingface.export_steps(str(workdir), str(tmp_path / "a"), "all")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"step1", "step3"}
    (added,) = huggingface.export_steps(str(workdir), str(tmp_path / "a"), "0")
    assert added["architecture"] == "BertForPreTraining"


@pytest.mark.parametrize(
    ("steps", "more", "message"),
    [
        ("2", [], "--steps=2: .*0, 1, 3"),
        ("first", [], "--steps=first"),
        ("1,,3", [], "--steps=1,,3"),
        ("all", ["--format", "stablehlo"], "--steps=all: .*stablehlo"),
    ],
)
def test_wrong_steps_exit_with_2(
    steps: str, more: list[str], message: str, workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    command = ["export", "--checkpoint", str(workdir), "--output", str(tmp_path / "out"), "--steps", steps]
    assert cli.main([*command, *more]) == 2
    (line,) = helpers.error_lines(capsys.readouterr().err)
    assert re.search(message, line)
    assert not (tmp_path / "out").exists()


def test_steps_need_a_workdir(vocabulary: list[str], workdir: Path, tmp_path: Path):
    sources.write_checkpoint(tmp_path / "imported", vocabulary)
    for place in (tmp_path / "imported", workdir / "checkpoints" / "1"):
        with pytest.raises(InputError, match=r"steps=all: .*workdir"):
            huggingface.export_steps(str(place), str(tmp_path / "out"), "all")


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
