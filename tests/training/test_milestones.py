"""Milestones: checkpoints that are saved at chosen steps, and never deleted."""

import shutil
import signal
from pathlib import Path

import pytest
from support import helpers, sources
from support.devices import one_device  # noqa: F401
from support.runs import assert_same_run, train, train_until

from bert_jax.config import FinetuneConfig, load_config
from bert_jax.errors import InputError
from bert_jax.training.checkpoints import open_checkpoint
from bert_jax.training.checks import check_config
from bert_jax.training.pretrain import pretrain

SETTINGS = {"checkpoint__every_steps": 2, "checkpoint__keep": 1, "eval_batches": 0, "log_every_steps": 2}


def run(dataset_dir: Path, workdir: Path, steps: int, **settings: object) -> None:
    pretrain(helpers.small_config(dataset_dir, **{**SETTINGS, "total_steps": steps, **settings}), str(workdir))


@pytest.fixture(scope="module")
def kept(dataset_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 5 steps with the milestones 0 and 3, and every fourth step."""
    workdir = tmp_path_factory.mktemp("kept") / "run"
    run(dataset_dir, workdir, 5, checkpoint__milestones=(0, 3), checkpoint__milestone_every_steps=4)
    return workdir


def test_milestones_are_kept_beside_the_newest(kept: Path):
    assert helpers.kept_steps(kept) == [0, 3, 4, 5]
    assert [open_checkpoint(str(kept / "checkpoints" / str(step))).step for step in (0, 3, 4)] == [0, 3, 4]


def test_step_0_has_the_initial_parameters(kept: Path, dataset_dir: Path):
    import bert_jax

    training = bert_jax.Training(helpers.small_config(dataset_dir, total_steps=5))
    saved = open_checkpoint(str(kept / "checkpoints" / "0")).load_parameters()
    sources.assert_same_parameters(saved, training.initial_state().parameters)


def test_run_resumes_from_a_milestone(kept: Path, dataset_dir: Path, tmp_path: Path):
    """With only step 0 left, the run starts from it, and ends as it did."""
    shutil.copytree(kept, tmp_path / "run")
    for step in (3, 4, 5):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    with pytest.raises(InputError, match=r"seed 0 -> 1"):
        run(dataset_dir, tmp_path / "run", 5, seed=1)
    run(dataset_dir, tmp_path / "run", 5, checkpoint__milestones=(0, 3), checkpoint__milestone_every_steps=4)
    assert helpers.kept_steps(tmp_path / "run") == [0, 3, 4, 5]
    assert_same_run(tmp_path / "run", kept)


def test_milestones_stay_after_a_resume_with_others(kept: Path, dataset_dir: Path, tmp_path: Path):
    shutil.copytree(kept, tmp_path / "run")
    run(dataset_dir, tmp_path / "run", 8, checkpoint__milestones=(2, 5, 7))
    assert helpers.kept_steps(tmp_path / "run") == [0, 3, 4, 5, 7, 8]
    run(dataset_dir, tmp_path / "run", 11)
    assert helpers.kept_steps(tmp_path / "run") == [0, 3, 4, 5, 7, 11]


@pytest.mark.long
def test_run_killed_between_milestones_ends_with_all_of_them(dataset_dir: Path, tmp_path: Path):
    settings = {
        "total_steps": 40, "checkpoint.every_steps": 10, "checkpoint.keep": 1, "checkpoint.milestones": "0,7,8,29",
        "eval_batches": 0, "log_every_steps": 2,
    }  # fmt: skip
    killed = train_until(14, dataset_dir, tmp_path / "run", signal.SIGKILL, saved=8, **settings)
    assert killed.returncode == -signal.SIGKILL
    assert {0, 7, 8} <= {*helpers.kept_steps(tmp_path / "run")}
    assert train(dataset_dir, tmp_path / "run", **settings).returncode == 0
    assert helpers.kept_steps(tmp_path / "run") == [0, 7, 8, 29, 40]
    plain = train(dataset_dir, tmp_path / "plain", **{**settings, "checkpoint.milestones": "()"})
    assert plain.returncode == 0, plain.stderr
    assert_same_run(tmp_path / "run", tmp_path / "plain")


@pytest.mark.long
def test_damaged_milestone_is_set_aside_and_saved_again(kept: Path, dataset_dir: Path, tmp_path: Path):
    shutil.copytree(kept, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "5")
    for file in (tmp_path / "run" / "checkpoints" / "4" / "parameters").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-40])
    run(dataset_dir, tmp_path / "run", 5, checkpoint__milestones=(4,))
    assert helpers.kept_steps(tmp_path / "run") == [0, 3, 4, 5]
    assert (tmp_path / "run" / "checkpoints" / "4.damaged").is_dir()
    assert_same_run(tmp_path / "run", kept)


# --- Config ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"milestones": "1,5,5"}, r"checkpoint\.milestones=.*\b5\b"),
        ({"milestones": "-1"}, r"checkpoint\.milestones=.*-1"),
        ({"milestones": "1.5"}, r"checkpoint\.milestones\S*=.*1\.5"),
        ({"milestones": "True,"}, r"checkpoint\.milestones\S*=True"),
        ({"milestones": "10,101"}, r"checkpoint\.milestones: .*101.*total_steps=100"),
        ({"milestone_every_steps": "-1"}, r"checkpoint\.milestone_every_steps=-1"),
        ({"milestone": "5"}, r"checkpoint\.milestone.*checkpoint\.milestones"),
    ],
)
def test_wrong_milestones_are_refused(overrides: dict[str, str], message: str):
    settings = [("total_steps", "100"), *((f"checkpoint.{key}", text) for key, text in overrides.items())]

    def check() -> None:
        check_config(load_config("bert_tiny", settings), 100)

    with pytest.raises(InputError, match=message):
        check()


@pytest.mark.parametrize("key", ["milestones", "milestone_every_steps"])
def test_fine_tuning_has_no_milestones(key: str):
    with pytest.raises(InputError, match=rf"checkpoint\.{key}"):
        load_config("finetune/text", [(f"checkpoint.{key}", "5")], kind=FinetuneConfig)
