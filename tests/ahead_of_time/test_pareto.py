"""The comparison of settings, with a compiler whose memory is known beforehand."""

import json
from types import SimpleNamespace

import pytest

from bert_jax import cli
from bert_jax.ahead_of_time import pareto
from bert_jax.ahead_of_time.fit import plans
from bert_jax.ahead_of_time.table import render_choices
from bert_jax.config import load_config
from bert_jax.errors import InputError
from bert_jax.model.attention_kernels.kernel_choice import ATTENTIONS
from bert_jax.model.encoder import REMAT_POLICIES
from bert_jax.tracking.accelerators import find_accelerator

GIB = 1 << 30
TARGET = SimpleNamespace(
    devices=[None] * 8, hbm_bytes=16 * GIB, topology="made:2x4", slices=1, accelerator=find_accelerator("TPU v5e")
)
ROWS = 64
A_ROW = {"none": 0.3, "attention": 0.2, "dots": 0.15, "full": 0.05}  # GiB
FSDP_SECONDS = 0.002  # of each microbatch
FLOPS = {"none": 3e15, "attention": 3.1e15, "dots": 3.2e15, "full": 4e15}
UNSUPPORTED = tuple(name for name in ATTENTIONS if name != "xla")


def network(config) -> float:
    """Returns the seconds of the collectives: those of FSDP are those of each microbatch."""
    return 0.01 if config.mesh.fsdp == 1 else FSDP_SECONDS * config.gradient_accumulation


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch):
    """Needs 4 GiB and `A_ROW` for each row; returns the list of what was compiled."""
    tried = []

    def compile_step(target, plan):
        config = plan.config
        if config.attention in UNSUPPORTED:
            raise InputError(f"attention={config.attention}: not here")
        count = ROWS // config.gradient_accumulation
        wanted = int((4 + A_ROW[config.remat] * count) * GIB)
        fits = wanted <= target.hbm_bytes
        tried.append((config.remat, count, fits))
        return SimpleNamespace(
            plan=plan, rows_a_device=count, wanted_bytes=wanted, fits=fits, compile_seconds=1.0
        )  # fmt: skip

    def describe(target, step):
        config = step.plan.config
        return {
            "peak_bytes": step.wanted_bytes, "temp_bytes": step.wanted_bytes - 4 * GIB + GIB,
            "argument_bytes": 2 * GIB, "output_bytes": 2 * GIB, "gradient_accumulation": config.gradient_accumulation,
            "model_flops": 3e15, "recomputed_flops": FLOPS[config.remat] - 3e15,
            "roofline": {"compute_seconds": FLOPS[config.remat] / 8 / 197e12, "network_seconds": network(config)},
        }  # fmt: skip

    monkeypatch.setattr(pareto, "compile_step", compile_step)
    monkeypatch.setattr(pareto, "describe", describe)
    monkeypatch.setattr(pareto, "make_mesh", lambda config, devices: SimpleNamespace(shape={"data": 8, "fsdp": 1}))
    return tried


def plan_of(rows: int = ROWS, **settings):
    overrides = [("global_batch_size", str(8 * rows)), *((key, str(value)) for key, value in settings.items())]
    return plans(load_config("bert_large", overrides), None)[0]


def test_every_remat_is_compiled_a_few_times_and_the_rest_is_interpolated(compiler):
    found = pareto.find_choices(TARGET, plan_of())
    assert {choice.settings["remat"] for choice in found} == set(REMAT_POLICIES)
    assert {choice.settings["attention"] for choice in found} == {"xla"}
    assert len(compiler) == len(set(compiler)) <= 3 * len(REMAT_POLICIES)
    for choice in found:
        remat, count = choice.settings["remat"], choice.rows_a_device
        assert choice.settings["gradient_accumulation"] == ROWS // count
        assert choice.peak_bytes == pytest.approx((4 + A_ROW[remat] * count) * GIB, rel=1e-6)
        assert choice.peak_bytes <= TARGET.hbm_bytes
        assert choice.is_compiled == ((remat, count, True) in compiler)
        moved = 4 * GIB + 2 * choice.settings["gradient_accumulation"] * (choice.peak_bytes - 3 * GIB)
        parts = FLOPS[remat] / 8 / 197e12, moved / 8.19e11, 0.01
        assert choice.at_least_seconds == pytest.approx(max(parts))
        assert choice.one_after_another_seconds == pytest.approx(sum(parts))
    largest = {
        remat: max(one.rows_a_device for one in found if one.settings["remat"] == remat) for remat in REMAT_POLICIES
    }
    assert largest == {"none": 32, "attention": 32, "dots": 64, "full": 64}
    assert not all(choice.is_compiled for choice in found)


def test_network_of_fsdp_is_interpolated_by_the_microbatches(compiler):
    found = pareto.find_choices(TARGET, plan_of(**{"mesh.data": 1, "mesh.fsdp": -1}))
    assert not all(choice.is_compiled for choice in found)
    for choice in found:
        count = choice.settings["gradient_accumulation"]
        moved = 4 * GIB + 2 * count * (choice.peak_bytes - 3 * GIB)
        parts = FLOPS[choice.settings["remat"]] / 8 / 197e12, moved / 8.19e11, FSDP_SECONDS * count
        assert choice.one_after_another_seconds == pytest.approx(sum(parts))


def test_front_has_what_nothing_beats_and_the_best_is_the_fastest(compiler):
    found = pareto.find_choices(TARGET, plan_of())
    front = [choice for choice in found if choice.is_on_front]
    assert 0 < len(front) < len(found)
    for choice in found:
        beaten = any(
            one.costs != choice.costs and all(a <= b for a, b in zip(one.costs, choice.costs, strict=True))
            for one in found
        )
        assert choice.is_on_front == (not beaten)
    best = pareto.best_choice(found)
    assert best in front
    assert best.at_least_seconds == min(choice.at_least_seconds for choice in found)
    assert (best.settings["remat"], best.rows_a_device) == ("none", 32)
    assert pareto.best_choice([]) is None


def test_batch_that_is_smaller_than_the_memory_is_taken_whole(compiler):
    found = pareto.find_choices(TARGET, plan_of(8))
    assert max(choice.rows_a_device for choice in found) == 8


def test_where_nothing_fits_there_is_no_choice(compiler, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TARGET, "hbm_bytes", GIB)
    assert pareto.find_choices(TARGET, plan_of()) == []
    assert {count for _, count, _ in compiler} == {8, 1}


def test_an_error_of_the_config_itself_is_raised(compiler, monkeypatch: pytest.MonkeyPatch):
    def compile_step(target, plan):
        raise InputError("model.hidden_size=7: is not divisible")

    monkeypatch.setattr(pareto, "compile_step", compile_step)
    with pytest.raises(InputError, match=r"model\.hidden_size=7"):
        pareto.find_choices(TARGET, plan_of())


def test_command_prints_the_choices_and_the_options_of_the_best(
    compiler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr("bert_jax.ahead_of_time.command.open_target", lambda topology, slices: TARGET)
    command = ["compile", "--config=bert_large:lamb_v5e", "--topology=v5e:2x4", "--pareto", "--phase=1"]
    batch = f"--config.phases.1.global_batch_size={8 * ROWS}"
    assert cli.main([*command, batch, "--json"]) == 0
    (phase,) = json.loads(capsys.readouterr().out)["phases"]
    assert phase["best"]["with"] == {"remat": "none", "attention": "xla", "gradient_accumulation": 2}
    assert "--config.phases.1.gradient_accumulation=2" in phase["best"]["options"]
    assert cli.main([*command, batch]) == 0
    text = capsys.readouterr().out
    assert text.strip() == render_choices(phase).strip()
    assert all(option in text for option in phase["best"]["options"])
    assert sum("*>" in line for line in text.splitlines()) == 1
    monkeypatch.setattr(TARGET, "hbm_bytes", GIB)
    assert cli.main([*command, batch]) == 2
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--find_batch"])
    assert stopped.value.code == 2
