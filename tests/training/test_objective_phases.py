"""Runs that begin with the causal objective and continue with the masked one, as in arXiv:2507.00994."""

import dataclasses
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import batches, helpers, models
from support.runs import assert_same_run, train, train_until

from bert_jax.ahead_of_time.compiled_step import compile_phases
from bert_jax.ahead_of_time.dry_run import plan_run
from bert_jax.batch import Batch, map_arrays
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.loading.loader import TrainRows, next_token_targets
from bert_jax.errors import InputError
from bert_jax.inference.pretrained import load
from bert_jax.interop.architectures import architecture_of
from bert_jax.interop.huggingface import model_card
from bert_jax.model import abstract_parameters, initialize
from bert_jax.model.bert import HEADS
from bert_jax.tracking.report import curves, read_runs
from bert_jax.training.checkpoints import open_checkpoint
from bert_jax.training.evaluation import evaluate_checkpoint, unigram_nats
from bert_jax.training.inspection import inspect_step
from bert_jax.training.objectives import divide, pretraining
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
    rows = helpers.rows(run)
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
        row for row in helpers.rows(run) if (row["step"], row.get("split")) == (step, "eval")
    ]  # fmt: skip
    for key in ("loss", f"{name}_loss", f"{name}_accuracy", "unigram_loss"):
        assert scores[key] == pytest.approx(logged[key], rel=1e-5)
    assert architecture_of(checkpoint) == architecture
    assert f"| `objective.lm` | {name} |\n" in model_card(checkpoint, architecture, "name", parameters=1)


def test_the_first_step_of_a_phase_is_inspected_with_all_of_its_losses(run: Path):
    report = inspect_step(str(run), 5)
    assert report["parameters_of_step"] == 4
    assert report["loss"] == pytest.approx(report["mlm_loss"] + report["nsp_loss"], rel=1e-6)


@pytest.mark.parametrize("step", [2, 4, 6, 8])
def test_attention_is_causal_before_the_change_and_bidirectional_after(step: int, run: Path):
    checkpoint = open_checkpoint(step_of(run, step))
    graph = abstract_parameters(checkpoint.bert_config, heads=checkpoint.heads)[0]
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
    assert (before.heads, after.heads) == (("pooler", "mlm_head"), HEADS)
    trained, later = (checkpoint.load_parameters(heads=HEADS) for checkpoint in (before, after))
    _, initial = initialize(before.bert_config, jax.random.fold_in(jax.random.key(0), 0))
    for part in ("pooler", "nsp_head"):
        models.assert_close(trained[part], initial[part], rtol=1e-6)
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
        dataset_dir, phases=({**PHASES[0], "steps": 1}, PHASES[1]), init=step_of(run, 4), init_missing_heads=True,
        total_steps=2, model__hidden_size=-1, optimizer__warmup_steps=1,
    )  # fmt: skip
    pretrain(config, str(tmp_path))
    assert not open_checkpoint(str(tmp_path)).bert_config.is_decoder


# --- Left-to-right models and runs -------------------------------------------------------------------------------


MODEL = dataclasses.replace(models.SMALL, initializer_range=0.2)
ROWS, LENGTH = 4, 16
PAPER = pretraining(nsp=True)


def make_batch() -> Batch[jax.Array]:
    sequence_ids = (np.arange(LENGTH) < np.array([16, 12, 9, 16])[:, None]).astype(np.int32)
    batch = batches.make_batch(vocab_size=200, sequence_ids=sequence_ids)
    return map_arrays(jnp.asarray, {**batch, **next_token_targets(batch["input_ids"], sequence_ids)})


@pytest.mark.parametrize("is_decoder", [False, True])
def test_left_to_right_outputs_ignore_later_tokens(is_decoder: bool):
    graph, parameters = models.initialize(dataclasses.replace(MODEL, is_decoder=is_decoder))
    model = jax.jit(lambda batch: nnx.merge(graph, parameters)(batch))
    batch = make_batch()
    before, _ = model(batch)
    for position in (1, 7, 15):
        changed = batch["input_ids"].at[0, position].add(1)
        after, _ = model({**batch, "input_ids": changed})
        left = np.abs(after[0, :position] - before[0, :position]).max(axis=(0, 1), where=np.isfinite(before[0, 0]),
                                                                         initial=0)  # fmt: skip
        assert (left == 0) == is_decoder, position
        assert not np.array_equal(after[0, position:], before[0, position:])
        np.testing.assert_array_equal(after[1:], before[1:])
    if is_decoder:  # [CLS] sees itself alone: what follows moves neither its hidden state nor the next-sentence logits
        one, other = (
            model({**batch, "input_ids": ids}) for ids in (batch["input_ids"], batch["input_ids"].at[:, 1:].add(1))
        )
        np.testing.assert_array_equal(one[1], other[1])


def test_the_left_to_right_loss_is_the_mean_over_next_tokens():
    graph, parameters = models.initialize(dataclasses.replace(MODEL, is_decoder=True))
    batch = make_batch()

    @jax.jit
    def outputs(parameters, batch):
        model = nnx.merge(graph, parameters)
        return jax.nn.log_softmax(model(batch)[0]), PAPER.sums(model, batch, None)

    log_p, sums = jax.tree.map(np.asarray, outputs(parameters, batch))
    ids, lengths = np.asarray(batch["input_ids"]), np.asarray(batch["sequence_ids"]).sum(axis=1)
    costs = [-log_p[row, t, ids[row, t + 1]] for row in range(ROWS) for t in range(lengths[row] - 1)]
    means = divide(sums, PAPER.denominators(batch))
    assert float(means["mlm_loss"]) == pytest.approx(np.mean(costs), rel=1e-5)


def test_a_left_to_right_run_learns_and_is_evaluated_left_to_right(dataset_dir: Path, tmp_path: Path):
    config = helpers.small_config(
        dataset_dir, objective__lm="ltr", objective__nsp=False, total_steps=40, eval_every_steps=20,
        checkpoint__every_steps=40, optimizer__learning_rate=2e-2,
    )  # fmt: skip
    final = pretrain(config, str(tmp_path / "run"))
    assert final["ltr_loss"] < final["unigram_loss"] - 0.5
    assert final["loss"] == final["ltr_loss"]
    assert open_checkpoint(str(tmp_path / "run")).bert_config.is_decoder
    evaluated = evaluate_checkpoint(open_checkpoint(str(tmp_path / "run")), str(dataset_dir))
    assert evaluated["ltr_loss"] < evaluated["unigram_loss"] - 0.5
    assert evaluated["loss"] == evaluated["ltr_loss"]
    rows = helpers.train_rows(tmp_path / "run")
    assert rows[-1]["loss"] == rows[-1]["ltr_loss"]
    nsp_metrics = [
        key for row in (final, evaluated, *helpers.rows(tmp_path / "run")) for key in row
        if key.startswith("nsp_")
    ]  # fmt: skip
    assert nsp_metrics == []
    with pytest.raises(InputError, match=r"objective\.lm=ltr .*objective\.lm=mlm"):
        pretrain(helpers.small_config(dataset_dir, init=tmp_path / "run"), str(tmp_path / "other"))
    with pytest.raises(InputError, match=r"is_decoder|left-to-right"):
        load(str(tmp_path / "run")).fill_mask("the [MASK] sees the owl .")


def test_left_to_right_baseline_knows_how_often_sequences_end(dataset_dir: Path, other_dir: Path):
    """Against the frequencies of the targets themselves, counted over the training split."""
    datasets = [PreparedDataset(str(path)) for path in (dataset_dir, other_dir)]
    counts = np.ones(datasets[0].tokenizer.vocab_size)
    for dataset in datasets:
        rows = TrainRows(dataset, seed=0, masking=None)
        targets = rows.rows(np.arange(rows.size))
        counts += np.bincount(targets["masked_ids"][targets["masked_weights"] > 0], minlength=len(counts))
    sep, nats = datasets[0].tokenizer.sep_id, unigram_nats(datasets, left_to_right=True)
    assert nats[sep] == pytest.approx(-np.log(counts[sep] / counts.sum()), abs=0.02)
    assert np.exp(-nats).sum() == pytest.approx(1.0)
    assert unigram_nats(datasets, left_to_right=False)[sep] > nats[sep] + 3  # in documents there is none
