"""Runs of several phases, and runs that start from another's parameters."""

import json
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from support import helpers, models
from support.devices import all_devices, one_device  # noqa: F401
from support.runs import assert_same_run, rows_without_times, train, train_until

from bert_jax.config import PretrainConfig, load_config
from bert_jax.data.dataset import PreparedDataset
from bert_jax.errors import InputError
from bert_jax.sections import from_mapping, to_dict
from bert_jax.training.checkpoints import open_checkpoint
from bert_jax.training.phases import plan_at, plan_phases
from bert_jax.training.pretrain import pretrain


@pytest.fixture(scope="module")
def short_dir(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path, vocabulary_file: Path) -> Path:
    path = tmp_path_factory.mktemp("short") / "data"
    helpers.prepare_dataset(corpus_file, vocabulary_file, path, seq_len=32)
    return path


def two_phases(short: Path, long: Path, steps: int = 4) -> tuple[dict, ...]:
    return (
        {"steps": steps, "data.path": str(short), "global_batch_size": 32, "data.max_predictions": 5},
        {"steps": -1, "data.path": str(long)},
    )


def phased(short: Path, long: Path, steps: int = 4, **overrides: object):
    return helpers.small_config(long, phases=two_phases(short, long, steps), **overrides)


@pytest.fixture(scope="module")
def phased_run(short_dir: Path, dataset_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """The first phase as a run of its own, to which the second is added; the workdir and the last scores."""
    workdir = tmp_path_factory.mktemp("phased")
    settings = {"optimizer__restart_schedule": True, "eval_every_steps": 0}
    first = {"global_batch_size": 32, "data__max_predictions": 5, "total_steps": 4}
    pretrain(helpers.small_config(short_dir, **first, **settings), str(workdir))
    shutil.copytree(workdir, workdir / "first")
    return workdir, pretrain(phased(short_dir, dataset_dir, **settings), str(workdir))


@pytest.fixture(scope="module")
def short_run(phased_run: tuple[Path, dict]) -> Path:
    """A run of the first phase alone."""
    return phased_run[0] / "first"


def test_plan_covers_every_step_with_its_config(short_dir: Path, dataset_dir: Path):
    plans = plan_phases(phased(short_dir, dataset_dir))
    assert [(plan.start, plan.stop) for plan in plans] == [(0, 4), (4, 8)]
    assert [plan.config.global_batch_size for plan in plans] == [32, 16]
    assert [plan.config.data.max_predictions for plan in plans] == [5, 10]
    assert [plan_at(phased(short_dir, dataset_dir), step).start for step in (0, 4, 5, 8)] == [0, 0, 4, 4]
    (only,) = plan_phases(helpers.small_config(dataset_dir))
    assert (only.start, only.stop) == (0, 8)


@pytest.mark.usefixtures("all_devices")
@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ("({'steps': 4},)", r"phases: .*\[4\].*total_steps=8"),
        ("({'steps': 8}, {'steps': -1})", r"\[8, -1\].*total_steps=8"),
        ("({'steps': -1}, {'steps': -1})", r"\[-1, -1\].*total_steps=8"),
        ("({'steps': 0}, {'steps': 8})", r"phases\.0\.steps=0: "),
        ("({'steps': True}, {'steps': 7})", r"phases\.0\.steps=True: "),
        ("({'data.path': 'x'},)", r"phases\.0\.steps=None: "),
        ("({'steps': 8, 'model.hidden_size': 64},)", r"phases\.0\.model\.hidden_size: "),
        ("({'steps': 8, 'seed': 64},)", r"phases\.0\.seed: "),
        ("({'steps': 8, 'data.pat': 'x'},)", r"phases\.0\.data\.pat: .*data\.path"),
        ("({'steps': 8, 'global_batch_size': 'x'},)", r"phases\.0\.global_batch_size=x: .*\bint\b"),
        ("({'steps': 8, 'global_batch_size': 20},)", r"global_batch_size=20\b"),
        ("({'steps': 8, 'objective.mask_rate': 2.0},)", "mask_rate"),
        ("({'steps': 8, 'data.path': '/nowhere'},)", "/nowhere"),
        ("({'steps': 2, 'optimizer.warmup_steps': 2}, {'steps': -1})", r"optimizer\.warmup_steps=2: .*\b2 "),
    ],
)
def test_invalid_phases_are_refused(phases: str, message: str, dataset_dir: Path, tmp_path: Path):
    restart = "optimizer.warmup_steps" in phases
    with pytest.raises(InputError, match=message):
        pretrain(
            helpers.small_config(dataset_dir, phases=phases, optimizer__restart_schedule=restart), str(tmp_path / "run")
        )
    assert not (tmp_path / "run").exists()


def test_values_that_every_phase_replaces_are_not_checked(dataset_dir: Path):
    phases = ({"steps": 4, "optimizer.warmup_steps": 2}, {"steps": -1, "optimizer.warmup_steps": 1})
    config = helpers.small_config(
        dataset_dir, phases=phases, optimizer__warmup_steps=9, optimizer__restart_schedule=True
    )
    assert [phase.config.optimizer.warmup_steps for phase in helpers.open_phases(config)] == [2, 1]


def test_phases_of_different_vocabularies_are_refused(
    corpus_file: Path, vocabulary: list[str], dataset_dir: Path, tmp_path: Path
):
    helpers.write_tokenizer(tmp_path / "tokenizer.json", [*vocabulary[:-2], vocabulary[-1], vocabulary[-2]])
    helpers.prepare_dataset(corpus_file, tmp_path / "tokenizer.json", tmp_path / "other")
    with pytest.raises(InputError, match=f"{dataset_dir} .*{tmp_path / 'other'} "):
        helpers.open_phases(phased(tmp_path / "other", dataset_dir))


def test_one_key_of_one_phase_from_the_command_line(tmp_path: Path):
    overrides = [("phases", "({'steps': 3}, {'steps': -1})"), ("phases.1.data.path", "b"), ("phases.0.steps", "5")]
    config = load_config("bert_tiny", overrides)
    assert config.phases == ({"steps": 5}, {"steps": -1, "data.path": "b"})
    for key, message in (
        ("phases.2.data.path", r"phases\.2\.data\.path.*\b2 "),
        ("phases.0.data.pth", r"phases\.0\.data\.pth\b.*data\.path"),
        (f"phases.{'9' * 5000}.data.path", r"phases\.9{5000}\.data\.path"),
    ):
        with pytest.raises(InputError, match=message):
            load_config("bert_tiny", [*overrides, (key, "x")])
    for phases in ("(8,)", "({'steps': 8, 1: 2},)"):
        with pytest.raises(InputError, match=r"phases\.0=.*: expected a value of type Mapping"):
            load_config("bert_tiny", [("phases", phases)])


def test_the_schedule_is_one_or_restarts(short_dir: Path, dataset_dir: Path, phased_run: tuple[Path, dict]):
    def rates(**overrides: object) -> list[float]:
        first, second = helpers.open_phases(phased(short_dir, dataset_dir, optimizer__learning_rate=1.0, **overrides))
        return [float((first if step < 4 else second).schedule()(step)) for step in range(8)]

    np.testing.assert_allclose(rates(), [0, 0.5, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8], rtol=1e-6)
    np.testing.assert_allclose(
        rates(optimizer__restart_schedule=True), [0, 0.5, 2 / 4, 1 / 4, 0, 0.5, 2 / 4, 1 / 4], rtol=1e-6
    )
    logged = [row["learning_rate"] for row in helpers.train_rows(phased_run[0])]
    np.testing.assert_allclose(logged, [0, 5e-3, 5e-3, 2.5e-3, 0, 5e-3, 5e-3, 2.5e-3], rtol=1e-5)


def test_a_stable_checkpoint_decays_to_zero_in_a_later_run(dataset_dir: Path, tmp_path: Path):
    def run(folder: str, schedule: str, total_steps: int) -> list[float]:
        keys = {"optimizer__schedule": schedule, "total_steps": total_steps, "eval_batches": 0}
        if schedule == "wsd":
            keys["optimizer__decay_steps"] = 4
        pretrain(helpers.small_config(dataset_dir, **keys), str(tmp_path / folder))
        return [row["learning_rate"] for row in helpers.train_rows(tmp_path / folder)]

    run("stable", "constant", 4)
    rates = run("stable", "wsd", 8)
    decayed = [1e-2 * (1 - (step / 4) ** 0.5) for step in range(4)]
    np.testing.assert_allclose(rates, [0, 5e-3, 1e-2, 1e-2, *decayed], rtol=1e-5)
    assert run("straight", "wsd", 8) == rates
    ends = (open_checkpoint(str(tmp_path / folder)).load_parameters() for folder in ("stable", "straight"))
    models.assert_close(*ends, rtol=1e-5, atol=1e-6)  # by two programs


def test_a_phase_of_its_own_schedule_decays_from_the_peak(dataset_dir: Path):
    for keys, power in (({"optimizer.schedule": "wsd", "optimizer.decay_steps": 4}, 0.5), ({}, 1)):
        phases = {"steps": 4, "optimizer.schedule": "constant"}, {"steps": 4, "optimizer.warmup_steps": 0, **keys}
        config = helpers.small_config(dataset_dir, phases=phases, optimizer__restart_schedule=True)
        first, second = helpers.open_phases(config)
        rates = [float((first if step < 4 else second).schedule()(step)) for step in range(9)]
        expected = [0, 0.5, 1, 1, *(1 - (step / 4) ** power for step in range(5))]
        np.testing.assert_allclose(rates, 1e-2 * np.array(expected), rtol=1e-6)


def test_the_batch_ramps_up_over_phases_under_one_schedule(dataset_dir: Path, tmp_path: Path):
    phases = ({"steps": 2, "global_batch_size": 8}, {"steps": 2}, {"steps": -1, "global_batch_size": 32})
    config = helpers.small_config(dataset_dir, phases=phases, total_steps=6, eval_batches=0)
    pretrain(config, str(tmp_path))
    rows = helpers.train_rows(tmp_path)
    assert [row["examples_seen"] for row in rows] == [8, 16, 32, 48, 80, 112]
    rates = [row["learning_rate"] / 1e-2 for row in rows]
    np.testing.assert_allclose(rates, [0, 1 / 2, 4 / 6, 3 / 6, 2 / 6, 1 / 6], rtol=1e-5)
    # the sequences of the ramp are those of batches of one size, in order
    ramp = [phase.train_loader.batch(phase.start + i, np.arange(phase.config.global_batch_size))["input_ids"]
            for phase in helpers.open_phases(config) for i in range(2)]  # fmt: skip
    (whole,) = helpers.open_phases(helpers.small_config(dataset_dir, total_steps=7, optimizer__warmup_steps=1))
    straight = [whole.train_loader.batch(step, np.arange(16))["input_ids"] for step in range(7)]
    np.testing.assert_array_equal(np.concatenate(ramp), np.concatenate(straight))


def test_phase_continues_reading_where_previous_phase_stopped(dataset_dir: Path, short_dir: Path):
    phases = ({"steps": 3}, {"steps": 2, "data.path": str(short_dir)}, {"steps": 3, "global_batch_size": 32})
    opened = helpers.open_phases(helpers.small_config(dataset_dir, phases=phases))
    assert [phase.train_loader.next_rows(phase.start) for phase in opened] == [[0], [0], [48]]
    first, *others = phases
    opened = helpers.open_phases(
        helpers.small_config(dataset_dir, phases=({**first, "global_batch_size": 32}, *others))
    )
    assert [phase.train_loader.next_rows(phase.start) for phase in opened] == [[0], [0], [96]]


def test_a_phase_added_where_a_run_stopped_begins_with_means_of_its_own(dataset_dir: Path, tmp_path: Path):
    settings = {"log_every_steps": 3, "checkpoint__every_steps": 4, "total_steps": 8, "eval_every_steps": 0}
    phases = ({"steps": 4}, {"steps": 4, "objective.nsp": False})
    pretrain(helpers.small_config(dataset_dir, phases=phases, **settings), str(tmp_path / "whole"))
    pretrain(helpers.small_config(dataset_dir, **settings), str(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "8")
    pretrain(helpers.small_config(dataset_dir, phases=phases, **settings), str(tmp_path / "run"))
    expected, resumed = (
        [row for row in rows_without_times(tmp_path / name) if "split" not in row] for name in ("whole", "run")
    )
    assert [row["step"] for row in expected] == [3, 4, 6, 8]
    assert resumed == [row for row in expected if row["step"] != 4]
    assert all("nsp_loss" not in row and "nsp_accuracy" not in row for row in resumed if row["step"] > 4)


def test_both_phases_are_trained_and_evaluated_on_their_own_data(
    phased_run: tuple[Path, dict], short_dir: Path, dataset_dir: Path
):
    workdir, final = phased_run
    rows = helpers.rows(workdir)
    assert [row["step"] for row in rows if "split" not in row] == list(range(1, 9))
    evaluations = {row["step"]: row for row in rows if row.get("split") == "eval"}
    short, long = (PreparedDataset(str(folder)).info.hash for folder in (short_dir, dataset_dir))
    measured = {step: (row["data"], row["sequences"]) for step, row in evaluations.items()}
    assert measured == {4: (short, 2 * 32), 8: (long, 2 * 16)}
    assert open_checkpoint(str(workdir)).dataset_hashes == (short, long)
    assert evaluations[4]["unigram_loss"] != evaluations[8]["unigram_loss"]
    assert final["mlm_loss"] == evaluations[8]["mlm_loss"]
    assert [path.name for path in sorted((workdir / "checkpoints").iterdir())] == ["4", "8"]


@pytest.mark.long
@pytest.mark.parametrize("restart", [False, True])
def test_run_killed_at_phase_boundary_resumes_to_the_same_result(
    restart: bool, short_dir: Path, dataset_dir: Path, tmp_path: Path
):
    """The newest checkpoint is that of the boundary when the kill comes, so that the second phase starts anew."""
    settings = {
        "phases": two_phases(short_dir, dataset_dir, 100), "total_steps": 200, "optimizer.warmup_steps": 20,
        "checkpoint.every_steps": 1000, "optimizer.restart_schedule": restart, "repeat_positions": restart,
    }  # fmt: skip
    assert train(dataset_dir, tmp_path / "straight", **settings).returncode == 0
    killed = train_until(110, dataset_dir, tmp_path / "killed", signal.SIGKILL, saved=100, **settings)
    assert killed.returncode == -signal.SIGKILL
    assert helpers.kept_steps(tmp_path / "killed")[-1] == 100
    resumed = train(dataset_dir, tmp_path / "killed", **settings)
    assert resumed.returncode == 0, resumed.stderr
    assert "from step 100" in resumed.stderr
    assert_same_run(tmp_path / "killed", tmp_path / "straight")


@pytest.mark.usefixtures("all_devices")
def test_new_positions_of_a_longer_phase_repeat_the_trained_ones(short_dir: Path, dataset_dir: Path, tmp_path: Path):
    """The second phase, at a rate of 0, has rows of 64 tokens after 32, of a model with 128 positions."""
    phases = ({"steps": 2, "data.path": str(short_dir)}, {"steps": 1, "optimizer.learning_rate": 0.0})
    config = helpers.small_config(
        dataset_dir, phases=phases, total_steps=3, optimizer__warmup_steps=1, optimizer__learning_rate=0.1,
        model__max_position_embeddings=128, repeat_positions=True, eval_batches=0,
        mesh__fsdp=2, mesh__tensor=2, mesh__zero1=True,
    )  # fmt: skip
    pretrain(config, str(tmp_path))
    before, after = (open_checkpoint(f"{tmp_path}/checkpoints/{step}").load_parameters() for step in (2, 3))
    old = np.asarray(before["embeddings"].pop("position"))
    np.testing.assert_array_equal(after["embeddings"].pop("position"), np.concatenate([old[:32]] * 4))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_a_run_that_resumes_repeats_positions_only_where_the_phase_begins(
    short_dir: Path, dataset_dir: Path, tmp_path: Path
):
    settings = {"checkpoint__every_steps": 1, "checkpoint__keep": 9, "optimizer__restart_schedule": True}
    settings |= {"eval_batches": 0, "optimizer__warmup_steps": 0}  # the first step of a phase changes the positions
    config = phased(short_dir, dataset_dir, repeat_positions=True, total_steps=6, **settings)
    pretrain(config, str(tmp_path / "straight"))
    for newest in (4, 5):
        folder = tmp_path / f"from {newest}"
        shutil.copytree(tmp_path / "straight", folder)
        for step in range(newest + 1, 7):
            shutil.rmtree(folder / "checkpoints" / str(step))
        pretrain(config, str(folder))
        assert_same_run(folder, tmp_path / "straight")
    alone = {"global_batch_size": 32, "data__max_predictions": 5, "total_steps": 4}
    pretrain(helpers.small_config(short_dir, **alone, **settings), str(tmp_path / "added"))
    pretrain(config, str(tmp_path / "added"))
    assert_same_run(tmp_path / "added", tmp_path / "straight")


@pytest.mark.parametrize(
    "overrides",
    [
        {"phases": ()},
        {"phases": ({"steps": 4}, {"steps": -1})},
        {"model__position_embedding_type": "rotary"},
        {"init": "/a/checkpoint"},
    ],
)
def test_repeated_positions_where_none_are_new_are_refused(
    overrides: dict, short_dir: Path, dataset_dir: Path, tmp_path: Path
):
    settings = {"phases": two_phases(short_dir, dataset_dir), **overrides}
    with pytest.raises(InputError, match="repeat_positions=True: requires"):
        pretrain(helpers.small_config(dataset_dir, repeat_positions=True, **settings), str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("steps", "overrides", "message"),
    [
        (3, {}, r"\b0-4\b.*\b0-3\b"),
        (5, {}, r"\b0-4\b.*\b0-5\b"),
        (4, {"objective__mask_rate": 0.2}, r"mask_rate 0\.15 -> 0\.2"),
    ],
)
def test_started_phase_cannot_change(
    steps: int, overrides: dict, message: str, short_dir: Path, dataset_dir: Path, phased_run: tuple[Path, dict]
):
    config = phased(
        short_dir, dataset_dir, steps, total_steps=10, optimizer__restart_schedule=True, eval_every_steps=0, **overrides
    )
    with pytest.raises(InputError, match=message):
        pretrain(config, str(phased_run[0]))


@pytest.mark.parametrize("first_changes", [False, True])
def test_started_phase_cannot_change_its_dataset(
    first_changes: bool, short_dir: Path, dataset_dir: Path, phased_run: tuple[Path, dict]
):
    only = dataset_dir if first_changes else short_dir
    config = phased(only, only, total_steps=10, optimizer__restart_schedule=True, eval_every_steps=0)
    with pytest.raises(InputError, match=r"\b0-4\b" if first_changes else r"\b4-10\b"):
        pretrain(config, str(phased_run[0]))


@pytest.mark.usefixtures("all_devices")
def test_init_takes_the_parameters_and_nothing_else(dataset_dir: Path, short_run: Path, tmp_path: Path):
    config = helpers.small_config(
        dataset_dir, init=short_run, optimizer__learning_rate=0.0, total_steps=3, mesh__data=2, mesh__tensor=4,
        eval_batches=0,
    )  # fmt: skip
    pretrain(config, str(tmp_path))
    first, second = (open_checkpoint(str(path)) for path in (short_run, tmp_path))
    assert second.step == 3
    jax.tree.map(np.testing.assert_array_equal, first.load_parameters(), second.load_parameters())
    assert [row["step"] for row in rows_without_times(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model__hidden_size": 64}, r"\b32\b.*model\.hidden_size=64"),
        ({"model__hidden_act": "gelu_new"}, "hidden_act.*'gelu'"),
        ({"model__layer_norm_eps": 1e-6}, "layer_norm_eps.*1e-12"),
        ({"init": "/nothing"}, "/nothing"),
    ],
)
def test_init_that_does_not_fit_is_refused(
    overrides: dict, message: str, dataset_dir: Path, short_run: Path, tmp_path: Path
):
    config = helpers.small_config(dataset_dir, **{"init": short_run, **overrides})
    with pytest.raises(InputError, match=message):
        pretrain(config, str(tmp_path / "run"))


def test_a_phase_changes_the_rotary_angles_and_the_checkpoint_has_those_of_the_last(dataset_dir: Path, tmp_path: Path):
    rotary = {
        "model__position_embedding_type": "rotary", "model__global_rope_theta": 1e4, "optimizer__warmup_steps": 0
    }  # fmt: skip
    extended = helpers.small_config(
        dataset_dir, total_steps=2, phases=({"steps": 1}, {"steps": 1, "model.global_rope_theta": 5.0}), **rotary
    )
    pretrain(extended, str(tmp_path / "run"))
    pretrain(helpers.small_config(dataset_dir, total_steps=2, **rotary), str(tmp_path / "same"))
    opened, same = (open_checkpoint(str(tmp_path / name)) for name in ("run", "same"))
    assert (opened.bert_config.global_rope_theta, same.bert_config.global_rope_theta) == (5.0, 1e4)
    losses = [[row["mlm_loss"] for row in helpers.train_rows(tmp_path / name)] for name in ("run", "same")]
    assert losses[0][0] == losses[1][0]
    assert losses[0][1] != losses[1][1]
    again = helpers.small_config(
        dataset_dir, total_steps=1, init=tmp_path / "same",
        **{**rotary, "model__global_rope_theta": 5.0},
    )  # fmt: skip
    pretrain(again, str(tmp_path / "again"))
    assert open_checkpoint(str(tmp_path / "again")).bert_config.global_rope_theta == 5.0


def test_the_released_recipe_of_modernbert_sees_its_tokens():
    plans = plan_phases(load_config("modernbert:base_released"))
    tokens = [(plan.stop - plan.start) * plan.config.global_batch_size * plan.config.data.seq_len for plan in plans]
    assert sum(tokens[:5]) == pytest.approx(50e9, rel=1e-3)
    assert sum(tokens[:6]) == pytest.approx(1.7e12, rel=1e-3)
    assert tokens[6:] == pytest.approx([250e9, 50e9], rel=1e-3)
    rates = [float(plan.schedule()(step)) for plan in plans for step in (plan.start, plan.stop - 1, plan.stop)]
    assert rates[0] == 0
    assert rates[1:18] == pytest.approx([8e-4] * 17)
    assert rates[18:22] == pytest.approx([3e-4] * 4)
    assert 0 == rates[23] < rates[22] < 1e-8
    theta, mask = zip(*((p.config.model.global_rope_theta, p.config.objective.mask_rate) for p in plans), strict=True)
    assert theta == (1e4,) * 6 + (16e4,) * 2
    assert set(mask) == {0.3}
    falling = plan_phases(load_config("modernbert:base_mmbert"))
    assert [plan.config.objective.mask_rate for plan in falling] == [0.3, 0.15, 0.05]


def mixed(dataset_dir, other_dir, **overrides):
    phases = (
        {"steps": 2, "data.packing": True},
        {"steps": -1, "data.path": f"{dataset_dir},{other_dir}", "data.weights": (0.1, 0.9)},
    )
    return helpers.small_config(dataset_dir, phases=phases, **overrides)


def test_a_plan_survives_json(dataset_dir, other_dir):
    """A checkpoint stores the config as JSON: tuples come back as lists."""
    config = mixed(dataset_dir, other_dir)
    again = from_mapping(PretrainConfig, json.loads(json.dumps(to_dict(config))))
    assert [tuple(plan.config.data.weights) for plan in plan_phases(again)] == [(), (0.1, 0.9)]


def test_mixture_hash_depends_on_weights_and_packing(dataset_dir, other_dir):
    both = f"{dataset_dir},{other_dir}"
    phases = (
        {"steps": 1, "data.path": both},
        {"steps": 1, "data.path": both, "data.weights": (0.5, 0.5)},
        {"steps": 1, "data.path": both, "data.packing": True, "data.max_sequences": 4},
        {"steps": 1, "data.path": both, "data.packing": True, "data.max_sequences": 6},
        {"steps": 1},
        {"steps": 1, "data.packing": True},
        {"steps": 1, "data.path": both, "data.weights": (0.5, 0.5)},
        {"steps": 1, "data.path": both},
    )
    opened = helpers.open_phases(
        helpers.small_config(dataset_dir, phases=phases, total_steps=8, optimizer__warmup_steps=1)
    )
    assert len({phase.dataset_hashes[-1] for phase in opened[:6]}) == 6
