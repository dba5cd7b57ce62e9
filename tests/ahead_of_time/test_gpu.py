"""`bert-jax compile` for NVIDIA GPUs: names and refusals, and XLA's compiler itself on this machine without a GPU."""

import importlib.metadata
import json
import re
from types import SimpleNamespace

import pytest
from support import helpers

from bert_jax.ahead_of_time.compiled_step import RowSizes, Step, compile_config, describe
from bert_jax.ahead_of_time.gpu_target import GPUS
from bert_jax.ahead_of_time.target import Target, open_target
from bert_jax.config import load_config
from bert_jax.errors import InputError
from bert_jax.model import BertConfig
from bert_jax.tracking.flops import ACCELERATORS, find_accelerator
from bert_jax.training.phases import Plan

GIB = 1 << 30


@pytest.fixture
def needs_compiler():
    for cuda in (13, 12):
        try:
            importlib.metadata.version(f"jax-cuda{cuda}-plugin")
            return
        except importlib.metadata.PackageNotFoundError:
            continue
    pytest.skip("needs the gpu-aot extra")


@pytest.mark.parametrize(
    ("topology", "slices", "message"),
    [
        ("h100:0", 1, r"--topology=h100:0: .*\b1\b"),
        ("h100:1x2x4", 1, "--topology=h100:1x2x4: .*h100:8.*h100:4x8"),
        ("h100", 1, "--topology=h100: .*h100:8"),
        ("h100:8x", 1, "--topology=h100:8x: .*h100:8"),
        ("h100:8", 2, "--num_slices=2: .*h100:2x8"),
        ("v5e:8", 1, "--topology=v5e:8: .*v5e:2x4.*h100"),
    ],
)
def test_names_that_are_no_gpus_are_refused(topology: str, slices: int, message: str):
    with pytest.raises(InputError, match=message):
        open_target(topology, slices)


def test_missing_plugin_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"--topology=h100:8 requires .*; run: pip install .*(gpu-aot|cuda13-local)"):
        open_target("h100:8")


def test_cudnn_is_refused_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    target = Target("h100:1", 1, (SimpleNamespace(platform="gpu"),), 60 * GIB)
    mesh = SimpleNamespace(shape={"data": 1, "fsdp": 1, "tensor": 1}, devices=SimpleNamespace(flat=target.devices))
    monkeypatch.setattr("bert_jax.ahead_of_time.compiled_step.make_mesh", lambda config, devices: mesh)
    monkeypatch.setattr("bert_jax.ahead_of_time.compiled_step.open_target", lambda topology, slices: target)
    settings = [("attention", "cudnn"), ("model.attention_probs_dropout_prob", "0.0")]
    with pytest.raises(InputError, match=r"attention=cudnn: .*without --topology.*attention=xla"):
        compile_config(load_config("bert_tiny", settings), "h100:1")


@pytest.mark.parametrize("name", GPUS)
def test_rates_of_a_gpu_are_found_by_its_kind(name: str):
    found = find_accelerator(GPUS[name].kind)
    assert found == ACCELERATORS[f"NVIDIA {name.upper()}"]
    assert found.hbm == GPUS[name].bandwidth


def test_gpu_has_bounds_of_compute_and_memory_and_none_of_its_network():
    plan = Plan(0, 10, load_config("bert_tiny", [("gradient_accumulation", "1")]))
    memory = dict.fromkeys(("argument_bytes", "output_bytes", "temp_bytes"), 10**9)
    mesh = {"data": 1, "fsdp": 1, "tensor": 1}
    step = Step(plan, BertConfig(vocab_size=64), RowSizes(128, 20, 1, 64), mesh, 3 * 10**9, memory, None, 1.0)
    for kind, seconds in (("NVIDIA H200", 4e9 / 4.8e12), ("TPU v2", None)):
        target = Target("some:1", 1, (SimpleNamespace(platform="gpu", device_kind=kind),), GIB)
        bounds = describe(target, step)["roofline"]
        assert (bounds and bounds["memory_seconds"]) == (seconds and pytest.approx(seconds))
        assert not bounds or (bounds["network_seconds"] is None and bounds["compute_seconds"] > 0)


def run(*arguments: object, config: str = "bert_tiny", expect: int = 0, **overrides: object):
    chosen = {"data.max_predictions": 20, **{key.replace("__", "."): value for key, value in overrides.items()}}
    done = helpers.run_cli(
        "compile", f"--config={config}", *arguments, *helpers.flags(chosen), timeout=280, XLA_FLAGS=""
    )
    assert done.returncode == expect, done.stderr[-2000:]
    return done


def compiled(*arguments: object, **settings: object) -> dict:
    return json.loads(run("--json", *arguments, **settings).stdout)


@pytest.mark.usefixtures("needs_compiler")
def test_step_is_compiled_with_its_gradients_in_one_all_reduce():
    found = compiled("--topology=h100:2")
    assert (found["devices"], found["mesh"]["data"], found["dtype"]) == (2, 2, "bfloat16")
    assert {(one["kind"], *one["axes"], one["loops"]) for one in found["collectives"]} == {("all-reduce", "data", 0)}
    parameters = found["argument_bytes"] / 3
    assert sum(one["bytes"] for one in found["collectives"]) == pytest.approx(parameters, rel=0.01)
    assert found["fits"]
    assert found["peak_bytes"] >= found["argument_bytes"] + 0.9 * found["temp_bytes"]
    assert found["hbm_bytes"] == pytest.approx(0.75 * 79 * GIB, rel=0.01)
    assert found["roofline"]["network_seconds"] is None
    assert found["estimate"] is None
    assert "gpu" in found["no_estimate"]


@pytest.mark.long
@pytest.mark.usefixtures("needs_compiler")
def test_fsdp_gathers_parameters_over_the_hosts():
    found = compiled("--topology=h200:2x2", mesh__data=1, mesh__fsdp=-1)
    assert found["mesh"]["fsdp"] == 4
    kinds = {one["kind"] for one in found["collectives"] if one["axes"] == ["fsdp"]}
    assert {"all-gather", "reduce-scatter"} <= kinds


@pytest.mark.long
@pytest.mark.usefixtures("needs_compiler")
def test_step_that_does_not_fit_is_reported_in_one_line():
    done = run("--topology=h100:1", expect=2, global_batch_size=2**15, data__seq_len=512)
    assert re.search(r"fits +no", done.stdout)
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert len(lines) == 1
    assert "GiB too little" in lines[0]
