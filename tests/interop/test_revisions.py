"""`export --steps`: a folder per kept step, named as revisions on the Hub are."""

import json
import re
import shutil
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


def written(folder: Path) -> dict[str, int]:
    """The time of the last change of each revision's weights."""
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/model.safetensors")}


def test_every_kept_step_has_a_folder(workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    output = tmp_path / "my-bert"
    command = ["export", "--checkpoint", str(workdir), "--output", str(output), "--steps", "all"]
    assert cli.main([*command, "--license", "mit", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(entry["step"], Path(entry["folder"]).name, entry["is_new"]) for entry in found["steps"]] == [
        (0, "step0", True), (1, "step1", True), (3, "step3", True)
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
        assert "license: mit" in card
        assert "revision" not in (alone / "README.md").read_text()


def test_second_call_writes_what_is_missing(workdir: Path, tmp_path: Path):
    assert [revision.name for revision in huggingface.export_steps(str(workdir), str(tmp_path), "1,0")] == [
        "step0", "step1"
    ]  # fmt: skip
    before = written(tmp_path)
    (tmp_path / ".step3.partial-0123abcd").mkdir()  # of a call that was killed
    revisions = huggingface.export_steps(str(workdir), str(tmp_path), "all")
    assert [(revision.step, revision.is_new) for revision in revisions] == [(0, False), (1, False), (3, True)]
    assert {revision.architecture for revision in revisions} == {"BertForPreTraining"}
    after = written(tmp_path)
    assert {name: after[name] for name in before} == before
    assert {path.name for path in tmp_path.iterdir()} == {"step0", "step1", "step3"}


def test_folder_of_another_checkpoint_is_refused_before_anything_is_written(workdir: Path, tmp_path: Path):
    huggingface.export_steps(str(workdir), str(tmp_path / "a"), "1")
    (tmp_path / "b").mkdir()
    shutil.copytree(tmp_path / "a" / "step1", tmp_path / "b" / "step3")
    with pytest.raises(InputError, match=r"b/step3.*checkpoints/3"):
        huggingface.export_steps(str(workdir), str(tmp_path / "b"), "all")
    (tmp_path / "c" / "step3").mkdir(parents=True)
    (tmp_path / "c" / "step3" / "mine").write_text("mine")
    with pytest.raises(InputError, match=r"c/step3"):
        huggingface.export_steps(str(workdir), str(tmp_path / "c"), "all")
    assert [[path.name for path in (tmp_path / name).iterdir()] for name in ("b", "c")] == [["step3"], ["step3"]]


def test_folder_with_steps_of_another_run_is_refused(workdir: Path, dataset_dir: Path, tmp_path: Path):
    other = tmp_path / "other"
    changes = {**MILESTONES, "checkpoint__milestones": (0, 2)}
    pretrain(helpers.small_config(dataset_dir, optimizer__warmup_steps=1, seed=1, **changes), str(other))
    output = tmp_path / "my-bert"
    huggingface.export_steps(str(other), str(output), "2")  # a step that the first run does not have
    with pytest.raises(InputError, match=rf"{output}/step2: .*{other}"):
        huggingface.export_steps(str(workdir), str(output), "1")
    huggingface.export_steps(str(other), str(tmp_path / "later"), "3")  # a step that both have, and is not exported
    with pytest.raises(InputError, match=r"later/step3.*checkpoints/3"):
        huggingface.export_steps(str(workdir), str(tmp_path / "later"), "1")
    assert {path.name for path in (*output.iterdir(), *(tmp_path / "later").iterdir())} == {"step2", "step3"}


def test_moved_workdir_adds_to_the_steps_that_it_exported(workdir: Path, tmp_path: Path):
    run, output = shutil.copytree(workdir, tmp_path / "run"), tmp_path / "my-bert"
    huggingface.export_steps(str(run), str(output), "0,1")
    moved = run.rename(tmp_path / "moved")
    shutil.rmtree(moved / "checkpoints" / "0")
    revisions = huggingface.export_steps(str(moved), str(output), "3")
    assert [(revision.step, revision.is_new) for revision in revisions] == [(3, True)]
    assert {path.name for path in output.iterdir()} == {"step0", "step1", "step3"}


@pytest.mark.parametrize(
    ("steps", "more", "message"),
    [
        ("2", [], "--steps=2: .*0, 1, 3"),
        ("first", [], "--steps=first"),
        ("1,,3", [], "--steps=1,,3"),
        ("all", ["--format", "stablehlo"], "--format=stablehlo: .*steps"),
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
