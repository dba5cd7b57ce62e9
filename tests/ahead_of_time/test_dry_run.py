"""The plan of a run that is not started."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from etils import epath
from support import helpers
from support.devices import one_device  # noqa: F401

from bert_jax import cli
from bert_jax.ahead_of_time.dry_run import plan_run
from bert_jax.ahead_of_time.text import render
from bert_jax.errors import InputError
from bert_jax.model import BertConfig, initialize, parameter_count
from bert_jax.parallel.mesh import make_mesh
from bert_jax.sections import to_dict
from bert_jax.text.tokenizer import read_tokenizer
from bert_jax.tracking.throughput import PEAK_FLOPS, device_kind, training_flops
from bert_jax.training.checkpoints import save_parameters
from bert_jax.training.pretrain import plan_state, pretrain


def plan(dataset: Path, **settings):
    names = ("workdir", "device", "devices", "mfu")
    chosen = {"device": "v5e", **{name: settings.pop(name) for name in names if name in settings}}
    return plan_run(helpers.small_config(dataset, **settings), **chosen)


@pytest.fixture(scope="module")
def model(dataset_dir: Path) -> BertConfig:
    config = helpers.small_config(dataset_dir)
    return BertConfig.from_dict({**to_dict(config.model), "vocab_size": vocabulary_size(dataset_dir)})


def vocabulary_size(dataset: Path) -> int:
    return json.loads((dataset / "dataset.json").read_text())["tokenizer"]["vocab_size"]


def test_plan_counts_parameters_tokens_and_flops(dataset_dir: Path, model: BertConfig):
    found = plan(dataset_dir)
    (phase,) = found["phases"]
    assert found["parameters"] == parameter_count(model)
    assert found["total_tokens"] == 8 * 16 * 64
    assert phase["model_flops_per_step"] == 16 * training_flops(model, 64, 10)
    (dataset,) = phase["datasets"]
    assert dataset["epochs"] == pytest.approx(8 * 16 / dataset["rows_per_epoch"])


def test_hours_come_from_the_peak_and_the_mfu(dataset_dir: Path):
    planned, flops = plan(dataset_dir, device="h100", devices=2, mfu=0.5), plan(dataset_dir)["total_model_flops"]
    assert planned["remaining_hours"] == pytest.approx(flops / (2 * PEAK_FLOPS["NVIDIA H100"] * 0.5) / 3600)
    at_peak = plan(dataset_dir, device="tpuv3")
    assert (at_peak["mfu"], at_peak["remaining_hours"]) == (1, pytest.approx(flops / PEAK_FLOPS["TPU v3"] / 3600))


def test_memory_is_that_of_the_shards_of_the_state(dataset_dir: Path, model: BertConfig):
    config = helpers.small_config(dataset_dir)
    state = plan_state(make_mesh(config.mesh, jax.devices()[:1]), config, model)[1].abstract
    size = sum(leaf.size * 4 for leaf in jax.tree.leaves(state.parameters))
    whole = plan(dataset_dir)["memory"]
    assert whole["parameter_bytes"] == size
    assert whole["sum_with_gradients_bytes"] == 2 * size + whole["optimizer_bytes"]
    assert whole["optimizer_bytes"] == pytest.approx(2 * size, abs=64)
    sharded = plan(dataset_dir, devices=4, mesh__data=1, mesh__fsdp=4)["memory"]
    assert size / 4 <= sharded["parameter_bytes"] < size / 3
    zero = plan(dataset_dir, devices=4, mesh__zero1=True)["memory"]
    assert size / 4 <= zero["parameter_bytes"] < size / 3
    assert zero["optimizer_bytes"] < whole["optimizer_bytes"] / 2
    assert zero["sum_with_gradients_bytes"] == zero["parameter_bytes"] + size + zero["optimizer_bytes"]


def test_steps_are_planned_by_phase_and_checkpoints_are_counted(dataset_dir: Path):
    phases = ({"steps": 3}, {"steps": -1, "global_batch_size": 32})
    milestones = {"checkpoint__milestones": (0, 5), "checkpoint__milestone_every_steps": 4}
    found = plan(dataset_dir, phases=phases, checkpoint__keep=2, **milestones)
    assert (found["checkpoints"]["milestones"], found["checkpoints"]["kept"]) == (4, 4)  # 0, 4, 5 and 8
    assert [(phase["first_step"], phase["last_step"]) for phase in found["phases"]] == [(1, 3), (4, 8)]
    assert found["total_tokens"] == (3 * 16 + 5 * 32) * 64


def test_dry_run_needs_no_shards_and_writes_nothing(dataset_dir: Path, tmp_path: Path, monkeypatch):
    data = tmp_path / "data"
    shutil.copytree(dataset_dir, data)
    for shard in data.glob("*.array_record"):
        shard.write_bytes(bytes(shard.stat().st_size))  # of the right size, and without its records
    before = sorted(os.listdir(tmp_path))
    monkeypatch.chdir(tmp_path)
    text = render(plan(data, workdir="runs/none"))
    assert "TPU v5e" in text
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "v99"}, r"^device=v99.*v5e"),
        ({"devices": 0}, r"^devices=0"),
        ({"mfu": 1.5}, r"^mfu=1\.5"),
        ({"devices": 3}, r"global_batch_size=16"),
        ({"mesh__fsdp": 3, "devices": 4}, r"mesh\.fsdp=3"),
        ({"workdir": ""}, r"^workdir="),
        ({"attention": "pallas"}, r"attention=pallas"),
        ({"optimizer__warmup_steps": 8}, r"optimizer\.warmup_steps=8"),
        ({"data__path": "none"}, r"none"),
        ({"init": "none"}, r"none"),
        ({"device": None, "model__num_hidden_layers": 10**6}, r"GiB of memory, but .* has .*num_hidden_layers"),
    ],
)
def test_errors_are_those_of_the_run(settings: dict, message: str, dataset_dir: Path):
    with pytest.raises(InputError, match=message):
        plan(settings.pop("data__path", dataset_dir), **settings)


def test_heads_that_any_phase_needs_are_required_of_init(
    dataset_dir: Path, tmp_path: Path, model: BertConfig, vocabulary_file: Path
):
    config = replace(model, type_vocab_size=2)
    _, parameters = initialize(config, jax.random.key(0))
    save_parameters(
        epath.Path(tmp_path / "init"), {part: value for part, value in parameters.items() if part != "nsp_head"},
        bert_config=config, tokenizer=read_tokenizer(vocabulary_file), heads=("pooler", "mlm_head"),
    )  # fmt: skip
    settings = {"init": str(tmp_path / "init"), "objective__nsp": False}
    assert plan(dataset_dir, **settings)["phases"]
    with pytest.raises(InputError, match="nsp_head"):
        plan(dataset_dir, **settings, phases=({"steps": 4}, {"steps": -1, "objective.nsp": True}))
    settings |= {"objective__nsp": True, "phases": ({"steps": -1, "objective.nsp": False},)}
    assert plan(dataset_dir, **settings)["phases"]


@pytest.mark.usefixtures("one_device")
def test_plan_of_a_started_run_has_the_steps_that_are_left(dataset_dir: Path, tmp_path: Path):
    settings = {"total_steps": 6, "checkpoint__every_steps": 4, "eval_batches": 0, "workdir": str(tmp_path / "run")}
    run = {key: value for key, value in settings.items() if key != "workdir"}
    pretrain(helpers.small_config(dataset_dir, **run), settings["workdir"])
    found = plan(dataset_dir, **{**settings, "total_steps": 12})
    assert found["resumes_after_step"] == 6
    whole = plan(dataset_dir, **{**settings, "total_steps": 12, "workdir": str(tmp_path / "new")})
    assert found["remaining_hours"] == pytest.approx(whole["remaining_hours"] / 2)
    with pytest.raises(InputError, match="global_batch_size"):
        plan(dataset_dir, **{**settings, "global_batch_size": 8})


@pytest.mark.usefixtures("one_device")
def test_checkpoints_of_a_started_run_are_counted_and_what_it_infers_is_no_change(
    dataset_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    workdir = tmp_path / "run"
    run = {"eval_batches": 0, "checkpoint__keep": 2, "gradient_accumulation": -1, "max_rows_per_device": 8}
    before = {"total_steps": 6, "checkpoint__every_steps": 2, "checkpoint__milestone_every_steps": 3, **run}
    pretrain(helpers.small_config(dataset_dir, **before), str(workdir))
    assert helpers.kept_steps(workdir) == [0, 3, 4, 6]
    after = {**run, "total_steps": 9, "checkpoint__every_steps": 100, "checkpoint__milestones": (4,)}
    planned = plan(dataset_dir, **after, workdir=str(workdir))["checkpoints"]
    caplog.clear()
    pretrain(helpers.small_config(dataset_dir, **after), str(workdir))
    assert helpers.kept_steps(workdir) == [0, 3, 4, 6, 9]
    assert (planned["kept"], planned["milestones"]) == (5, 4)
    assert "Changed config keys" in caplog.text
    assert "gradient_accumulation" not in caplog.text


def test_command_prints_one_json_document(dataset_dir: Path, capsys: pytest.CaptureFixture):
    command = ["pretrain", "--config=bert_tiny", f"--config.data.path={dataset_dir}", "--dry_run", "--device=v5p"]
    assert cli.main([*command, "--json", "--config.total_steps=1e3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["total_steps"]) == ("TPU v5p", 1_000)
    assert cli.main([*command, "--devices=7"]) == 2
    for words, named in (([], "--workdir"), (["--workdir=runs/a", "--device=v5e"], "--device")):
        capsys.readouterr()
        assert cli.main([*command[:3], *words]) == 2  # without --dry_run
        assert named in capsys.readouterr().err


def test_every_device_has_a_short_name():
    assert (device_kind("h100"), device_kind("TPU v5 lite")) == ("NVIDIA H100", "TPU v5 lite")
    assert all(device_kind(kind) == kind for kind in PEAK_FLOPS)
