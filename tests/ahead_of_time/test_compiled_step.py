"""`bert-jax compile` without the TPU compiler: estimates, text, programs of a CPU, and what is refused."""

import json
import re
from types import SimpleNamespace

import jax
import pytest

from bert_jax import cli
from bert_jax.ahead_of_time import compiled_step
from bert_jax.ahead_of_time.compiled_step import (
    Target,
    compile_phases,
    compile_step,
    estimate_time,
    open_target,
    out_of_memory,
)
from bert_jax.ahead_of_time.text import render
from bert_jax.config import load_config
from bert_jax.errors import BertJaxError, InputError
from bert_jax.training.phases import plan_phases

GIB = 1 << 30
PROGRAM = """HloModule m

ENTRY %main (p: f32[8]) -> f32[8] {
  %a = f32[8]{0} fusion(%p), metadata={op_name="jit(step)/jvp(encoder)/dot_general"}, backend_config={"estimated_cycles":"150000000"}
  %b = f32[1048576]{0} all-reduce(%a), channel_id=1, replica_groups={{0,1}}
  ROOT %c = f32[8]{0} copy(%b), metadata={op_name="jit(step)/optimizer/mul"}, backend_config={"estimated_cycles":"50000000"}
}
"""  # noqa: E501


def test_estimated_time_is_the_sum_of_cycles_over_the_clock_and_gives_the_mfu():
    estimate = estimate_time(PROGRAM, "TPU v5 lite", 1e12)
    assert estimate["seconds"] == pytest.approx(200e6 * 4 * 128 * 128 * 2 / 197e12)
    assert estimate["mfu"] == pytest.approx(1e12 / 197e12 / estimate["seconds"])
    assert "collectives" in estimate["left_out"]
    assert "parts" not in estimate


def test_profile_has_the_largest_parts_with_share_and_executions_in_text_and_json():
    estimate = estimate_time(PROGRAM, "TPU v5 lite", 1e12, profile=True)
    first, second = estimate["parts"]
    assert (first["module"], first["operation"], first["direction"]) == ("encoder", "dot_general", "forward")
    assert (first["share"], second["share"], first["count"]) == (0.75, 0.25, 1)
    text = render({"estimate": estimate})
    assert re.search(r"encoder +dot_general +forward +150,000,000 +1 +0\.0998 s +75 %", text), text
    assert json.loads(json.dumps(estimate))["parts"][1]["module"] == "optimizer"


@pytest.mark.parametrize(
    ("kind", "program"),
    [("NVIDIA H100", PROGRAM.replace("estimated_cycles", "other")), ("TPU v3", PROGRAM), ("TPU v6 lite", "")],
)
def test_there_is_no_estimate_without_cycles_clock_or_program(kind: str, program: str):
    assert estimate_time(program, kind, 1e12) is None


def test_clocks_follow_from_the_peak_and_the_matrix_units():
    clocks = {"TPU v4": 1.05, "TPU v5 lite": 1.503, "TPU v5p": 1.75, "TPU v6e": 1.75, "TPU7x": 2.2}
    for kind, gigahertz in clocks.items():
        assert estimate_time(PROGRAM, kind, 1e12)["clock_hz"] == pytest.approx(gigahertz * 1e9, rel=2e-3)


def test_text_has_units_tables_and_blocks():
    record = {
        "steps": 1_000_000, "peak_bytes": 9 * GIB, "hbm_share": 0.562, "compile_seconds": 31.2, "fits": True,
        "a_seconds": 3e-6, "d_hours": 1e-3, "f": 0.000123, "none": [], "mesh": {"data": 2}, "few": ["data", "fsdp"],
        "hbm_bytes": None, "collectives": [{"kind": "all-reduce", "devices": 4, "bytes": 4 << 20}],
    }  # fmt: skip
    text = render(record)
    for line in (
        "steps            1,000,000", "peak_bytes +9 GiB", r"hbm_share +56\.2 %", r"compile_seconds +31\.2 s",
        r"fits +yes", "a_seconds +3e-06 s", r"d_hours +0\.001 hours", r"f +0\.000123", r"none +none",
        "few +data fsdp", "  data  2", r"  all-reduce  4 +0\.003906 GiB",
    ):  # fmt: skip
        assert re.search(f"^{line}$", text, re.MULTILINE), text
    assert "hbm_bytes" not in text


def refuse(monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    """The compiler refuses steps with this error."""

    def lower(*_: object) -> None:
        raise jax.errors.JaxRuntimeError(error)

    step = SimpleNamespace(abstract=None), SimpleNamespace(lower=lower)
    monkeypatch.setattr(compiled_step, "plan_step", lambda *_: step)


def test_step_that_does_not_fit_names_its_phase_the_excess_and_smaller_settings(monkeypatch: pytest.MonkeyPatch):
    target = Target("v5e:1x2", 1, tuple(jax.devices()[:1]), 16 * GIB)
    plan = plan_phases(load_config("bert_large:lamb", [("gradient_accumulation", "8")]))[1]
    refuse(monkeypatch, "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.00G of 16.00G hbm.")
    found = compile_step(target, plan)
    assert (found["fits"], found["peak_bytes"], found["collectives"], found["estimate"]) == (
        False, 20 * GIB, None, None
    )  # fmt: skip
    assert re.match(r"steps 7039-8601: .* 4\.00 GiB more .* 16\.00 GiB.*remat=full", found["problem"])
    assert "gradient_accumulation=16" in found["problem"]
    assert re.search(r"^fits +no", render(found), re.MULTILINE)
    refuse(monkeypatch, "INTERNAL: it crashed\nstack")
    with pytest.raises(BertJaxError, match="INTERNAL: it crashed"):
        compile_step(target, plan)


SIZES = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 200}
COMMAND = [
    "compile", "--config=bert_tiny", "--config.global_batch_size=8",
    *(f"--config.model.{key}={value}" for key, value in SIZES.items()),
]  # fmt: skip


def test_devices_of_this_machine_have_no_estimate_and_a_peak_with_temporaries(capsys: pytest.CaptureFixture):
    assert cli.main([*COMMAND, "--profile", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["phases"]
    assert (found["hbm_bytes"], found["hbm_share"], found["fits"]) == (None, None, True)
    assert found["peak_bytes"] >= found["argument_bytes"] + found["temp_bytes"] > found["temp_bytes"] > 0
    assert (found["estimate"], found["problem"]) == (None, None)
    assert found["collectives"] is not None


def test_phase_that_does_not_fit_is_printed_and_ends_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    phases = [{"fits": True, "problem": None}, {"fits": False, "problem": "steps 5-8: too large"}]
    monkeypatch.setattr(compiled_step, "compile_phases", lambda *_, **__: iter(phases))
    assert cli.main(COMMAND) == 2
    captured = capsys.readouterr()
    assert re.search(r"fits +yes\n\nfits +no\n", captured.out)
    assert "steps 5-8: too large" in captured.err


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
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 16.08M of 16.00M vmem.", None),
    ],
)
def test_what_the_compiler_says_of_too_little_memory(text, expected):
    assert out_of_memory(RuntimeError(text)) == (expected and tuple(int(size * GIB) for size in expected))


@pytest.mark.parametrize(
    ("topology", "slices", "message"),
    [
        ("v5e:4x4x4", 1, "topology=v5e:4x4x4.*v5e:16x16"),
        ("v5e:16x32", 1, "topology=v5e:16x32.*v5e:16x16"),
        ("v5p:32x4x4", 1, "topology=v5p:32x4x4.*v5p:16x20x28"),
        ("v4:2x2", 1, "topology=v4:2x2"),
        ("v5e", 1, "topology=v5e.*v5e:4x4"),
        ("v5e:0x4", 1, "topology=v5e:0x4.*v5e:4x4"),
        ("h100:8", 1, "topology=h100:8.*v5e:4x4"),
        ("v5e:4x4", 0, r"num_slices=0.*\b1\b"),
        (None, 2, r"num_slices=2.*--topology"),
    ],
)
def test_slices_that_do_not_exist_are_refused(topology, slices, message):
    with pytest.raises(InputError, match=message):
        open_target(topology, slices)


def test_phases_that_are_not_there_are_refused():
    with pytest.raises(InputError, match=r"phase=2.*0 to 1"):
        next(compile_phases(load_config("bert_large:lamb"), None, phase=2))


def test_without_libtpu_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    config = load_config("bert_large")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'bert-jax\[tpu-aot\]'"):
        list(compile_phases(config, "v5e:4x4"))
