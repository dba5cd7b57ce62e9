"""Runs that begin with the causal objective and continue with the masked one, as in arXiv:2507.00994."""

import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from flax import nnx
from support import helpers
from support.runs import assert_same_run, train, train_until

from bert_jax.ahead_of_time.compiled_step import compile_phases
from bert_jax.ahead_of_time.dry_run import plan_run
from bert_jax.errors import InputError
from bert_jax.interop.architectures import architecture_of
from bert_jax.interop.huggingface import model_card
from bert_jax.model import abstract_parameters, initialize
from bert_jax.tracking.metrics import read_metrics
from bert_jax.tracking.report import curves, read_runs
from bert_jax.training.checkpoints import open_checkpoint
from bert_jax.training.evaluation import evaluate_checkpoint
from bert_jax.training.pretrain import pretrain

PHASES = ({"steps": 4, "objective.lm": "ltr", "objective.nsp": False}, {"steps": -1})


def causal_first(dataset: Path, **overrides: object):
    return helpers.small_config(
        dataset, phases=PHASES, eval_batches=-1, checkpoint__every_steps=2, checkpoint__keep=9, **overrides
    )


@pytest.fixture(scope="module")
def run(dataset_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 to 4 are causal, 5 to 8 masked, with the next-sentence loss."""
    workdir = tmp_path_factory.mktemp("causal_first") / "run"
    pretrain(causal_first(dataset_dir), str(workdir))
    return workdir


def step_of(run: Path, step: int) -> str:
    return str(run / "checkpoints" / str(step))


def test_metrics_are_named_by_the_objective_of_their_phase(run: Path):
    rows = read_metrics(epath.Path(run))
    for row in rows:
        losses = {key for key in row if key.endswith("_loss") and key != "unigram_loss"}
        assert losses == ({"ltr_loss"} if row["step"] <= 4 else {"mlm_loss", "nsp_loss"}), row
    assert [row["step"] for row in rows if row.get("split") == "eval"] == [4, 8]


def test_the_report_draws_no_line_through_two_objectives(run: Path):
    [reported] = read_runs([str(run)])
    drawn = {(panel, label): points[:, 0].tolist() for panel, label, points in curves(reported)}
    assert drawn["loss", "training, ltr"] == [1, 2, 3, 4]
    assert drawn["loss", "training, mlm + nsp"] == [5, 6, 7, 8]
    assert ("loss", "training") not in drawn
    assert drawn["ltr_loss", "training"] == [1, 2, 3, 4]
    assert (drawn["ltr_loss", "unigram baseline"], drawn["mlm_loss", "unigram baseline"]) == ([4], [8])
    assert drawn["learning_rate", "training"] == [*range(1, 9)]


@pytest.mark.parametrize(
    ("step", "name", "architecture"), [(4, "ltr", "BertLMHeadModel"), (8, "mlm", "BertForPreTraining")]
)
def test_a_checkpoint_is_evaluated_and_exported_as_what_its_phase_trains(
    step: int, name: str, architecture: str, run: Path, dataset_dir: Path
):
    checkpoint = open_checkpoint(step_of(run, step))
    scores = evaluate_checkpoint(checkpoint, str(dataset_dir))
    [logged] = [
        row for row in read_metrics(epath.Path(run)) if (row["step"], row.get("split")) == (step, "eval")
    ]  # fmt: skip
    for key in ("loss", f"{name}_loss", f"{name}_accuracy", "unigram_loss"):
        assert scores[key] == pytest.approx(logged[key], rel=1e-5)
    assert architecture_of(checkpoint) == architecture
    assert f"| `objective.lm` | {name} |\n" in model_card(checkpoint, architecture, "name", parameters=1)


@pytest.mark.parametrize("step", [2, 4, 6, 8])
def test_attention_is_causal_before_the_change_and_bidirectional_after(step: int, run: Path):
    checkpoint = open_checkpoint(step_of(run, step))
    graph = abstract_parameters(checkpoint.bert_config)[0]
    model = nnx.merge(graph, checkpoint.load_parameters())
    batch = {
        "input_ids": np.arange(10, 18)[None], "token_type_ids": np.zeros((1, 8), int),
        "positions": np.arange(8)[None], "cls_positions": np.zeros((1, 1), int),
        "sequence_ids": np.ones((1, 8), int), "masked_positions": np.arange(8)[None],
    }  # fmt: skip
    changed = {**batch, "input_ids": np.where(np.arange(8) == 7, 5, batch["input_ids"])}
    logits, others = (np.asarray(model(inputs)[0][0]) for inputs in (batch, changed))
    moved = (logits != others).any(axis=-1).tolist()
    assert moved == [step > 4] * 7 + [True]


def test_next_sentence_prediction_begins_in_the_phase_that_trains_it(run: Path):
    before, after = (open_checkpoint(step_of(run, step)) for step in (4, 8))
    trained, later = before.load_parameters(), after.load_parameters()
    _, initial = initialize(before.bert_config, jax.random.fold_in(jax.random.key(0), 0))
    for part in ("pooler", "nsp_head"):
        for kept, value in zip(jax.tree.leaves(trained[part]), jax.tree.leaves(initial[part]), strict=True):
            np.testing.assert_allclose(kept, value, rtol=1e-6)
        assert not np.allclose(later[part]["kernel"], trained[part]["kernel"])


@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_run_resumes_to_the_bit_in_each_phase_and_at_their_boundary(
    step: int, run: Path, dataset_dir: Path, tmp_path: Path
):
    shutil.copytree(run, tmp_path / "run")
    for later in range(step + 2, 10, 2):
        shutil.rmtree(step_of(tmp_path / "run", later))
    pretrain(causal_first(dataset_dir), str(tmp_path / "run"))
    assert_same_run(tmp_path / "run", run)


@pytest.mark.long
@pytest.mark.parametrize(("saved", "kill"), [(24, 30), (72, 80)])
def test_a_run_killed_in_each_phase_resumes_to_the_bit(saved: int, kill: int, dataset_dir: Path, tmp_path: Path):
    settings = {"phases": ({**PHASES[0], "steps": 60}, PHASES[1])}
    assert train(dataset_dir, tmp_path / "straight", **settings).returncode == 0
    killed = train_until(kill, dataset_dir, tmp_path / "killed", signal.SIGKILL, saved=saved, **settings)
    assert killed.returncode == -signal.SIGKILL
    resumed = train(dataset_dir, tmp_path / "killed", **settings)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(tmp_path / "killed", tmp_path / "straight")


def test_a_masked_phase_is_added_to_a_finished_causal_run(run: Path, dataset_dir: Path, tmp_path: Path):
    rate = {"optimizer__schedule": "constant", "checkpoint__every_steps": 4}
    alone = {"objective__lm": "ltr", "objective__nsp": False, "total_steps": 4}
    pretrain(helpers.small_config(dataset_dir, **alone, **rate), str(tmp_path / "added"))
    for folder in ("added", "straight"):
        pretrain(helpers.small_config(dataset_dir, phases=PHASES, **rate), str(tmp_path / folder))
    assert_same_run(tmp_path / "added", tmp_path / "straight")


def test_plan_and_compile_describe_each_objective(dataset_dir: Path):
    planned = plan_run(causal_first(dataset_dir), device="v5e")["phases"]
    compiled = list(compile_phases(causal_first(dataset_dir), None))
    for causal, masked in (planned, compiled):
        assert (causal["objective"], masked["objective"]) == ("ltr", "mlm + nsp")
    assert [phase["predictions"] for phase in compiled] == [64, 10]  # every position; data.max_predictions
    flops = [phase["model_flops"] for phase in compiled]
    assert flops[0] > flops[1]
    assert flops == [phase["model_flops_per_step"] for phase in planned]


@pytest.mark.parametrize(
    ("phase", "keys", "message"),
    [
        ({"objective.lm": "ltr", "objective.nsp": True}, {}, r"objective\.lm=ltr .*objective\.nsp=False"),
        (
            {"objective.nsp": True}, {"model__pooler": False, "objective__nsp": False},
            r"objective\.nsp=True: model\.pooler=False",
        ),
    ],
)  # fmt: skip
def test_objectives_that_the_model_lacks_are_refused(
    phase: dict, keys: dict, message: str, dataset_dir: Path, tmp_path: Path
):
    phases = ({"steps": 4, "objective.nsp": False}, {"steps": 4, **phase})
    with pytest.raises(InputError, match=message):
        pretrain(helpers.small_config(dataset_dir, phases=phases, **keys), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_run_from_a_causal_checkpoint_may_continue_with_the_masked_objective(
    run: Path, dataset_dir: Path, tmp_path: Path
):
    config = helpers.small_config(
        dataset_dir, phases=({**PHASES[0], "steps": 1}, PHASES[1]), init=step_of(run, 4), total_steps=2,
        model__hidden_size=-1, optimizer__warmup_steps=1,
    )  # fmt: skip
    pretrain(config, str(tmp_path))
    assert not open_checkpoint(str(tmp_path)).bert_config.is_decoder
