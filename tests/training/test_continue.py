"""`--config=continue`: sizes and objective of a checkpoint, and the scores before and after, on both domains."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from support import continued, helpers
from support.devices import one_device  # noqa: F401
from support.runs import rows_without_times

from bert_jax import Training, cli
from bert_jax.config import load_config
from bert_jax.config_keys import MeshKeys, OptimizerKeys
from bert_jax.errors import InputError
from bert_jax.model import abstract_parameters
from bert_jax.parallel.mesh import make_mesh
from bert_jax.training.checkpoints import Checkpoint, open_checkpoint
from bert_jax.training.initialization import fill_in_from_checkpoint, initialize_from
from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.pretrain import pretrain
from bert_jax.training.train_step import describe_state


@pytest.fixture(scope="module")
def init(tmp_path_factory: pytest.TempPathFactory, vocabulary: list[str]) -> Checkpoint:
    """A checkpoint as `import` writes it, with 64 positions."""
    return continued.write_init(tmp_path_factory.mktemp("init") / "imported", vocabulary)


@pytest.fixture(scope="module")
def domain(tmp_path_factory: pytest.TempPathFactory, vocabulary: list[str]) -> Path:
    """A dataset of a domain, with the vocabulary of `init`."""
    return continued.write_domain(tmp_path_factory.mktemp("domain") / "old", vocabulary)


@pytest.fixture(scope="module")
def run(init: Checkpoint, domain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on the domain."""
    folder = tmp_path_factory.mktemp("run")
    pretrain(continued.config(domain, init), str(folder))
    return folder


def evaluations(folder: Path) -> dict[int, dict[str, float]]:
    return {row["step"]: row for row in rows_without_times(folder) if row.get("split") == "eval"}


def test_the_sizes_are_those_of_the_checkpoint(run: Path, init: Checkpoint):
    assert open_checkpoint(str(run)).bert_config == init.bert_config
    saved = json.loads((run / "config.json").read_text())
    assert (saved["model"]["hidden_size"], saved["model"]["num_hidden_layers"]) == (48, 2)
    assert saved["objective"]["lm"] == "mlm"
    assert saved["objective"]["nsp"] is True


def test_domain_is_evaluated_before_and_after(run: Path):
    found = evaluations(run)
    assert list(found) == [0, 2, 4]
    for scores in found.values():
        assert {"mlm_loss", "nsp_loss", "unigram_loss"} <= scores.keys()
    assert found[4]["mlm_loss"] < found[0]["mlm_loss"]
    assert found[0]["tokens_seen"] == 0


def test_the_scores_before_are_those_of_the_checkpoint(
    init: Checkpoint, domain: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    arguments = ["evaluate", "--checkpoint", init.path, "--data", domain, "--batch_size", 16]
    assert cli.main([str(word) for word in arguments]) == 0
    whole = json.loads(capsys.readouterr().out)
    pretrain(continued.config(domain, init, eval_batches=-1, total_steps=2), str(tmp_path / "run"))
    assert evaluations(tmp_path / "run")[0]["mlm_loss"] == pytest.approx(whole["mlm_loss"], rel=1e-5)


def test_positions_repeat_for_longer_sequences(init: Checkpoint, vocabulary: list[str], tmp_path: Path):
    data = continued.write_domain(tmp_path / "domain", vocabulary, seq_len=128)
    training = Training(continued.config(data, init))
    assert training.model.max_position_embeddings == 128
    new = jax.device_get(training.initial_state().parameters)
    old = jax.device_get(init.load_parameters())
    before = old["embeddings"]["position"]
    np.testing.assert_array_equal(new["embeddings"].pop("position"), np.concatenate([before, before]))
    del old["embeddings"]["position"]
    jax.tree.map(np.testing.assert_array_equal, new, old)


def test_positions_repeat_on_any_number_of_devices(init: Checkpoint):
    """The 64 positions of the checkpoint are not divisible by the devices, which shard the 96 of the model."""
    mesh, model = make_mesh(MeshKeys(6), jax.devices()[:6]), replace(init.bert_config, max_position_embeddings=96)
    optimizer = make_optimizer(OptimizerKeys(), abstract_parameters(model)[2])
    state = initialize_from(init, describe_state(mesh, model, optimizer, seed=0, zero1=True))
    table, before = state.parameters["embeddings"]["position"], init.load_parameters()["embeddings"]["position"]
    assert table.sharding.spec[0] == "data"
    np.testing.assert_array_equal(table, np.concatenate([before, before[:32]]))


def test_another_vocabulary_is_refused(vocabulary: list[str], init: Checkpoint, tmp_path: Path):
    data = continued.write_domain(tmp_path / "domain", [*vocabulary[:-2], vocabulary[-1], vocabulary[-2]])
    with pytest.raises(InputError, match=f"{data} .*{init.path}"):
        pretrain(continued.config(data, init), str(tmp_path / "run"))


def test_a_run_killed_before_its_first_checkpoint_starts_anew(init: Checkpoint, domain: Path, tmp_path: Path):
    row = json.dumps({"step": 0, "split": "eval", "mlm_loss": 1.0})
    (tmp_path / "metrics.jsonl").write_text(row + "\n")
    pretrain(continued.config(domain, init, total_steps=2), str(tmp_path))
    assert [row["step"] for row in rows_without_times(tmp_path) if row.get("split") == "eval"] == [0, 2]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"model__hidden_size": 64}, ["hidden_size=48", "model.hidden_size=64"]),
        ({"model__num_hidden_layers": 3}, ["num_hidden_layers=2", "model.num_hidden_layers=3"]),
        ({"model__max_position_embeddings": 32}, ["max_position_embeddings=64", "model.max_position_embeddings=32"]),
        ({"objective__lm": "ltr", "objective__nsp": False}, ["objective.lm=mlm", "objective.lm=ltr"]),
        ({"init": ""}, ["init=CHECKPOINT"]),
    ],
)
def test_a_contradiction_to_the_checkpoint_is_refused(
    overrides: dict[str, object], words: list[str], init: Checkpoint, domain: Path, tmp_path: Path
):
    with pytest.raises(InputError) as raised:
        pretrain(continued.config(domain, init, **overrides), str(tmp_path / "run"))
    assert all(word in str(raised.value) for word in words), raised.value
    assert not (tmp_path / "run").exists()


def test_the_objective_is_that_of_the_checkpoint(
    domain: Path, init: Checkpoint, vocabulary: list[str], corpus_file: Path, vocabulary_file: Path, tmp_path: Path
):
    def objective(init: Checkpoint, data: Path = domain) -> tuple[str, bool]:
        found = fill_in_from_checkpoint(continued.config(data, init)).objective
        return found.lm, found.nsp

    assert objective(init) == ("mlm", True)
    assert objective(continued.write_init(tmp_path / "mlm", vocabulary, heads=("mlm_head",))) == ("mlm", False)
    assert objective(continued.write_init(tmp_path / "ltr", vocabulary, is_decoder=True)) == ("ltr", False)
    helpers.prepare_dataset(corpus_file, vocabulary_file, tmp_path / "single", pairs="none")
    assert objective(init, tmp_path / "single") == ("mlm", False)
    given = continued.config(domain, init, objective__nsp=False)
    assert fill_in_from_checkpoint(given).objective.nsp is False


def test_a_model_without_next_sentence_head_continues_with_masked_words_alone(
    domain: Path, vocabulary: list[str], tmp_path: Path
):
    init = continued.write_init(tmp_path / "init", vocabulary, heads=("mlm_head",))
    config = continued.config(domain, init, total_steps=1, optimizer__warmup_steps=0)
    scores = pretrain(config, str(tmp_path / "run"))
    assert "nsp_loss" not in scores
    encoder = continued.write_init(tmp_path / "encoder", vocabulary, heads=("pooler",))
    with pytest.raises(InputError, match=r"mlm_head.*init_missing_heads=True"):
        pretrain(continued.config(domain, encoder), str(tmp_path / "other"))


def test_a_resumed_run_needs_no_init(domain: Path, vocabulary: list[str], tmp_path: Path):
    init = continued.write_init(tmp_path / "init", vocabulary)
    pretrain(continued.config(domain, init, total_steps=2), str(tmp_path / "run"))
    (tmp_path / "init").rename(tmp_path / "gone")
    pretrain(continued.config(domain, init, total_steps=4), str(tmp_path / "run"))
    assert list(evaluations(tmp_path / "run")) == [0, 2, 4]


def test_a_training_loop_of_ones_own_continues(domain: Path, init: Checkpoint, run: Path):
    training = Training(continued.config(domain, init))
    assert training.model == init.bert_config
    assert training.evaluate(training.initial_state())["mlm_loss"] == evaluations(run)[0]["mlm_loss"]


def test_dry_run_plans_the_checkpoints_model(
    domain: Path, init: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture
):
    arguments = [
        "pretrain", "--config=continue", "--dry_run", "--json", f"--config.init={init.path}",
        f"--config.data.path={domain}", "--device=v5e",
    ]  # fmt: skip
    assert cli.main(arguments) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["total_steps"] == load_config("continue").total_steps
    assert plan["memory"]["parameter_bytes"] < 4_000_000
    assert cli.main([*arguments, "--config.model.hidden_size=64"]) == 2
    assert "hidden_size=48" in capsys.readouterr().err
