"""Programs that the runs of a process share."""

from pathlib import Path

import jax
import pytest
from support import helpers
from support.compilations import logged_compilations
from support.devices import one_device  # noqa: F401

from bert_jax.parallel.shared_programs import KEPT, forget_programs, shared
from bert_jax.parallel.step_program import TrainStep
from bert_jax.tracking.metrics import read_metrics
from bert_jax.tracking.throughput import NOT_REPRODUCIBLE
from bert_jax.training.pretrain import pretrain


def test_equal_arguments_give_the_first_result_until_it_is_forgotten():
    made = shared(lambda *arguments, **options: object())
    tree = {"a": (1, "b"), "c": {"d": None}}
    first = made(tree, e=2)
    assert made({"c": {"d": None}, "a": (1, "b")}, e=2) is first
    assert made(tree, e=2.0) is not first
    assert made(tree, e=True) is not made(tree, e=1)
    assert made({**tree, "c": {"d": 0}}, e=2) is not first
    forget_programs()
    assert made(tree, e=2) is not first


def test_few_results_are_kept():
    made = shared(lambda number: object())
    first, last = made(0), made(KEPT)
    for number in range(1, KEPT):
        made(number)
    assert made(KEPT) is last
    assert made(0) is not first


def test_run_of_another_seed_and_schedule_compiles_nothing_and_gives_the_rows_of_a_first_run(
    dataset_dir: Path, tmp_path: Path
):
    config = helpers.small_config(dataset_dir, seed=1, optimizer__learning_rate=5e-3, total_steps=9)
    with logged_compilations() as of_first:
        pretrain(config, str(tmp_path / "first"))
        of_first = {name for name, _ in of_first}
    pretrain(helpers.small_config(dataset_dir, total_steps=4), str(tmp_path / "other"))
    with logged_compilations(forget=False) as of_second:
        pretrain(config, str(tmp_path / "second"))
    assert {"train_step", "evaluation_sums", "make"} <= of_first
    assert {name for name, _ in of_second}.isdisjoint(of_first)
    first, second = (
        [{k: v for k, v in row.items() if k not in NOT_REPRODUCIBLE} for row in read_metrics(tmp_path / name)]
        for name in ("first", "second")
    )
    assert first == second


def test_step_is_compiled_with_the_settings_of_jax_that_its_caller_has(
    dataset_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lower, precisions = TrainStep.lower, []

    def spy(*arguments):
        precisions.append(jax.config.jax_default_matmul_precision)
        return lower(*arguments)

    monkeypatch.setattr(TrainStep, "lower", spy)
    forget_programs()
    for number, precision in enumerate((None, "highest", "highest", None)):
        with jax.default_matmul_precision(precision):
            config = helpers.small_config(dataset_dir, total_steps=3, eval_batches=0)
            pretrain(config, str(tmp_path / f"run{number}"))
    assert precisions == [None, "highest"]


def test_another_optimizer_and_another_model_are_other_programs(dataset_dir: Path, tmp_path: Path):
    pretrain(helpers.small_config(dataset_dir, total_steps=3, eval_batches=0), str(tmp_path / "first"))
    for number, changed in enumerate(({"optimizer__weight_decay": 0.3}, {"model__hidden_act": "relu"})):
        with logged_compilations(forget=False) as found:
            config = helpers.small_config(dataset_dir, total_steps=3, eval_batches=0, **changed)
            pretrain(config, str(tmp_path / f"other{number}"))
        assert "train_step" in dict(found)
