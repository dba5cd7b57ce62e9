"""Bounds on a step's time, and what is printed of it."""

import re

import pytest

from bert_jax.ahead_of_time.chips import roofline
from bert_jax.ahead_of_time.hlo import Collective
from bert_jax.ahead_of_time.table import render
from bert_jax.model import BertConfig
from bert_jax.tracking.accelerators import find_accelerator
from bert_jax.tracking.flops import recomputed_flops, training_flops

LARGE = BertConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096)


def test_the_bound_is_the_largest_part_and_what_goes_between_slices_is_left_out():
    sums = Collective("all-reduce", ("data",), "f32", 0, 1, 1, 8 * 10**9, 8)
    between = Collective("all-reduce", ("data",), "f32", 0, 1, 1, 8 * 10**9, 2, between_slices=True)
    chip = find_accelerator("TPU v5 lite")
    bounds = roofline(chip, flops=197e11, memory_bytes=8.19e9, collectives=[sums, between])
    assert bounds.compute_seconds == pytest.approx(0.1)
    assert bounds.memory_seconds == pytest.approx(0.01)
    # A ring sends 2 * 7/8 of 8 GB over 2 axes of a torus, both ways, at 45 GB/s.
    assert bounds.network_seconds == pytest.approx(14 / 180)
    assert (bounds.at_least, bounds.bound) == (bounds.compute_seconds, "compute")
    assert bounds.one_after_another == pytest.approx(0.1 + 0.01 + 14 / 180)
    unknown = roofline(chip, flops=0, memory_bytes=8.19e9, collectives=None)
    assert (unknown.network_seconds, unknown.bound) == (None, "memory")


def test_gpu_has_a_bound_of_its_memory_and_none_of_its_network():
    sums = Collective("all-reduce", ("data",), "f32", 0, 1, 1, 8 * 10**9, 8)
    bounds = roofline(find_accelerator("NVIDIA B200"), flops=0, memory_bytes=8e9, collectives=[sums])
    assert (bounds.memory_seconds, bounds.network_seconds) == (pytest.approx(1e-3), None)
    assert roofline(find_accelerator("TPU v3"), flops=0, memory_bytes=8e9, collectives=[sums]).at_least == 0


def test_what_remat_makes_again_is_counted():
    forward = training_flops(LARGE, 512, 76) / 3
    again = {remat: recomputed_flops(LARGE, 512, remat) for remat in ("none", "attention", "dots", "full")}
    assert again["none"] == 0
    assert again["attention"] == 24 * 2 * 512 * 512 * 1024
    assert again["dots"] == 2 * again["attention"]
    assert 0.9 * forward < again["full"] < forward  # all but the heads


@pytest.mark.parametrize(("attention", "products"), [("pallas", 1), ("triton", 3)])
def test_a_kernel_recomputes_products_with_and_without_remat_of_attention(attention, products):
    again = {remat: recomputed_flops(LARGE, 512, remat, attention) for remat in ("none", "attention")}
    assert again["none"] == again["attention"] == products * 24 * 2 * 512 * 512 * 1024


DESCRIBED = {
    "topology": "v5e:4x4", "num_slices": 2, "devices": 32, "mesh": {"data": 16, "fsdp": 2, "tensor": 1},
    "steps": [1, 900_000], "global_batch_size": 512, "gradient_accumulation": 2, "rows_a_device": 8, "seq_len": 128,
    "predictions": 20, "sequences": 1, "dtype": "bfloat16", "attention": "xla", "remat": "none", "fits": True,
    "peak_bytes": 10 << 30, "argument_bytes": 4 << 30, "temp_bytes": 7 << 30, "hbm_bytes": 16 << 30, "hbm_share": 0.625,
    "collectives": [
        {"kind": "all-reduce", "axes": ["data"], "dtype": "f32", "loops": 0, "instructions": 2, "count": 3,
         "bytes": 3 << 20, "devices": 16, "between_slices": True, "asynchronous": 3},
        {"kind": "all-gather", "axes": None, "dtype": "bf16", "loops": 1, "instructions": 1, "count": 24,
         "bytes": 1 << 20, "devices": 2, "between_slices": False, "asynchronous": 0},
    ],
    "collectives_unread": None, "model_flops": 1.25e14, "recomputed_flops": 0.0, "compile_seconds": 31.2,
    "roofline": {
        "compute_seconds": 0.04, "memory_seconds": 0.02, "network_seconds": None, "at_least_seconds": 0.04,
        "bound": "compute", "one_after_another_seconds": 0.06, "rows_per_second_at_most": 12_800.0,
    },
}  # fmt: skip


def test_a_step_in_text():
    text = render(DESCRIBED)
    for part in (
        "steps 1-900,000 on 2 x v5e:4x4: 32 devices, data=16 x fsdp=2",
        "512 rows of 128 tokens in 2 microbatches, 8 rows",
        "31 s",
        "peak            10.00  62% of 16.00",
        "all-reduce  data, between slices   f32      0         3             3          3.00",
        "all-gather  ?                     bf16      1        24             0          1.00",
        "40.0 ms (compute",
        "12,800 rows",
        "60.0 ms",
        "compute 40.0 ms, memory 20.0 ms, network unknown",
    ):
        assert part in text, text


def test_what_is_not_there_is_said():
    unread = {**DESCRIBED, "collectives": None, "collectives_unread": "a reason", "roofline": None}
    assert re.search("collectives: .*a reason", render(unread))
    assert "collectives: none" in render({**DESCRIBED, "collectives": []})
    over = {**DESCRIBED, "fits": False, "peak_bytes": 20 << 30, "hbm_share": 1.25}
    assert "DOES NOT FIT" in render(over)
    assert "4.00 GiB" in render(over)
