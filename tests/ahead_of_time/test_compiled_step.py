"""`bert-jax compile` without the TPU compiler: descriptions of steps, programs of a CPU, and what is refused."""

import json
import re
from types import SimpleNamespace

import pytest

from bert_jax import cli
from bert_jax.ahead_of_time import compiled_step
from bert_jax.ahead_of_time.chips import clock_rate, roofline
from bert_jax.ahead_of_time.compiled_step import RowSizes, Step, compile_config, describe, plans
from bert_jax.ahead_of_time.hlo import Collective
from bert_jax.ahead_of_time.target import Target, open_target, out_of_memory
from bert_jax.ahead_of_time.text import render
from bert_jax.config import load_config
from bert_jax.errors import InputError
from bert_jax.model import BertConfig
from bert_jax.tracking.flops import find_accelerator, recomputed_flops, training_flops

GIB = 1 << 30
LARGE = BertConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096)
PROGRAM = """HloModule m

ENTRY %main (p: f32[8]) -> f32[8] {
  %a = f32[8]{0} fusion(%p), metadata={op_name="jit(step)/jvp(encoder)/dot_general"}, backend_config={"estimated_cycles":"150000000"}
  %b = f32[1048576]{0} all-reduce(%a), channel_id=1, replica_groups={{0,1}}
  ROOT %c = f32[8]{0} copy(%b), metadata={op_name="jit(step)/optimizer/mul"}, backend_config={"estimated_cycles":"50000000"}
}
"""  # noqa: E501


def described(kind: str = "TPU v5 lite", text: str | None = PROGRAM, fits: bool = True, **options: bool) -> dict:
    """Describes a step of BERT-LARGE, 64 rows on two devices, with the text of a program."""
    config = load_config("bert_large", [("global_batch_size", "64"), ("gradient_accumulation", "1")])
    memory = {"argument_bytes": 4 * GIB, "output_bytes": 4 * GIB, "temp_bytes": 6 * GIB} if fits else None
    step = Step(
        plans(config)[0], LARGE, RowSizes(128, 20, 1, 30_522), {"data": 2, "fsdp": 1, "tensor": 1},
        (9 if fits else 20) * GIB, memory, text, 31.2,
    )  # fmt: skip
    platform = "tpu" if kind.startswith("TPU") else "gpu"
    device = SimpleNamespace(platform=platform, device_kind=kind)
    target = Target("v5e:1x2", 1, (device, device), 16 * GIB)
    return describe(target, step, **options)


def test_estimated_time_is_the_sum_of_cycles_over_the_clock_and_gives_the_mfu():
    found = described()
    estimate = found["estimate"]
    assert estimate["seconds"] == pytest.approx(200e6 * 4 * 128 * 128 * 2 / 197e12)
    assert estimate["mfu"] == pytest.approx(32 * training_flops(LARGE, 128, 20) / 197e12 / estimate["seconds"])
    assert "collectives" in estimate["left_out"]
    assert "parts" not in estimate
    assert found["no_estimate"] is None


def test_profile_has_the_largest_parts_with_share_and_executions_in_text_and_json():
    found = described(profile=True)
    first, second = found["estimate"]["parts"]
    assert (first["module"], first["operation"], first["direction"]) == ("encoder", "dot_general", "forward")
    assert (first["share"], second["share"], first["count"]) == (0.75, 0.25, 1)
    text = render(found)
    assert re.search(r"encoder +dot_general +forward +150,000,000 +1 +99\.80 ms +75\.0%", text), text
    assert json.loads(json.dumps(found))["estimate"]["parts"][1]["module"] == "optimizer"


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("NVIDIA H100", PROGRAM.replace("estimated_cycles", "other"), "gpu.*only for TPUs"),
        ("TPU7x", PROGRAM, "clock of TPU7x"),
        ("TPU v6 lite", None, "cannot be read"),
    ],
)
def test_reason_stands_where_there_is_no_estimate(kind: str, text: str | None, reason: str):
    found = described(kind, text)
    assert found["estimate"] is None
    assert re.search(reason, found["no_estimate"])
    assert "no_estimate" in render(found)
    assert (found["collectives"] is None) == (text is None)


def test_step_in_text_has_units():
    text = render(described())
    for line in (
        r"steps +1 - 1,000,000", r"mesh +data=2 fsdp=1 tensor=1", r"peak_bytes +9\.00 GiB", r"hbm_share +56\.2%",
        r"compile_seconds +31\.2 s", r"  all-reduce +data +f32 +0 +2 +no +1 +1 +4\.00 MiB +0", r"fits +yes",
    ):  # fmt: skip
        assert re.search(f"^{line}", text, re.MULTILINE), text


def test_empty_lists_and_unknown_values_in_text():
    assert render({"a": [], "b": None, "c_hours": 0.5, "d": {"e_share": 0.25}, "f": "x"}).split("\n") == [
        "a        none", "c_hours  30.00 minutes", "f        x", "", "d", "  e_share  25.0%",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "gigahertz"),
    [("TPU v4", 1.05), ("TPU v5 lite", 1.503), ("TPU v5e", 1.503), ("TPU v5p", 1.75), ("TPU v6e", 1.75)],
)
def test_clocks_follow_from_the_peak_and_the_matrix_units(kind: str, gigahertz: float):
    assert clock_rate(kind) == pytest.approx(gigahertz * 1e9, rel=2e-3)


def test_clock_of_other_devices_is_not_known():
    assert clock_rate("cpu") is clock_rate("NVIDIA H100") is clock_rate("TPU7x") is None


def collective(**settings: object) -> Collective:
    sizes = {"kind": "all-reduce", "axes": ("data",), "dtype": "f32", "loops": 0, "devices": 8, "between_slices": False}
    counts = {"instructions": 1, "count": 1, "bytes": 8 * 10**9, "asynchronous": 0}
    return Collective(**{**sizes, **counts, **settings})


def test_the_bound_is_the_largest_part_and_what_goes_between_slices_is_left_out():
    sums, between = collective(), collective(devices=2, between_slices=True)
    chip = find_accelerator("TPU v5 lite")
    bounds = roofline(chip, flops=197e11, memory_bytes=8.19e9, collectives=[sums, between])
    assert bounds["compute_seconds"] == pytest.approx(0.1)
    assert bounds["memory_seconds"] == pytest.approx(0.01)
    # A ring sends 2 * 7/8 of 8 GB over 2 axes of a torus, both ways, at 45 GB/s.
    assert bounds["network_seconds"] == pytest.approx(14 / 180)
    assert (bounds["at_least_seconds"], bounds["bound"]) == (bounds["compute_seconds"], "compute")
    unknown = roofline(chip, flops=0, memory_bytes=8.19e9, collectives=None)
    assert (unknown["network_seconds"], unknown["bound"]) == (None, "memory")


def test_gpu_has_a_bound_of_its_memory_and_none_of_its_network():
    bounds = roofline(find_accelerator("NVIDIA B200"), flops=0, memory_bytes=8e9, collectives=[collective()])
    assert (bounds["memory_seconds"], bounds["network_seconds"]) == (pytest.approx(1e-3), None)
    assert roofline(find_accelerator("TPU v3"), flops=0, memory_bytes=8e9)["at_least_seconds"] == 0


def test_what_remat_makes_again_is_counted():
    forward = training_flops(LARGE, 512, 76) / 3
    again = {remat: recomputed_flops(LARGE, 512, remat) for remat in ("none", "attention", "dots", "full")}
    assert again["none"] == 0
    assert again["attention"] == 24 * 2 * 512 * 512 * 1024
    assert again["dots"] == 2 * again["attention"]
    assert 0.9 * forward < again["full"] < forward  # all but the heads


def test_a_kernel_recomputes_products_with_and_without_remat_of_attention():
    again = {remat: recomputed_flops(LARGE, 512, remat, "pallas") for remat in ("none", "attention")}
    assert again["none"] == again["attention"] == 24 * 2 * 512 * 512 * 1024


def test_step_that_does_not_fit_names_its_phase_the_excess_and_smaller_settings(monkeypatch: pytest.MonkeyPatch):
    target = Target("v5e:1x2", 1, (SimpleNamespace(platform="tpu", device_kind="TPU v5e"),), 16 * GIB)

    def compile_(target: Target, plan: object) -> SimpleNamespace:
        fits = plan.config.data.seq_len == 128
        return SimpleNamespace(plan=plan, memory={} if fits else None, peak_bytes=(1 if fits else 20) * GIB)

    monkeypatch.setattr(compiled_step, "open_target", lambda topology, slices: target)
    monkeypatch.setattr(compiled_step, "compile_step", compile_)
    monkeypatch.setattr(compiled_step, "describe", lambda target, step, profile: {"peak_bytes": step.peak_bytes})
    found, (problem,) = compile_config(load_config("bert_large:lamb", [("gradient_accumulation", "8")]), "v5e:1x2")
    assert [phase["peak_bytes"] for phase in found["phases"]] == [GIB, 20 * GIB]
    assert found["peak_bytes"] == 20 * GIB
    assert re.match(r"steps 7039-8601: .*20\.00 GiB.* 16\.00 GiB.* 4\.00 GiB.*remat=full", problem)
    assert "gradient_accumulation=16" in problem


def test_step_that_does_not_fit_is_described():
    found = described(fits=False, text=None)
    assert (found["fits"], found["roofline"], found["estimate"]) == (False, None, None)
    assert found["no_estimate"] is None
    assert re.search(r"^fits +no", render(found), re.MULTILINE)


def test_devices_of_this_machine_have_memory_and_no_estimate(capsys: pytest.CaptureFixture):
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 200}
    settings = [f"--config.model.{key}={value}" for key, value in sizes.items()]
    command = ["compile", "--config=bert_tiny", "--config.global_batch_size=8", *settings, "--profile"]
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["hbm_bytes"], found["hbm_share"], found["fits"]) == (None, None, True)
    assert found["peak_bytes"] >= found["argument_bytes"] > 0
    assert found["estimate"] is None
    assert re.search("cpu.*only for TPUs", found["no_estimate"])
    assert found["collectives"] is not None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.5G of 15.75G hbm. Exceeded",
            (20.5, 15.75),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (770.00G) "
            "exceeds available HBM (95.74G).",
            (770, 95.74),
        ),
        ("INTERNAL: Used 20.5G of 15.75G hbm", None),
        ("RESOURCE_EXHAUSTED: scoped vmem", None),
    ],
)
def test_what_the_compiler_says_of_too_little_memory(text, expected):
    assert out_of_memory(RuntimeError(text)) == (expected and tuple(int(size * GIB) for size in expected))


@pytest.mark.parametrize(
    ("topology", "slices", "message"),
    [
        ("v5e:4x4x4", 1, "--topology=v5e:4x4x4.*v5e:2x4"),
        ("v5e", 1, "--topology=v5e.*v5e:4x4"),
        ("v5e:4x", 1, "--topology=v5e:4x.*v5e:4x4"),
        ("v5e:4x4", 0, r"--num_slices=0.*\b1\b"),
    ],
)
def test_names_that_are_no_topologies_are_refused(topology, slices, message):
    with pytest.raises(InputError, match=message):
        open_target(topology, slices)


def test_phases_that_are_not_there_are_refused():
    with pytest.raises(InputError, match=r"--phase=2.*0 to 1"):
        plans(load_config("bert_large:lamb"), 2)
    assert [plan.config.global_batch_size for plan in plans(load_config("bert_large:lamb"), None)] == [65_536, 32_768]
    assert [plan.config.global_batch_size for plan in plans(load_config("bert_large:lamb"), 1)] == [32_768]


def test_without_libtpu_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    config = load_config("bert_large")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'jax\[tpu\]'"):
        compile_config(config, "v5e:4x4")
