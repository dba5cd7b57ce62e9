"""The searches, with a compiler whose memory is known beforehand, and the refusals that need no compiler."""

import re
from types import SimpleNamespace

import pytest

from bert_jax.ahead_of_time import fit
from bert_jax.ahead_of_time.command import compile_config
from bert_jax.ahead_of_time.compiled_step import RowSizes, Step
from bert_jax.ahead_of_time.fit import find_batch, find_fix, plans
from bert_jax.ahead_of_time.target import open_target, out_of_memory
from bert_jax.config import load_config
from bert_jax.errors import InputError
from bert_jax.training.checks import MAX_GLOBAL_BATCH_SIZE, check_config

GIB = 1 << 30
TARGET = SimpleNamespace(devices=[None] * 8, hbm_bytes=16 * GIB, topology="made:2x4", slices=1)


def plan_of(**overrides):
    return plans(load_config("bert_large", [(k.replace("__", "."), str(v)) for k, v in overrides.items()]), None)[0]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch):
    """Fits what `memory(rows, config)` says is under 16 GiB, and remembers what was tried."""
    tried = []

    def use(memory, state_bytes=4 * GIB):
        def compile_step(target, plan, **_):
            config = plan.config
            check_config(config, config.total_steps)
            step = Step(
                plan,
                None,
                RowSizes(128, 20, 1, 30_522),
                {"data": 8, "fsdp": 1, "tensor": 1},
                0,
                state_bytes,
                {},
                "",
                "",
                1.0,
            )
            wanted = int(memory(step.rows_a_device, config))
            fits = wanted <= target.hbm_bytes
            tried.append((step.rows_a_device, fits))
            return Step(plan, None, step.rows, step.mesh, wanted, state_bytes, {} if fits else None, "", "", 1.0)

        monkeypatch.setattr(fit, "compile_step", compile_step)
        monkeypatch.setattr(fit, "make_mesh", lambda config, devices: SimpleNamespace(shape={"data": 8, "fsdp": 1}))
        return tried

    return use


@pytest.mark.parametrize(
    ("a_row", "most"), [(0.1, 120), (0.37, 32), (0.75, 16), (1.0, 12), (4.0, 3), (11.0, 1), (0.0101, 1184)]
)
@pytest.mark.parametrize("bent", [False, True])
def test_the_largest_batch_is_found_in_few_compilations(a_row, most, bent, compiler):
    """Also where a program that does not fit would want more than one that does, as XLA reports it."""

    def memory(rows, config):
        assert config.gradient_accumulation == 1
        wanted = (4 + a_row * rows) * GIB
        return wanted * 1.4 if bent and wanted > 16 * GIB else wanted

    tried = compiler(memory)
    step = find_batch(TARGET, plan_of())
    assert step.fits
    assert step.rows_a_device == most
    assert step.plan.config.global_batch_size == 8 * most
    assert len(tried) <= 12
    assert len(set(tried)) == len(tried)


@pytest.mark.parametrize("a_row", [1e-9, 9.2e-5])
def test_the_largest_batch_is_one_that_the_checks_allow(a_row, compiler):
    tried = compiler(lambda rows, config: (4 + a_row * rows) * GIB)
    step = find_batch(TARGET, plan_of())
    assert step.rows_a_device == (MAX_GLOBAL_BATCH_SIZE // 8 if a_row < 1e-8 else int(12 / a_row) // 8 * 8)
    assert len(tried) <= 12


def test_where_not_one_row_fits_it_says_what_to_do(compiler):
    compiler(lambda rows, config: (20 + rows) * GIB)
    with pytest.raises(InputError, match=r"21\.00.*16\.00 GiB.*remat=full"):
        find_batch(TARGET, plan_of())


@pytest.mark.parametrize(
    ("memory", "settings"),
    [
        (lambda rows, config: 10 if config.remat == "attention" else 20, {"remat": "attention"}),
        (lambda rows, config: 10 if config.remat == "full" else 20, {"remat": "full"}),
        (lambda rows, config: 4 + rows / 2, {"gradient_accumulation": 2}),
        (lambda rows, config: 4 + rows * 2, {"gradient_accumulation": 8}),
        (
            lambda rows, config: rows * (2 if config.remat == "full" else 9) + 13,
            {"gradient_accumulation": 32, "remat": "full"},
        ),
        (
            lambda rows, config: 10 if config.mesh.fsdp == -1 else 20,
            {"mesh.data": 1, "mesh.fsdp": -1, "remat": "full"},
        ),
    ],
)
def test_fix_is_the_cheapest_setting_that_fits(memory, settings, compiler):
    compiler(lambda rows, config: memory(rows, config) * GIB)
    step = fit.compile_step(TARGET, plan_of())
    assert not step.fits
    found, fixed = find_fix(TARGET, step)
    assert found == settings
    assert fixed.fits


def test_advice_is_for_the_phase_that_does_not_fit(compiler, monkeypatch: pytest.MonkeyPatch):
    compiler(lambda rows, config: 20 * GIB if config.data.seq_len == 512 and config.remat != "full" else GIB)
    for name, value in {
        "open_target": lambda topology, slices: TARGET, "compile_step": fit.compile_step,
        "describe": lambda target, step: {"peak_bytes": step.wanted_bytes},
    }.items():  # fmt: skip
        monkeypatch.setattr(f"bert_jax.ahead_of_time.command.{name}", value)
    described, (problem,) = compile_config(load_config("bert_large:lamb_v5e"), "made:2x4")
    assert re.match(r"steps 7039-8601: .*20\.00 GiB.* 16\.00 GiB.* 4\.00 GiB.* 1\.00 GiB", problem)
    assert problem.endswith("--config.phases.1.remat=full")
    assert [about["peak_bytes"] for about in described["phases"]] == [GIB, 20 * GIB]
    assert described["would_fit"] == {"with": {"remat": "full"}, "peak_bytes": GIB}


def test_a_state_that_is_too_large_is_cut_before_anything_is_made_twice(compiler):
    compiler(lambda rows, config: 10 * GIB if config.mesh.zero1 else 20 * GIB, state_bytes=12 * GIB)
    assert find_fix(TARGET, fit.compile_step(TARGET, plan_of()))[0] == {"mesh.zero1": True}


def test_no_setting_fits(compiler):
    compiler(lambda rows, config: 20 * GIB)
    assert find_fix(TARGET, fit.compile_step(TARGET, plan_of())) is None


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
        ("v5e:4x4x4", 1, "--topology=v5e:4x4x4.*v5e:4x4"),
        ("v5e", 1, "--topology=v5e.*v5e:4x4"),
        ("v5e:4x", 1, "--topology=v5e:4x.*v5e:4x4"),
        ("v5e:4x4", 0, r"--num_slices=0.*\b1\b"),
    ],
)
def test_names_that_are_no_topologies_are_refused(topology, slices, message):
    with pytest.raises(InputError, match=message):
        open_target(topology, slices)


def test_phases_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match=r"--phase=2.*0 to 1"):
        plans(load_config("bert_large:lamb"), 2)
    assert [plan.config.global_batch_size for plan in plans(load_config("bert_large:lamb"), None)] == [65_536, 32_768]
    assert [plan.config.global_batch_size for plan in plans(load_config("bert_large:lamb"), 1)] == [32_768]


def test_without_libtpu_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    import importlib.metadata

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(InputError, match=r"pip install 'jax\[tpu\]'"):
        compile_config(load_config("bert_large"), "v5e:4x4")
